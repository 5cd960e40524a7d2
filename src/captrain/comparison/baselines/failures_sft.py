"""One adapter taught by the target's own solutions of the tasks that failed in the diagnosis: no environment.

What is left out is synthesis: the failures are the same, their capabilities are not practised on tasks made for them,
but the failed tasks themselves are learnt by heart, from the benchmark's reference solutions. Each is repeated, evenly,
up to as many demonstrations as the row `solutions` has, so that the two differ in what is demonstrated and not in how
much. It has a supervision that no other row has, solutions of the target; the table says so.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.comparison.baselines.baseline import DIAGNOSIS
from captrain.comparison.baselines.training import SFTBaseline
from captrain.config import Spec
from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.ledger import guard_split
from captrain.records import Rollout, load
from captrain.training import (
    TOO_LONG,
    Demonstration,
    FineTuned,
    FineTuning,
    demonstration_of,
    fine_tune,
    fine_tuning_settings,
    learner,
)

NAME = "failures_sft"
UNSOLVED = "no whole solution is known"


@dataclass(frozen=True)
class FailureLesson:
    """Job of the row: the specification, the folder of the base model, and that of the diagnostic rollouts."""

    spec: Spec
    base: Path
    rollouts: Path
    name = NAME

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the adapter."""
        spec, settings = self.spec, self.spec.baselines.failures_sft
        return spec.seed, spec.policy, spec.benchmark, spec.trainer, settings, self.base, self.rollouts


def failure_lessons(spec: Spec, project: Path = Path()) -> list[FailureLesson]:
    """Make the one lesson of a project."""
    return [FailureLesson(spec, project / "artifacts/base", project / "artifacts/rollouts/discovery.jsonl")]


def teach_failures(lesson: FailureLesson) -> FineTuned:
    """Train the adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the base cannot be trained, or no failed task has a solution that can be used.
        EnvironmentFault: the benchmark broke its contract.
    """
    spec, settings = lesson.spec, lesson.spec.baselines.failures_sft
    policy = learner(spec.policy, lesson.base, spec.machine, NAME, f"set baselines.{NAME}.run to false")
    target = load_benchmark(spec.benchmark, spec.machine)
    failed = [rollout.task for rollout in load(lesson.rollouts, Rollout) if rollout.outcome == "failed"]
    guard_split(failed, "diagnosis")
    tasks = {task.id: task for task in failed}
    chat = policy.chat(target.tools)
    rows: list[Demonstration] = []
    left_out: Counter[str] = Counter()
    for task in tasks.values():
        messages = target.play(task, target.reference(task))
        if not target.score(task, messages).success:
            left_out[UNSOLVED] += 1
        elif (row := demonstration_of(chat, messages, policy.max_length)) is None:
            left_out[TOO_LONG] += 1
        else:
            rows.append(row)
    if not rows:
        reasons = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "no rollout failed"
        raise UserError(
            f"no solution of a failed task can be trained on ({reasons})", f"set baselines.{NAME}.run to false"
        )
    demonstrations = [*islice(cycle(rows), settings.demonstrations)]
    card = f"| of these distinct, each of a failed task of {target.name} | {min(len(rows), len(demonstrations))} |\n"
    recipe = fine_tuning_settings(spec, settings.epochs, settings.learning_rate)
    key = [code_digest(teach_failures), target.fingerprint]
    discarded = dict(sorted(left_out.items()))
    return fine_tune(FineTuning(NAME, lesson.base, recipe, demonstrations, discarded, card, spec.machine, key), policy)


BASELINE = SFTBaseline(
    name=NAME,
    label="references of failures",
    order=9,
    lessons=failure_lessons,
    teach=teach_failures,
    rests_on=(DIAGNOSIS,),
    unequal="trains on the target's own solutions of diagnosed tasks",
    compared_with=("solutions",),
)
