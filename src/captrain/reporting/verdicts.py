"""Words for the verdict on a difference, in tables, figures and reports."""

from captrain.comparison import ComparisonRow, interpret_difference

DIFFERS = "differs"
VERDICTS = {
    "distinguishable": DIFFERS,
    "not distinguishable": "no reliable difference",
    "not distinguishable after correction": "no reliable difference",
}
"""Verdicts on a difference, by the readings in the tables of the evaluation."""


def verdict(row: ComparisonRow, level: float) -> str:
    """Say whether a difference differs from zero at a level of significance."""
    return VERDICTS[interpret_difference(row, level)]
