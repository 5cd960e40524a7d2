"""Rows whose adapter is fine-tuned on demonstrations, without training rollouts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.comparison.baselines.baseline import DIAGNOSIS, Baseline, Supervision
from captrain.comparison.baselines.untargeted import untargeted_environments
from captrain.errors import UserError
from captrain.ledger import guard_split
from captrain.records import Rollout, counted, load
from captrain.run import Spec, code_digest, launch
from captrain.training import (
    LIBRARIES,
    NO_FAULTS,
    SFT_COLUMNS,
    Demonstration,
    FineTuned,
    FineTuning,
    Learner,
    SolutionLesson,
    fine_tune,
    fine_tuning_settings,
    learner,
    publish_adapters,
    solution_rows,
    teach_solutions,
)


@dataclass(frozen=True)
class Lesson:
    """Job that trains the adapter of a row.

    Args:
        name: name of the row.
        spec: the whole specification.
        base: folder of the base model.
        source: file of demonstrations; None if the job creates them itself.
        rollouts: number of rollouts that the job plays.
    """

    name: str
    spec: Spec
    base: Path
    source: Path | None = None
    rollouts: int = 0

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the adapter."""
        spec, section = self.spec, getattr(self.spec.baselines, self.name)
        return spec.seed, spec.benchmark, spec.policy, spec.trainer, section, self.base, self.source, self.rollouts


@dataclass(frozen=True)
class Demonstrated:
    """Demonstrations of a lesson.

    Args:
        rows: rows to train on.
        left_out: reason -> number of unusable demonstrations.
        card: lines of the model card about the source of the rows.
        key: identity of the source of the rows.
    """

    rows: Sequence[Demonstration]
    left_out: dict[str, int]
    card: str
    key: str


def teach(lesson: Lesson, demonstrate: Callable[[Lesson, Learner], Demonstrated]) -> FineTuned:
    """Train the adapter of a lesson, or return it from its workspace.

    Raises:
        UserError: the base cannot be trained, or `demonstrate` finds no usable demonstration.
    """
    spec, section = lesson.spec, getattr(lesson.spec.baselines, lesson.name)
    policy = learner(spec.policy, lesson.base, spec.machine, lesson.name, f"set baselines.{lesson.name}.run to false")
    shown = demonstrate(lesson, policy)
    recipe = fine_tuning_settings(spec, section.epochs, section.learning_rate)
    key = [code_digest(demonstrate), shown.key]
    job = FineTuning(lesson.name, lesson.base, recipe, shown.rows, shown.left_out, shown.card, spec.machine, key)
    return fine_tune(job, policy)


@dataclass(frozen=True, kw_only=True)
class SFTBaseline(Baseline):
    """A row that is fine-tuned on demonstrations.

    Args:
        lessons: makes the jobs, from the specification and the project's folder.
        teach: trains one job.
    """

    lessons: Callable[[Spec, Path], Sequence[object]]
    teach: Callable[..., FineTuned]
    learns_from: Supervision = "demonstrations"

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """See `Baseline.demonstrations`."""
        section = self.section(spec)
        return (section.demonstrations, section.epochs) if section.run else (0, 0)

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        self.publish_nothing()
        adapters = launch.run(self.teach, self.lessons(spec, Path()), spec.machine, self.name, LIBRARIES)
        if adapters:
            publish_adapters(adapters, self.name, columns=SFT_COLUMNS)
        count = sum(adapter.demonstrations for adapter in adapters)
        discarded = sum(sum(adapter.left_out.values()) for adapter in adapters)
        return f"{counted(count, 'demonstration')}, left out {discarded}"

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        publish_adapters([], self.name, self.name)


def untargeted_lessons(spec: Spec, project: Path) -> Sequence[SolutionLesson]:
    """Make the job of the row `awm_sft`, and write its environments to the row's results.

    Raises:
        UserError: the source cannot be used, or too few environments earn a passport.
    """
    section, name = spec.baselines.awm_sft, "awm_sft"
    environments = untargeted_environments(spec, section, project / "results" / name)
    share, remainder = divmod(section.demonstrations, len(environments))
    return [
        SolutionLesson(
            name=name,
            stage=name,
            base=project / "artifacts/base",
            policy=spec.exploring(),
            settings=fine_tuning_settings(spec, section.epochs, section.learning_rate),
            counts=tuple((place, share + (number < remainder)) for number, place in enumerate(environments)),
            dose=section.demonstrations,
            source="reference",
            faults=NO_FAULTS,
            machine=spec.machine,
        )
    ]


AWM_SFT = SFTBaseline(
    name="awm_sft",
    label="AWM, solutions",
    order=3,
    lessons=untargeted_lessons,
    teach=teach_solutions,
    unequal="trains on demonstrations",
    compared_with=("solutions",),
)
"""The solutions of the untargeted environments of the row `awm`. Method and dose are those of the row `solutions`: the
difference between the two rows is the value of targeting."""


def failed_tasks(lesson: Lesson, policy: Learner) -> Demonstrated:
    """Demonstrate the target's own solutions of the tasks that failed in the diagnosis.

    Raises:
        UserError: no failed task has a usable solution.
        EnvironmentFault: the benchmark broke its contract.
    """
    target = load_benchmark(lesson.spec.benchmark, lesson.spec.machine)
    assert lesson.source is not None
    failed = [rollout.task for rollout in load(lesson.source, Rollout) if rollout.outcome == "failed"]
    guard_split(failed, "diagnosis")
    left_out, tasks = Counter[str](), [*{task.id: task for task in failed}.values()]
    rows = solution_rows(target, tasks, policy, left_out, NO_FAULTS, "no whole solution is known")
    if not rows:
        reasons = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "no rollout failed"
        raise UserError(
            f"no solution of a failed task can be trained on ({reasons})", f"set baselines.{lesson.name}.run to false"
        )
    demonstrations = [*islice(cycle(rows), lesson.spec.baselines.failures_sft.demonstrations)]
    count = min(len(rows), len(demonstrations))
    card = f"| of these distinct, each of a failed task of {target.name} | {count} |\n"
    return Demonstrated(demonstrations, dict(sorted(left_out.items())), card, target.fingerprint)


def failure_lessons(spec: Spec, project: Path) -> Sequence[Lesson]:
    """Make the job of the row `failures_sft`."""
    rollouts = project / "artifacts/rollouts/discovery.jsonl"
    return [Lesson("failures_sft", spec, project / "artifacts/base", rollouts)]


def teach_failures(lesson: Lesson) -> FineTuned:
    """Train the adapter of the row `failures_sft`."""
    return teach(lesson, failed_tasks)


FAILURES_SFT = SFTBaseline(
    name="failures_sft",
    label="references of failures",
    order=9,
    lessons=failure_lessons,
    teach=teach_failures,
    rests_on=(DIAGNOSIS,),
    unequal="trains on the target's own solutions of diagnosed tasks",
    compared_with=("solutions",),
)
"""One adapter trained on the target's own solutions of the tasks that failed in the diagnosis, without environments.

This row leaves out synthesis: it learns the failed tasks by heart. Each solution is repeated, evenly, up to the number
of demonstrations of the row `solutions`, so the two rows have the same dose. No other row has solutions of the target,
and the table says so.
"""
