"""Routers that know nothing, for comparison: one that draws, and one that is always wrong.

Both act with the adapters of the method, so that a difference to them is the router's alone.
"""

import random
from collections.abc import Sequence

from captrain.records import Task
from captrain.routing.compositions import exchanged


def random_routes(tasks: Sequence[Task], routes: Sequence[str], seed: int) -> list[str]:
    """One of the routes for each task, each as likely as any other, drawn by (seed, task id)."""
    return [random.Random(f"{seed}/{task.id}/random_router").choice(list(routes)) for task in tasks]


def placebo(routes: Sequence[str], capabilities: Sequence[str]) -> list[str]:
    """The same routes with each adapter exchanged for that of the next capability by rank, the last for the first;
    tasks of the base keep the base.

    A composition exchanges each member and keeps the weights; so it may share members with the one that was chosen.

    Raises:
        ValueError: fewer than two capabilities, which leave no other.
    """
    if len(capabilities) < 2:
        raise ValueError("a placebo needs two capabilities")
    following = dict(zip(capabilities, [*capabilities[1:], capabilities[0]], strict=True))
    return [exchanged(route, following) for route in routes]
