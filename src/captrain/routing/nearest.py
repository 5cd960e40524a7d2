"""Routers that go by the nearest examples: retrieval, and the base model itself as a classifier (paper section 3.4).

Both find a share of each route for each opening. With `p` unset the largest share is the route. Otherwise the route is
the smallest set of capabilities whose shares reach `p`, the adapters weighted by them; where the base has the largest
share no adapter acts. Examples of pairs are left out: here a route of several capabilities comes from shares alone.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from captrain.config import Count
from captrain.models import name_of, normalised
from captrain.routing.router import BASE, Example, members

Mass = Annotated[float, Field(gt=0, le=1)]


class Neighbours:
    """The nearest examples by TF-IDF over words and word pairs; numbers are left out: they name, they do not ask."""

    def __init__(self, known: Sequence[Example], count: int) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.known, self.count = list(known), count
        self.vectorizer = TfidfVectorizer(token_pattern=r"[A-Za-z][A-Za-z'-]+", ngram_range=(1, 2))
        self.matrix: Any = self.vectorizer.fit_transform([example.text for example in self.known])

    def of(self, text: str) -> list[tuple[float, Example]]:
        """(cosine similarity, example), nearest first; ties in the order of the examples."""
        asked: Any = self.vectorizer.transform([text])
        similarity = (self.matrix @ asked.T).toarray()[:, 0]
        nearest = sorted(range(len(self.known)), key=lambda i: (-round(similarity[i], 9), i))[: self.count]
        return [(float(similarity[i]), self.known[i]) for i in nearest]


class RetrievalRouter:
    """A route's share is the summed similarity of its examples among the nearest; the base where nothing is similar.

    Args:
        neighbours: how many examples vote.
        p: share that a composition of adapters must reach; null: the single best route.
        gate: whether adapters that have gained nothing are left out.
    """

    def __init__(
        self, model: Path | None = None, *, neighbours: Count, p: Mass | None = None, gate: bool = True
    ) -> None:
        self.neighbours, self.p, self.gate = neighbours, p, gate

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`."""
        return [arm(shares, self.p) for shares in self.shares(examples, openings)]

    def shares(self, examples: Sequence[Example], openings: Sequence[str]) -> list[dict[str, float]]:
        """For each opening what speaks for each route, not normalised."""
        if not (known := single(examples)):
            return [{BASE: 1.0}] * len(openings)
        index = Neighbours(known, self.neighbours)
        found = []
        for text in openings:
            votes: dict[str, float] = {}
            for similarity, example in index.of(text):
                if similarity > 0:
                    votes[example.route] = votes.get(example.route, 0.0) + similarity
            found.append(votes or {BASE: 1.0})
        return found


class ClassifierRouter:
    """The routes of the nearest examples are offered to the base model as letters; a route's share is the next-token
    probability of its letter among those offered.

    Args:
        model: folder of the base model.
        neighbours: examples shown, and the routes offered are theirs, the base always among them.
        p: share that a composition of adapters must reach; null: the single best route.
        gate: whether adapters that have gained nothing are left out.
    """

    def __init__(self, model: Path, *, neighbours: Count, p: Mass | None = None, gate: bool = True) -> None:
        self.model, self.neighbours, self.p, self.gate = model, neighbours, p, gate

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`."""
        return [arm(shares, self.p) for shares in self.shares(examples, openings)]

    def shares(self, examples: Sequence[Example], openings: Sequence[str]) -> list[dict[str, float]]:
        """For each opening the probability of each route that is offered."""
        if not (known := single(examples)):
            return [{BASE: 1.0}] * len(openings)
        import torch

        from captrain.policies import LocalPolicy

        policy = LocalPolicy(self.model, temperature=1.0, max_turns=1, max_tokens=1)
        chat, decoder = policy.chat([]), policy.decoder("")
        index = Neighbours(known, self.neighbours)
        found = []
        for text in openings:
            near = [example for _, example in index.of(text)]
            offered = sorted({example.route for example in near} - {BASE}) + [BASE]
            letters = [chr(ord("A") + i) for i in range(len(offered))]
            prompt = chat.prompt([{"role": "user", "content": classifier_prompt(near, offered, letters, text)}])
            decoder.reset(1)
            logits = decoder.forward(torch.tensor([prompt[-policy.room :]]))[0]
            scores = logits[[chat.encode(letter)[0] for letter in letters]].softmax(0)
            found.append(dict(zip(offered, scores.tolist(), strict=True)))
        return found


def single(examples: Sequence[Example]) -> list[Example]:
    """The examples that need one capability or none."""
    return [example for example in examples if len(members(example.route)) < 2]


def arm(shares: Mapping[str, float], p: float | None) -> str:
    """The route of an opening, by the share of each route: the largest or, with `p`, the composition that reaches it.

    The base's own share has no part in a composition: the others' are what they are among themselves, in tenths.
    """
    ranked = sorted(shares, key=lambda route: -round(shares[route], 9))
    if p is None or ranked[0] == BASE:
        return ranked[0]
    able = [route for route in ranked if route != BASE]
    reached, total, kept = 0.0, sum(shares[route] for route in able), list[str]()
    while reached < p * total - 1e-9:
        kept.append(able[len(kept)])
        reached += shares[kept[-1]]
    return name_of(normalised({route: shares[route] for route in kept}))


def classifier_prompt(near: Sequence[Example], offered: list[str], letters: list[str], text: str) -> str:
    """The question put to the classifier: the routes as letters, the nearest examples solved, and the new task."""
    letter = dict(zip(offered, letters, strict=True))
    routes = "\n".join(f"{letter[route]}: {'none' if route == BASE else re.sub('_', ' ', route)}" for route in offered)
    shown = "\n".join(f"Task: {example.text}\nAnswer: {letter[example.route]}" for example in reversed(near))
    return f"Which skill does the task need?\n{routes}\n{shown}\nTask: {text}\nAnswer:"
