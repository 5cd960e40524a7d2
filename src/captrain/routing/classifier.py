"""Routing by classification: the base model chooses among the routes of the nearest examples (paper section 3.4).

The prompt offers the routes as letters. Their next-token probabilities come from whatever policy serves the base
(`captrain.agents.Scorer`), so an opening costs one forward pass and no sampling.
"""

import math
from collections.abc import Sequence
from typing import Literal

from captrain.agents import ClosedQuestion
from captrain.routing.compositions import BASE
from captrain.routing.retrieval import Mass, Neighbours, ShareRouter
from captrain.routing.router import AskedModel, Example
from captrain.run import Count

Prompt = Literal["openings", "trajectories"]


class ClassifierRouter(ShareRouter):
    """Router that asks the base model: a route's share is the next-token probability of its letter among the offered
    letters.

    Args:
        model: the base.
        neighbours: examples in the prompt; their routes and the base are offered.
        prompt: the parts of an example that are shown: its opening or, as in the paper, also its solution and the
            descriptions of the capabilities.
        characters: most characters of one trajectory.
        p: share that a composition of adapters must reach; null: the single best route.
        gate: leave out adapters that have gained nothing.
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

    def shares_among(self, index: Neighbours, openings: Sequence[str]) -> list[dict[str, float]]:
        """Return the probability of each offered route for each opening; only the base's if all letters have none."""
        offers: list[list[str]] = []
        questions: list[ClosedQuestion] = []
        for text in openings:
            nearest = [example for _, example in index.of(text)]
            routes = sorted({example.route for example in nearest} - {BASE}) + [BASE]
            letters = {route: chr(ord("A") + number) for number, route in enumerate(routes)}
            content = self._question(nearest, letters, text)
            offers.append(routes)
            questions.append(ClosedQuestion([{"role": "user", "content": content}], tuple(letters.values())))
        rows = []
        for routes, scores in zip(offers, self.model.scorer.answer_scores(questions), strict=True):
            chances = [math.exp(score) for score in scores]
            total = math.fsum(chances)
            shares = {route: chance / total for route, chance in zip(routes, chances, strict=True)} if total else {}
            rows.append(shares or {BASE: 1.0})
        return rows

    def _question(self, nearest: Sequence[Example], letters: dict[str, str], text: str) -> str:
        """Word the question: the routes as letters, the nearest examples with solutions, and the new task.

        The nearest example comes last, next to the task. With trajectories the choices follow the examples: if the
        prompt is too long, the farthest examples are cut off.
        """
        names = {route: "none" if route == BASE else route.replace("_", " ") for route in letters}
        if self.prompt == "openings":
            choices = "\n".join(f"{letter}: {names[route]}" for route, letter in letters.items())
            solved = "\n".join(f"Task: {example.text}\nAnswer: {letters[example.route]}" for example in nearest[::-1])
            return f"Which skill does the task need?\n{choices}\n{solved}\nTask: {text}\nAnswer:"
        for example in nearest:
            if example.description:
                names[example.route] = f"{example.route.replace('_', ' ')} ({example.description})"
        choices = "\n".join(f"{letter}: {names[route]}" for route, letter in letters.items())
        solved = "\n\n".join(
            f"Task: {example.text}\n{example.trajectory[: self.characters]}\nAnswer: {letters[example.route]}"
            for example in nearest[::-1]
        )
        return (
            f"Solved tasks, each with the letter of the skill that it needs:\n\n{solved}\n\n"
            f"Which skill does the next task need? Answer with its letter alone.\n{choices}\n\nTask: {text}\nAnswer:"
        )
