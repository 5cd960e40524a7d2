"""Selection under other thresholds, from its committed account alone: no labels, no bootstrap.

What a run contributes is in the account (its gap and coverage), and so is the lower bound of the pooled gap, on which
the thresholds have no say. The rule is that of `captrain.capabilities.selection`; a test holds one against the other.
"""

import math
from collections.abc import Mapping
from typing import Any


def replayed(account: Mapping[str, Any], delta: float, coverage: float) -> list[str]:
    """The capabilities that would have been selected, in rank order.

    Args:
        account: what `select` reports; its agreement, floor and count stay.
        delta: least gap.
        coverage: least coverage.
    """
    limits = account["thresholds"]
    retained = []
    for one in account["candidates"]:
        runs = one["per_run"]
        kept = sum(
            run["gap"] is not None and run["gap"] >= delta and run["coverage"] >= coverage for run in runs
        )  # fmt: skip
        # A run that did not propose the candidate has no coverage and speaks against it; one that proposed it and has
        # no gap has no say.
        speaking = sum(run["gap"] is not None or run["coverage"] is None for run in runs)
        needed = limits["agreement"]
        if 2 * speaking > len(runs):
            needed = math.ceil(limits["agreement"] * speaking / len(runs))
        if kept >= needed and one["gap_low"] is not None and one["gap_low"] > limits["floor"]:
            retained.append((-one["coverage"] * one["gap"], one["id"]))
    return [slug for _, slug in sorted(retained)][: limits["count"]]
