"""Routes of conversations: what the configured router says of an opening, as the table of routes has it for test tasks.

A conversation has one opening, so that all its turns have one route; with `turns` the router that is asked before every
turn chooses instead. Nothing is kept between requests: whoever asks with the same messages gets the same route.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from captrain.config import Spec, build
from captrain.errors import UserError
from captrain.records import Message
from captrain.routing.compositions import BASE
from captrain.routing.gains import routable
from captrain.routing.neighbours import Neighbours
from captrain.routing.router import AskedModel, Example, Router, opening
from captrain.routing.routes import routing_evidence
from captrain.routing.turns import TurnRouter


class Choice(NamedTuple):
    """A route, the name of an arm, and why."""

    route: str
    reason: str


class ConversationRouter:
    """Router of conversations.

    Args:
        router: the configured one.
        examples: that it learns from; none where there is nothing to choose.
        only: the route of every conversation where there are no examples.
        turns: asked before every turn in place of `router`; None: the opening decides.
    """

    def __init__(self, router: Router, examples: Sequence[Example], only: str, turns: TurnRouter | None = None) -> None:
        self.router, self.examples, self.only, self.turns = router, examples, only, turns
        self._index = Neighbours(examples, 1) if examples else None
        self._of_opening = lru_cache(4096)(self._route)

    def choose(self, messages: Sequence[Message]) -> Choice:
        """Choose the arm that answers these messages."""
        if self.turns is not None:
            return Choice(self.turns.choose(messages), "turn by turn: the opening, the tools called, the last action")
        return self._of_opening(opening(messages))

    def _route(self, text: str) -> Choice:
        if self._index is None:
            return Choice(self.only, "the only one there is")
        [route] = self.router.route(self.examples, [text])
        [(similarity, nearest)] = self._index.of(text)
        nearest_task = f"the nearest known task is of {nearest.route} (similarity {similarity:.2f}): {nearest.text}"
        return Choice(route, f"{type(self.router).__name__}; {nearest_task}")


def conversation_router(
    spec: Spec, base: Path, results: Path, artifacts: Path, *, turns: bool = False
) -> ConversationRouter:
    """Make the router of conversations from what a run has left.

    Args:
        spec: of the run.
        base: folder of the base, for routers that ask it.
        results: folder of the results.
        artifacts: folder of the artifacts.
        turns: whether every turn is routed anew.

    Raises:
        UserError: an input is missing or damaged.
    """
    evidence, gains = routing_evidence(spec, results, artifacts)
    router = build(spec.router, Router, model=AskedModel.of(spec, base))
    adapters = routable(gains, router.gate)
    foreign = [name for name in adapters if name not in evidence.targets]
    neighbours = [] if foreign or not adapters else evidence.limited_to(adapters).examples(router)
    stored = results / "routes/turns.json"
    if turns and (results / "routes/routes.csv").exists() and not stored.exists():
        raise UserError(
            f"{results / 'routes'} has no router that is asked before every turn: there is nothing to choose from",
            "leave --turns out",
        )
    by_turn = TurnRouter.read(stored) if turns else None
    return ConversationRouter(router, neighbours, foreign[0] if foreign else BASE, by_turn)
