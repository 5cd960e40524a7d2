"""Difference between a server's log-probabilities and the trainer's, of the same tokens at the same weights.

A server computes with other kernels, and often in another precision, than the process that trains. What it sampled is
then not quite what the trained policy would have sampled, and ratios are not quite 1 where they should be. The measures
are those of a step's tokens that the model wrote, hinted rollouts apart: the mean and the largest absolute difference,
and the effective sample size of the importance weights, as a share of the tokens: (sum w)^2 / (n sum w^2), 1 where all
weights are equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from captrain.records import JsonObject

COLUMNS = ("mismatch", "mismatch_largest", "effective_tokens", "rerendered", "staleness")
"""Columns of history.csv where a server samples. Turns rerendered are counted by the policy; staleness is there where
the adapter that plays may be behind, and the differences are then also those of its updates."""
DIGITS = 9


@dataclass(frozen=True)
class Moments:
    """Sums over the tokens of one process: their number, |d|, w and w^2, and the largest |d|."""

    count: int
    total: float
    weights: float
    squares: float
    largest: float


def moments(differences: Sequence[float]) -> Moments:
    """Sum up the importance weights w = exp(d) of a process's tokens.

    Args:
        differences: of log-probabilities, trainer's less sampler's.
    """
    weights = [math.exp(difference) for difference in differences]
    return Moments(
        len(differences),
        math.fsum(map(abs, differences)),
        math.fsum(weights),
        math.fsum(weight * weight for weight in weights),
        max(map(abs, differences), default=0.0),
    )


def summary(parts: Sequence[Moments]) -> JsonObject:
    """Combine the sums of all processes into the measures of a step; without a token there is no difference."""
    count = sum(part.count for part in parts)
    if not count:
        return {"mismatch": 0.0, "mismatch_largest": 0.0, "effective_tokens": 1.0}
    weights, squares = (math.fsum(values) for values in zip(*((p.weights, p.squares) for p in parts), strict=True))
    return {
        "mismatch": round(math.fsum(part.total for part in parts) / count, DIGITS),
        "mismatch_largest": round(max(part.largest for part in parts), DIGITS),
        "effective_tokens": round(weights * weights / (count * squares), DIGITS),
    }
