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
from typing import Any

from captrain.config import Spec
from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.models import Chat
from captrain.training import LONG, Place, Row, Taught, learner, places_of, recipe_of, row_of, taught

WRONG = "not a whole solution"


@dataclass(frozen=True)
class Lesson:
    """What is to be trained: the specification, the folder of the base model, and the environments."""

    spec: Spec
    base: Path
    places: tuple[Place, ...]
    name = "references"

    def identity(self) -> tuple[Any, ...]:
        """What decides the adapter."""
        spec = self.spec
        return spec.seed, spec.policy, spec.trainer, spec.baselines.references, self.base, self.places


def lessons(spec: Spec, project: Path = Path()) -> list[Lesson]:
    """The one lesson in all environments of a project that have a passport, or none."""
    results = project / "results"
    places = (*places_of(results / "environments"), *places_of(results / "pairs"))
    return [Lesson(spec, project / "artifacts/base", places)] if places else []


def teach(lesson: Lesson) -> Taught:
    """Train the adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the base cannot be trained, an environment is missing or damaged, or no solution can be used.
        EnvironmentFault: an environment broke its contract.
    """
    spec, asked = lesson.spec, lesson.spec.baselines.references
    policy = learner(spec.policy, lesson.base, spec.machine, "references", "set baselines.references.run to false")
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    card = ""
    for at, place in enumerate(lesson.places):
        share = asked.demonstrations // len(lesson.places) + (at < asked.demonstrations % len(lesson.places))
        target, before = place.target(spec.machine), len(rows)
        chat, size = Chat(policy.tokenizer, target.tools), target.size("training")
        last = place.skip + share if size is None else min(size, place.skip + share)
        for task in target.tasks("training", last)[place.skip :]:
            messages = target.play(task, target.reference(task))
            if not target.score(task, messages).success:
                left_out[WRONG] += 1
            elif (row := row_of(chat, messages, policy.room)) is None:
                left_out[LONG] += 1
            else:
                rows.append(row)
        card += f"| of these from {place.name}, fingerprint {target.fingerprint} | {len(rows) - before} |\n"
    if not rows:
        why = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "there are no further tasks"
        raise UserError(
            f"no solution of the environments can be trained on ({why})", "set baselines.references.run to false"
        )
    key = [code_digest(teach)]
    return taught(
        "references", rows, dict(sorted(left_out.items())), recipe_of(spec, asked), lesson.base, policy, card, key
    )  # fmt: skip
