"""Rows that are fine-tuned on demonstrations, without a rollout of training."""

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
from captrain.records import Rollout, load
from captrain.run import Spec, code_digest, launch
from captrain.training import (
    LIBRARIES,
    NO_FAULTS,
    SFT_COLUMNS,
    FineTuned,
    FineTuning,
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
    """Job of a row that is taught on the target: its name, the specification, the folder of the base model, the file
    that it learns from (None where it makes its own), and the rollouts that it plays."""

    name: str
    spec: Spec
    base: Path
    source: Path | None = None
    rollouts: int = 0

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the adapter."""
        spec, section = self.spec, getattr(self.spec.baselines, self.name)
        return spec.seed, spec.benchmark, spec.policy, spec.trainer, section, self.base, self.source, self.rollouts


@dataclass(frozen=True, kw_only=True)
class SFTBaseline(Baseline):
    """A row that is fine-tuned on demonstrations. `lessons` says on which, in the project's folder; `teach` trains on
    one of them."""

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
        return f"{count} demonstrations, left out {discarded}"

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        publish_adapters([], self.name, self.name)


def untargeted_lessons(spec: Spec, project: Path) -> Sequence[SolutionLesson]:
    """Make the one lesson of the row `awm_sft`, in environments that are written to the row's results.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.

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
"""The solutions of environments that no diagnosis asked for, those of the row `awm`; what is taught, how and in which
dose is as in the row `solutions`. So beside that it shows what the targeting is worth: the supervision is of one kind,
and only what the environments are about differs."""


def teach_failures(lesson: Lesson) -> FineTuned:
    """Train the adapter of the row `failures_sft`, or return it from its workspace when it is there already.

    Raises:
        UserError: the base cannot be trained, or no failed task has a solution that can be used.
        EnvironmentFault: the benchmark broke its contract.
    """
    spec, settings = lesson.spec, lesson.spec.baselines.failures_sft
    remedy = f"set baselines.{lesson.name}.run to false"
    policy = learner(spec.policy, lesson.base, spec.machine, lesson.name, remedy)
    target = load_benchmark(spec.benchmark, spec.machine)
    assert lesson.source is not None
    failed = [rollout.task for rollout in load(lesson.source, Rollout) if rollout.outcome == "failed"]
    guard_split(failed, "diagnosis")
    left_out, tasks = Counter[str](), [*{task.id: task for task in failed}.values()]
    rows = solution_rows(target, tasks, policy, left_out, NO_FAULTS, "no whole solution is known")
    if not rows:
        reasons = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "no rollout failed"
        raise UserError(f"no solution of a failed task can be trained on ({reasons})", remedy)
    demonstrations = [*islice(cycle(rows), settings.demonstrations)]
    job = FineTuning(
        lesson.name,
        lesson.base,
        fine_tuning_settings(spec, settings.epochs, settings.learning_rate),
        demonstrations,
        dict(sorted(left_out.items())),
        f"| of these distinct, each of a failed task of {target.name} | {min(len(rows), len(demonstrations))} |\n",
        spec.machine,
        [code_digest(teach_failures), target.fingerprint],
    )
    return fine_tune(job, policy)


FAILURES_SFT = SFTBaseline(
    name="failures_sft",
    label="references of failures",
    order=9,
    lessons=lambda spec, project: [
        Lesson("failures_sft", spec, project / "artifacts/base", project / "artifacts/rollouts/discovery.jsonl")
    ],
    teach=teach_failures,
    rests_on=(DIAGNOSIS,),
    unequal="trains on the target's own solutions of diagnosed tasks",
    compared_with=("solutions",),
)
"""One adapter taught by the target's own solutions of the tasks that failed in the diagnosis: no environment.

What is left out is synthesis: the failures are the same, their capabilities are not practised on tasks made for them,
but the failed tasks themselves are learnt by heart, from the benchmark's reference solutions. Each is repeated, evenly,
up to as many demonstrations as the row `solutions` has, so that the two differ in what is demonstrated and not in how
much. It has a supervision that no other row has, solutions of the target; the table says so.
"""
