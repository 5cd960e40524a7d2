"""Routing by classification: the base model chooses among the routes of the nearest examples (paper section 3.4).

The routes are put to it as letters, and what it would write next is read off its logits, so that an opening costs one
forward pass and no sampling.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from captrain.config import Count
from captrain.routing.neighbours import Mass, Neighbours, ShareRouter
from captrain.routing.router import BASE, Example


class ClassifierRouter(ShareRouter):
    """The routes of the nearest examples are offered to the base model as letters; a route's share is the next-token
    probability of its letter among those offered.

    Args:
        model: folder of the base model.
        neighbours: examples in the prompt, and the routes offered are theirs, the base always among them.
        p: share that a composition of adapters must reach; null: the single best route.
        gate: whether adapters that have gained nothing are left out.
    """

    def __init__(self, model: Path, *, neighbours: Count, p: Mass | None = None, gate: bool = True) -> None:
        self.model, self.neighbours, self.p, self.gate = model, neighbours, p, gate

    def shares_among(self, index: Neighbours, openings: Sequence[str]) -> list[dict[str, float]]:
        """For each opening the probability of each route that is offered."""
        import torch

        from captrain.policies import LocalPolicy

        policy = LocalPolicy(self.model, temperature=1.0, max_turns=1, max_tokens=1)
        chat, decoder = policy.chat([]), policy.decoder("")
        rows = []
        for text in openings:
            nearest = [example for _, example in index.of(text)]
            routes = sorted({example.route for example in nearest} - {BASE}) + [BASE]
            letters = [chr(ord("A") + i) for i in range(len(routes))]
            question = classifier_prompt(nearest, dict(zip(routes, letters, strict=True)), text)
            prompt = chat.prompt([{"role": "user", "content": question}])
            decoder.reset()
            logits = decoder.forward(torch.tensor([prompt[-policy.max_length :]]), [0])[0]
            scores = logits[[chat.encode(letter)[0] for letter in letters]].softmax(0)
            rows.append(dict(zip(routes, scores.tolist(), strict=True)))
        return rows


def classifier_prompt(nearest: Sequence[Example], letters: dict[str, str], text: str) -> str:
    """The question put to the classifier: the routes as letters, the nearest examples solved, and the new task.

    Args:
        nearest: examples, nearest first; the nearest stands last, beside the task.
        letters: route -> its letter, in the order in which they are offered.
        text: opening of the task.
    """
    choices = "\n".join(
        f"{letter}: {'none' if route == BASE else re.sub('_', ' ', route)}" for route, letter in letters.items()
    )
    solved = "\n".join(f"Task: {example.text}\nAnswer: {letters[example.route]}" for example in reversed(nearest))
    return f"Which skill does the task need?\n{choices}\n{solved}\nTask: {text}\nAnswer:"
