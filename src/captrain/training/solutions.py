"""Trains adapters on the solutions of synthesized environments, without a reward.

A synthesized environment knows the solution of each of its tasks, and its passport certifies that solutions earn full
reward. A lesson takes a number of solutions from each of its environments, on training tasks that calibration has not
played. The generalist learns evenly from all environments, a specialist from one environment. No solution of the
target's tasks is read.

With `source: rollouts`, the agent's own passed rollouts in the environments replace the solutions. All rollouts that
are played for them count.

The solutions of captrain's templates are flawless; those of a language model would not be. To measure the effect, a
known share of solutions can be altered before they are played, at random or always at the same step. The environment's
score can filter out altered solutions. Which solution is altered, and how, depends only on its task.
"""

import copy
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from captrain.agents import collect
from captrain.contract import CheckedEnvironment, calls_of
from captrain.errors import UserError
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.records import Message, Task
from captrain.run import Component, FaultSettings, Machine, SolutionSource, code_digest
from captrain.training.jobs import FineTuned, Learner, TrainingEnvironment, learner
from captrain.training.sft import TOO_LONG, Demonstration, FineTuning, Settings, demonstration_of, fine_tune

WRONG = "not a whole solution"
FAILED = "failed rollouts"
DIGIT = re.compile(r"\d")


NO_FAULTS = FaultSettings(rate=0.0, kind="random", filtered=True)


def solution_with_faults(target: CheckedEnvironment, task: Task, faults: FaultSettings) -> list[Message]:
    """Return the assistant messages of a task's solution, altered with the probability `faults.rate`.

    A random fault drops a call, or changes a digit of an argument. A systematic fault is the environment's
    `broken(task)`, which breaks the step of its capability. If the environment has no `broken`, the last message with a
    call is dropped.
    """
    actions, rng = target.reference(task), random.Random(f"fault-{task.id}")
    if rng.random() >= faults.rate:
        return actions
    return _broken(target, task, actions) if faults.kind == "systematic" else _altered(actions, rng)


@dataclass(frozen=True)
class SolutionLesson:
    """One adapter to train on solutions.

    Args:
        name: of the adapter.
        stage: workspaces lie in .cache/<stage>.
        base: folder of the base model.
        policy: the policy component.
        settings: settings of the fine-tuning.
        counts: for each environment, the number of tasks to demonstrate, or to play if the source is rollouts.
        dose: total number of demonstrations to train on. If the source is rollouts, passed rollouts are few, so more
            epochs make up the dose.
        source: "reference" for solutions of the environments, "rollouts" for passed rollouts.
        faults: faults to put into solutions.
        machine: where it is trained. It does not change the result.
    """

    name: str
    stage: str
    base: Path
    policy: Component
    settings: Settings
    counts: tuple[tuple[TrainingEnvironment, int], ...]
    dose: int
    source: SolutionSource
    faults: FaultSettings
    machine: Machine


def teach_solutions(lesson: SolutionLesson) -> FineTuned:
    """Train the adapter and cache it in its workspace.

    Raises:
        UserError: the base cannot be trained, an environment is missing or damaged, or no solution can be used.
        EnvironmentFault: an environment broke its contract.
    """
    remedy = f"set baselines.{lesson.stage}.run to false"
    policy = learner(lesson.policy, lesson.base, lesson.machine, lesson.stage, remedy)
    is_own = lesson.source == "rollouts"
    rows, left_out, costs, card = list[Demonstration](), Counter[str](), list[LedgerEntry](), ""
    for environment, count in lesson.counts:
        target = environment.target(lesson.machine)
        size = target.size("training")
        last = environment.skip + count if size is None else min(size, environment.skip + count)
        tasks = target.tasks("training", last, fewer=True)[environment.skip :]
        if is_own:
            seed = lesson.settings["seed"]
            rollouts = collect(policy, target, tasks, purpose="training", seed=seed, quiet=True)
            passed = [rollout for rollout in rollouts if rollout.outcome == "passed"]
            part = [Demonstration(rollout.token_ids, rollout.mask) for rollout in passed]
            left_out += Counter({FAILED: len(rollouts) - len(passed)})
            costs.append(ledger_entry(rollouts, stage=lesson.stage, method=lesson.stage, item=target.name))
        else:
            part = solution_rows(target, tasks, policy, left_out, lesson.faults)
        rows += part
        source = f" of {len(tasks)} rollouts of its own" if is_own else ""
        card += f"| of these from {environment.name}, fingerprint {target.fingerprint} | {len(part)}{source} |\n"
    if not rows:
        reasons = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "there are no further tasks"
        raise UserError(f"no solution of the environments can be trained on ({reasons})", remedy)
    settings = lesson.settings.copy()
    if is_own:
        settings["epochs"] *= max(1, round(lesson.dose / len(rows)))
    job = FineTuning(
        lesson.name,
        lesson.base,
        settings,
        rows,
        dict(sorted(left_out.items())),
        card,
        lesson.machine,
        [code_digest(teach_solutions)],
        lesson.stage,
    )
    return replace(fine_tune(job, policy), costs=tuple(costs))


def solution_rows(
    target: CheckedEnvironment,
    tasks: Sequence[Task],
    policy: Learner,
    left_out: Counter[str],
    faults: FaultSettings,
    wrong: str = WRONG,
) -> list[Demonstration]:
    """Tokenize the solutions of tasks, with faults.

    Solutions that cannot be used are counted in `left_out` by reason. `wrong` is the reason for solutions that do not
    earn full reward.
    """
    chat, rows = policy.chat(target.tools), list[Demonstration]()
    for task in tasks:
        messages = target.play(task, solution_with_faults(target, task, faults))
        if faults.filtered and not target.score(task, messages).success:
            left_out[wrong] += 1
        elif (row := demonstration_of(chat, messages, policy.max_length)) is None:
            left_out[TOO_LONG] += 1
        else:
            rows.append(row)
    return rows


def _broken(target: CheckedEnvironment, task: Task, actions: Sequence[Message]) -> list[Message]:
    broken: Callable[[Any], list[Message]] | None = getattr(target.environment, "broken", None)
    if broken is not None:
        return target.call("broken", task.id, lambda: broken(task.model_dump()))
    calling = [index for index, action in enumerate(actions) if calls_of(action)]
    return [action for index, action in enumerate(actions) if index not in calling[-1:]]


def _altered(actions: Sequence[Message], rng: random.Random) -> list[Message]:
    """Drop a message with calls from a solution or, with equal chance, change one digit of one argument.

    A solution without calls is returned unchanged.
    """
    calling = [index for index, action in enumerate(actions) if calls_of(action)]
    if not calling:
        return [*actions]
    index = rng.choice(calling)
    digits = [
        (call, name, match.start())
        for call, (_, arguments) in enumerate(calls_of(actions[index]))
        for name, value in arguments.items()
        if isinstance(value, str)
        for match in DIGIT.finditer(value)
    ]
    if not digits or rng.random() < 0.5:
        return [action for number, action in enumerate(actions) if number != index]
    call, name, place = rng.choice(digits)
    action = copy.deepcopy(actions[index])
    function, (_, arguments) = action["tool_calls"][call]["function"], calls_of(action)[call]
    digit = str((int(arguments[name][place]) + rng.randrange(1, 10)) % 10)
    value = arguments[name][:place] + digit + arguments[name][place + 1 :]
    function["arguments"] = {**arguments, name: value}
    return [*actions[:index], action, *actions[index + 1 :]]
