"""One adapter taught by the environments' own solutions: TRACE without a rollout of training.

A synthesized environment knows how each of its tasks is solved, and its passport holds that these solutions earn
everything. So targeted environments, single and pair, are also a source of targeted demonstrations: as many of each,
on training tasks that calibration has not played, for supervised fine-tuning (`captrain.training`) as the row `adp` has
it. Whatever the target's tasks are, none of their solutions is read.

What this compares with `adp` is the choice of demonstrations, at as many of them. Beside methods that learn from
rewards it has a supervision that they have not: the table says so. How good it is rests on who wrote the environments.
The embedded templates' solutions are without a fault; of those that a language model writes, the row says nothing.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from captrain.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.baselines.training import SFTBaseline
from captrain.config import Spec
from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.models import Chat
from captrain.training import (
    TOO_LONG,
    Demonstration,
    FineTuned,
    FineTuning,
    TrainingEnvironment,
    demonstration_of,
    fine_tune,
    fine_tuning_settings,
    learner,
    training_environments,
)

WRONG = "not a whole solution"


@dataclass(frozen=True)
class SolutionLesson:
    """What is to be trained: the specification, the folder of the base model, and the environments."""

    spec: Spec
    base: Path
    environments: tuple[TrainingEnvironment, ...]
    name = "solutions"

    def identity(self) -> tuple[object, ...]:
        """What decides the adapter."""
        spec = self.spec
        return spec.seed, spec.policy, spec.trainer, spec.baselines.solutions, self.base, self.environments


def solution_lessons(spec: Spec, project: Path = Path()) -> list[SolutionLesson]:
    """The one lesson in all environments of a project that have a passport, or none."""
    results = project / "results"
    environments = (*training_environments(results / "environments"), *training_environments(results / "pairs"))
    return [SolutionLesson(spec, project / "artifacts/base", environments)] if environments else []


def teach_solutions(lesson: SolutionLesson) -> FineTuned:
    """Train the adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the base cannot be trained, an environment is missing or damaged, or no solution can be used.
        EnvironmentFault: an environment broke its contract.
    """
    spec, settings = lesson.spec, lesson.spec.baselines.solutions
    alternative = "set baselines.solutions.run to false"
    policy = learner(spec.policy, lesson.base, spec.machine, "solutions", alternative)
    rows: list[Demonstration] = []
    left_out: Counter[str] = Counter()
    card = ""
    for index, environment in enumerate(lesson.environments):
        share = settings.demonstrations // len(lesson.environments)
        share += index < settings.demonstrations % len(lesson.environments)
        target, before = environment.target(spec.machine), len(rows)
        chat, size = Chat(policy.tokenizer, target.tools), target.size("training")
        last = environment.skip + share if size is None else min(size, environment.skip + share)
        for task in target.tasks("training", last)[environment.skip :]:
            messages = target.play(task, target.reference(task))
            if not target.score(task, messages).success:
                left_out[WRONG] += 1
            elif (row := demonstration_of(chat, messages, policy.max_length)) is None:
                left_out[TOO_LONG] += 1
            else:
                rows.append(row)
        card += f"| of these from {environment.name}, fingerprint {target.fingerprint} | {len(rows) - before} |\n"
    if not rows:
        reasons = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "there are no further tasks"
        raise UserError(
            f"no solution of the environments can be trained on ({reasons})",
            "set baselines.solutions.run to false",
        )
    recipe, key = fine_tuning_settings(spec, settings), [code_digest(teach_solutions)]
    discarded = dict(sorted(left_out.items()))
    return fine_tune(
        FineTuning("solutions", lesson.base, recipe, rows, discarded, card, spec.machine.accelerate.precision, key),
        policy,
    )


BASELINE = SFTBaseline(
    name="solutions",
    label="TRACE, solutions",
    order=8,
    lessons=solution_lessons,
    teach=teach_solutions,
    rests_on=(DIAGNOSIS, CALIBRATION),
    unequal="trains on the environments' own solutions",
    compared_with=("grpo_target", "adp"),
)
