"""Routing by classification: the base model chooses among the routes of the nearest examples (paper section 3.4).

The routes are put to it as letters, and what it would write next is read off its log-probabilities, through whatever
policy serves it (`captrain.policies.Scorer`), so that an opening costs one forward pass and no sampling.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

from captrain.config import Count
from captrain.policies import ClosedQuestion
from captrain.routing.neighbours import Mass, Neighbours, ShareRouter
from captrain.routing.router import BASE, AskedModel, Example

Prompt = Literal["openings", "trajectories"]


class ClassifierRouter(ShareRouter):
    """Router that asks the base model. The routes of the nearest examples are offered to it as letters; a route's share
    is the next-token probability of its letter among those offered.

    Args:
        model: the base.
        neighbours: examples in the prompt, and the routes offered are theirs, the base always among them.
        prompt: what of an example is shown: its opening; or, as in the paper, also how it was solved, and what the
            capabilities are.
        characters: of one trajectory, at most.
        p: share that a composition of adapters must reach; null: the single best route.
        gate: whether adapters that have gained nothing are left out.
    """

    def __init__(
        self,
        model: AskedModel,
        *,
        neighbours: Count,
        prompt: Prompt = "openings",
        characters: Count = 1500,
        p: Mass | None = None,
        gate: bool = True,
    ) -> None:
        self.model, self.neighbours, self.p, self.gate = model, neighbours, p, gate
        self.prompt, self.characters = prompt, characters

    @property
    def detailed(self) -> bool:
        """True if examples must tell what their routes are for and how they were solved."""
        return self.prompt == "trajectories"

    def shares_among(self, index: Neighbours, openings: Sequence[str]) -> list[dict[str, float]]:
        """Compute for each opening the probability of each route that is offered."""
        offers = [self._offer(index, text) for text in openings]
        scores = self.model.scorer.answer_scores([question for _, question in offers])
        return [_shares(routes, row) for (routes, _), row in zip(offers, scores, strict=True)]

    def _offer(self, index: Neighbours, text: str) -> tuple[list[str], ClosedQuestion]:
        """Choose the routes that are offered for an opening, and put the question about them."""
        nearest = [example for _, example in index.of(text)]
        routes = sorted({example.route for example in nearest} - {BASE}) + [BASE]
        letters = {route: chr(ord("A") + number) for number, route in enumerate(routes)}
        question = (
            detailed_prompt(nearest, letters, text, self.characters)
            if self.detailed
            else classifier_prompt(nearest, letters, text)
        )
        return routes, ClosedQuestion([{"role": "user", "content": question}], tuple(letters.values()))


def _shares(routes: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """Normalise scores to the probability of each route; the base's alone where the model would answer with none of
    them."""
    chances = [math.exp(score) for score in scores]
    total = math.fsum(chances)
    return {route: chance / total for route, chance in zip(routes, chances, strict=True)} if total else {BASE: 1.0}


def classifier_prompt(nearest: Sequence[Example], letters: dict[str, str], text: str) -> str:
    """Word the question put to the classifier: the routes as letters, the nearest examples solved, and the new task.

    Args:
        nearest: examples, nearest first; the nearest stands last, beside the task.
        letters: route -> its letter, in the order in which they are offered.
        text: opening of the task.
    """
    choices = "\n".join(f"{letter}: {_named(route)}" for route, letter in letters.items())
    solved = "\n".join(f"Task: {example.text}\nAnswer: {letters[example.route]}" for example in reversed(nearest))
    return f"Which skill does the task need?\n{choices}\n{solved}\nTask: {text}\nAnswer:"


def detailed_prompt(nearest: Sequence[Example], letters: dict[str, str], text: str, characters: int) -> str:
    """Word the same question with what each skill is, and how each example was solved. The choices stand after the
    examples: where the model has no room for all, the farthest examples are cut off.

    Args:
        nearest: see `classifier_prompt`.
        letters: see there.
        text: see there.
        characters: of one trajectory, at most.
    """
    descriptions = {example.route: example.description for example in nearest}
    choices = "\n".join(
        f"{letter}: {_named(route)}{f' ({description})' if (description := descriptions.get(route)) else ''}"
        for route, letter in letters.items()
    )
    solved = "\n\n".join(
        f"Task: {example.text}\n{example.trajectory[:characters]}\nAnswer: {letters[example.route]}"
        for example in reversed(nearest)
    )
    return (
        f"Solved tasks, each with the letter of the skill that it needs:\n\n{solved}\n\n"
        f"Which skill does the next task need? Answer with its letter alone.\n{choices}\n\nTask: {text}\nAnswer:"
    )


def _named(route: str) -> str:
    return "none" if route == BASE else re.sub("_", " ", route)
