"""Names and words by which logs tell outcomes."""

import math
import re

OUTCOMES = (
    *("reward", "resolved", "is_resolved", "passed", "success", "is_correct", "correct", "is_solved", "solved"),
    *("score", "result", "outcome", "verdict", "label", "status", "grade", "accuracy", "utility"),
)
"""Usual names of outcome fields, the most likely first."""
WORDS = {
    *(
        "reward",
        "resolved",
        "passed",
        "passing",
        "pass",
        "success",
        "successful",
        "succeeded",
        "correct",
        "solved",
        "score",
        "grade",
    ),
    *("result", "outcome", "verdict", "label", "status", "accuracy", "utility", "win", "won", "match", "graded", "ok"),
}
"""Words that suggest an outcome if they occur in a field's name."""
PASSED = {
    *(
        "pass",
        "passed",
        "success",
        "successful",
        "succeeded",
        "resolved",
        "correct",
        "solved",
        "true",
        "yes",
        "win",
        "won",
    ),
    *("ok", "good", "1"),
}
FAILED = {
    *(
        "fail",
        "failed",
        "failure",
        "unsuccessful",
        "unresolved",
        "incorrect",
        "wrong",
        "unsolved",
        "false",
        "no",
        "loss",
    ),
    *("lost", "bad", "0"),
}


def outcome_number(value: object) -> float | None:
    """Convert an outcome to a number: a boolean, a finite number, or a word such as "resolved". None for all else."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in PASSED or word in FAILED:
            return float(word in PASSED)
        try:
            value = float(word)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def names_outcome(path: str) -> bool:
    """Return whether the last name of a path suggests an outcome, or stands in an object of scores."""
    holder, _, last = path.rpartition(".")
    if holder.rpartition(".")[2].lower() == "scores":
        return True
    name = re.sub(r"([a-z])([A-Z])", r"\1_\2", last)
    return not WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))
