"""Routers for comparison: one that draws, one that is always wrong, and one that may not leave a task to the base.

All act with the adapters of the method, so that a difference to them is the router's alone.
"""

import random
from collections.abc import Sequence

from captrain.records import Task
from captrain.routing.compositions import BASE, exchanged, route_of_shares
from captrain.routing.neighbours import ShareRouter
from captrain.routing.retrieval import RetrievalRouter
from captrain.routing.router import Example, Router


def random_routes(tasks: Sequence[Task], routes: Sequence[str], seed: int) -> list[str]:
    """Draw one of the routes for each task, each as likely as any other, by (seed, task id)."""
    return [random.Random(f"{seed}/{task.id}/random_router").choice(list(routes)) for task in tasks]


def without_base(router: Router, solved: Sequence[Example], texts: Sequence[str]) -> list[str]:
    """Route by a router that never leaves a task to the base: it knows no example of the base, and where it chooses the
    base all the same, the adapter of the nearest example acts.

    Args:
        router: the configured one.
        solved: openings of known route, of which those of the base are left out; some must remain.
        texts: openings to be routed.
    """
    remaining = [example for example in solved if example.route != BASE]
    if isinstance(router, ShareRouter):
        shares = router.shares(remaining, texts)
        return [route_of_shares({name: row[name] for name in row if name != BASE}, router.p) for row in shares]
    nearest = RetrievalRouter(neighbours=1).route(remaining, texts)
    routes = router.route(remaining, texts)
    return [fallback if route == BASE else route for route, fallback in zip(routes, nearest, strict=True)]


def placebo(routes: Sequence[str], capabilities: Sequence[str]) -> list[str]:
    """Exchange each adapter of the routes for that of the next capability by rank, the last for the first; tasks of the
    base keep the base.

    A composition exchanges each member and keeps the weights; so it may share members with the one that was chosen.

    Raises:
        ValueError: fewer than two capabilities, which leave no other.
    """
    if len(capabilities) < 2:
        raise ValueError("a placebo needs two capabilities")
    following = dict(zip(capabilities, [*capabilities[1:], capabilities[0]], strict=True))
    return [exchanged(route, following) for route in routes]
