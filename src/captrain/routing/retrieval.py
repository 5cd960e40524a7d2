"""Routers by nearest examples, which vote for their routes or offer them to the classifier (paper section 3.4).

Such a router computes a share of each route for each opening. Without `p` the route is the one with the largest share.
With `p` it is the smallest set of capabilities whose shares reach `p`, with adapters weighted by their shares. No
adapter acts if the base has the largest share. Examples of pairs are left out, because shares alone combine several
capabilities here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from captrain.routing.compositions import BASE, members, route_of_shares
from captrain.routing.router import AskedModel, Example
from captrain.run import Count

Mass = Annotated[float, Field(gt=0, le=1)]
"""A share that a composition must reach."""


class Neighbours:
    """The nearest examples by TF-IDF over words and word pairs. Numbers are ignored: they name records, not skills."""

    def __init__(self, examples: Sequence[Example], count: int) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.examples, self.count = list(examples), count
        self.vectorizer: Any = TfidfVectorizer(token_pattern=r"[A-Za-z][A-Za-z'-]+", ngram_range=(1, 2))
        self.matrix = self.vectorizer.fit_transform([example.text for example in self.examples])

    def of(self, text: str) -> list[tuple[float, Example]]:
        """Return (cosine similarity, example), nearest first; ties in the order of the examples."""
        similarity = (self.matrix @ self.vectorizer.transform([text]).T).toarray()[:, 0]
        nearest = np.argsort(-similarity.round(9), kind="stable")[: self.count]
        return [(float(similarity[i]), self.examples[i]) for i in nearest]


class ShareRouter(ABC):
    """A router that computes shares from the `neighbours` nearest examples of one capability or none."""

    neighbours: int
    p: float | None
    gate: bool

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`."""
        return [route_of_shares(shares, self.p) for shares in self.shares(examples, openings)]

    def shares(self, examples: Sequence[Example], openings: Sequence[str]) -> list[dict[str, float]]:
        """Return the share of each route for each opening, not normalised; only the base's if there are no examples."""
        single = [example for example in examples if len(members(example.route)) < 2]
        if not single:
            return [{BASE: 1.0}] * len(openings)
        return self.shares_among(Neighbours(single, self.neighbours), openings)

    @abstractmethod
    def shares_among(self, index: Neighbours, openings: Sequence[str]) -> list[dict[str, float]]:
        """Compute `shares`, given an index that finds the examples nearest to an opening."""


class RetrievalRouter(ShareRouter):
    """Router by similarity: a route's share is the summed similarity of its nearest examples; the base if nothing is
    similar.

    Args:
        neighbours: number of examples that vote.
        p: share that a composition of adapters must reach; null: the single best route.
        gate: leave out adapters without gain in their own environment.
    """

    def __init__(
        self, model: AskedModel | None = None, *, neighbours: Count, p: Mass | None = None, gate: bool = True
    ) -> None:
        self.neighbours, self.p, self.gate = neighbours, p, gate

    def shares_among(self, index: Neighbours, openings: Sequence[str]) -> list[dict[str, float]]:
        """Sum the similarities for each route and opening."""
        rows = []
        for text in openings:
            votes: dict[str, float] = {}
            for similarity, example in index.of(text):
                if similarity > 0:
                    votes[example.route] = votes.get(example.route, 0.0) + similarity
            rows.append(votes or {BASE: 1.0})
        return rows
