"""Routing by retrieval: the nearest examples vote for their routes (paper section 3.4)."""

from collections.abc import Sequence

from captrain.config import Count
from captrain.routing.neighbours import Mass, Neighbours, ShareRouter
from captrain.routing.router import BASE, AskedModel


class RetrievalRouter(ShareRouter):
    """Router by similarity: a route's share is the summed similarity of its examples among the nearest; the base where
    nothing is similar.

    Args:
        neighbours: how many examples vote.
        p: share that a composition of adapters must reach; null: the single best route.
        gate: whether adapters that have gained nothing are left out.
    """

    def __init__(
        self, model: AskedModel | None = None, *, neighbours: Count, p: Mass | None = None, gate: bool = True
    ) -> None:
        self.neighbours, self.p, self.gate = neighbours, p, gate

    def shares_among(self, index: Neighbours, openings: Sequence[str]) -> list[dict[str, float]]:
        """Sum up for each opening the similarities that speak for each route."""
        rows = []
        for text in openings:
            votes: dict[str, float] = {}
            for similarity, example in index.of(text):
                if similarity > 0:
                    votes[example.route] = votes.get(example.route, 0.0) + similarity
            rows.append(votes or {BASE: 1.0})
        return rows
