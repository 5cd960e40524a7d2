"""Adapters taught by the environments' own solutions: TRACE's knowledge without a reward.

A synthesized environment knows how each of its tasks is solved, and its passport holds that these solutions earn
everything. So targeted environments, single and pair, are a source of targeted demonstrations, on training tasks that
calibration has not played. A lesson takes a number of them from each of its environments: all environments evenly for
the adapter over all capabilities (the generalist), one environment for a specialist. Whatever the target's tasks are,
none of their solutions is read.

Where nobody has written solutions, the agent's own passed rollouts in the environments take their place, and every
rollout played for them is counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from captrain.config import Component, Machine, SolutionSource
from captrain.contract import Target
from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.records import Task
from captrain.rollouts import collect
from captrain.training.faults import Faults
from captrain.training.jobs import Learner, TrainingEnvironment, learner
from captrain.training.sft import TOO_LONG, Demonstration, FineTuned, FineTuning, Settings, demonstration_of, fine_tune

WRONG = "not a whole solution"
FAILED = "failed rollouts"


@dataclass(frozen=True)
class SolutionLesson:
    """Job of teaching one adapter by solutions.

    Args:
        name: of the adapter.
        stage: whose it is; its workspaces lie in .cache/<stage>.
        base: folder of the base model.
        policy: the policy component.
        settings: of the fine-tuning.
        counts: how many tasks of each environment are demonstrated, or played where the source is rollouts.
        dose: demonstrations that are seen in all; passed rollouts are few, and are seen as often as that takes.
        source: where demonstrations come from.
        faults: of solutions.
        machine: where it is trained; no part of the result.
    """

    name: str
    stage: str
    base: Path
    policy: Component
    settings: Settings
    counts: tuple[tuple[TrainingEnvironment, int], ...]
    dose: int
    source: SolutionSource
    faults: Faults
    machine: Machine

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the adapter."""
        faults = (self.faults.rate, self.faults.kind, self.faults.filtered)
        return self.name, self.base, self.policy, self.settings, self.counts, self.dose, self.source, faults


@dataclass(frozen=True)
class _Demonstrations:
    """Yield of one environment: rows, why others were left out, the lines of the card, what it cost."""

    rows: list[Demonstration]
    left_out: Counter[str]
    card: str
    costs: list[LedgerEntry]


def teach_solutions(lesson: SolutionLesson) -> FineTuned:
    """Train the adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the base cannot be trained, an environment is missing or damaged, or no solution can be used.
        EnvironmentFault: an environment broke its contract.
    """
    remedy = f"set baselines.{lesson.stage}.run to false"
    policy = learner(lesson.policy, lesson.base, lesson.machine, lesson.stage, remedy)
    parts = [_demonstrations(lesson, environment, count, policy) for environment, count in lesson.counts]
    rows = [row for part in parts for row in part.rows]
    left_out = sum((part.left_out for part in parts), Counter[str]())
    if not rows:
        reasons = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "there are no further tasks"
        raise UserError(f"no solution of the environments can be trained on ({reasons})", remedy)
    settings = lesson.settings.copy()
    if lesson.source == "rollouts":
        settings["epochs"] *= max(1, round(lesson.dose / len(rows)))
    tuned = fine_tune(
        FineTuning(
            lesson.name,
            lesson.base,
            settings,
            rows,
            dict(sorted(left_out.items())),
            "".join(part.card for part in parts),
            lesson.machine,
            [code_digest(teach_solutions)],
            lesson.stage,
        ),
        policy,
    )
    return replace(tuned, costs=tuple(entry for part in parts for entry in part.costs))


def _demonstrations(
    lesson: SolutionLesson, environment: TrainingEnvironment, count: int, policy: Learner
) -> _Demonstrations:
    target = environment.target(lesson.machine)
    size = target.size("training")
    last = environment.skip + count if size is None else min(size, environment.skip + count)
    tasks = target.tasks("training", last, fewer=True)[environment.skip :]
    demonstrate = _of_rollouts if lesson.source == "rollouts" else _of_references
    part = demonstrate(lesson, target, tasks, policy)
    source = f" of {len(tasks)} rollouts of its own" if lesson.source == "rollouts" else ""
    card = f"| of these from {environment.name}, fingerprint {target.fingerprint} | {len(part.rows)}{source} |\n"
    return replace(part, card=card)


def _of_references(lesson: SolutionLesson, target: Target, tasks: Sequence[Task], policy: Learner) -> _Demonstrations:
    chat, rows, left_out = policy.chat(target.tools), list[Demonstration](), Counter[str]()
    for task in tasks:
        messages = target.play(task, lesson.faults.solution(target, task))
        if lesson.faults.filtered and not target.score(task, messages).success:
            left_out[WRONG] += 1
        elif (row := demonstration_of(chat, messages, policy.max_length)) is None:
            left_out[TOO_LONG] += 1
        else:
            rows.append(row)
    return _Demonstrations(rows, left_out, "", [])


def _of_rollouts(lesson: SolutionLesson, target: Target, tasks: Sequence[Task], policy: Learner) -> _Demonstrations:
    seed = lesson.settings["seed"]
    rollouts = collect(policy, target, tasks, purpose="training", seed=seed, quiet=True)
    passed = [rollout for rollout in rollouts if rollout.outcome == "passed"]
    entry = ledger_entry(rollouts, stage=lesson.stage, method=lesson.stage, item=target.name)
    return _Demonstrations(
        [Demonstration(rollout.token_ids, rollout.mask) for rollout in passed],
        Counter({FAILED: len(rollouts) - len(passed)}),
        "",
        [entry],
    )
