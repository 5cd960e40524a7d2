"""Features of rollouts that correlate with failure: counted rollout by rollout, and tested together.

The base of a feature is the set of rollouts that could show it. Fisher's exact test compares the feature's share of the
base among failed and among passed rollouts. Holm's correction counts only features that could be significant: Tarone's
bound leaves out features whose margins allow no p below `LEVEL`. Features of exactly the same rollouts are one feature
with several names. Memory grows with the number of features, which is at most `MOST`, and not with the rollouts.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from captrain.statistics import fisher, holm

Key = tuple[str, ...]
LEVEL = 0.05
MOST = 5000
"""Maximum number of features that are counted; later ones are ignored."""
EVERY: Key = ("rollout",)
"""The base of all rollouts."""


class Phrase(NamedTuple):
    """Words for a feature and for its absence, a line for the prompt, and what an agent without or with it does.

    Numbers stand for parts of its key.
    """

    holds: str
    fails: str = "no lack of: {0}"
    line: str = ""
    without: str = ""
    having: str = ""


PHRASES = {
    "after": Phrase(
        "{0} after {1}", "{0} without an earlier {1}", "Call {1} before {0}.", "calls {0} without an earlier {1}"
    ),
    "same": Phrase(
        "{0} after {1} of the same {2}",
        "{0} without an earlier {1} of the same {2}",
        "Call {1} with the same {2} before {0}.",
        "calls {0} without an earlier {1} of the same {2}",
    ),
    "repaired": Phrase(
        "{0} failed, then a corrected call",
        "{0} failed and was never corrected",
        "When {0} fails, read the error, correct the call and repeat it.",
        "does not correct a {0} that failed",
    ),
    "sourced": Phrase(
        "{0} with {1} from an earlier message",
        "{0} with a {1} from no earlier message",
        "Take {1} of {0} from the user's words or a tool's result.",
        "calls {0} with a {1} from no earlier message",
        "copies {1} of {0} from an earlier message",
    ),
    "once": Phrase(
        "{0} never repeated",
        "{0} repeated with equal arguments",
        "Never repeat {0} with the same arguments.",
        "repeats {0} with equal arguments",
    ),
    "before": Phrase(
        "{0} before the first change", "a change without an earlier {0}", "", "makes a change without an earlier {0}"
    ),
    "followed": Phrase(
        "{0} followed by {1}", "{0} not followed by {1}", "Call {1} after {0}.", "does not call {1} after {0}"
    ),
    "called": Phrase(
        "{0} called", "{0} never called", "Do not close before {0} is called.", "never calls {0}", "calls {0}"
    ),
    "asked": Phrase(
        "{1} called where the user says '{0}'",
        "{1} never called, though the user says '{0}'",
        "",
        "never calls {1}, though the user says '{0}'",
    ),
    "described": Phrase(
        "{0} of the listed record that the user describes",
        "{0} of another record than the user describes",
        "Of several records, take {0} from the one that the user's words describe.",
        "calls {0} on another record than the user describes",
    ),
    "made": Phrase("{0} not called", line="Do not close before {0} is done, where the task needs it."),
    "equal": Phrase("{0} with the wrong {1}", line="Before {0}, check its {1} against the records and the request."),
    "instead": Phrase(
        "another call instead of {0}",
        line="Before you change a record, read it, and let what it says decide between {0} and anything else.",
    ),
    "beyond": Phrase("{0} not in the reference", line="Call {0} only where it is asked for and allowed."),
    "told": Phrase(
        "{0} not told", line="Before you close, answer every question with the value that the tools returned."
    ),
    "ended": Phrase("{0} too early", line="Do not end before everything that was asked for is done."),
    "cause": Phrase("{0}"),
    "suspect": Phrase("{0}"),
    "order": Phrase("{0}", line="{1}"),
    "value": Phrase("{0}: {1}", "{0}: not {1}"),
    "seen": Phrase("{0}"),
}
"""Phrase by kind, which is the first part of a key. If several features have the same rollouts, the first kind here
names them."""


@dataclass
class Traits:
    """Features of one rollout.

    bases: the bases that it belongs to. holding: features that hold, each with its base and the distance of its two
    calls.
    """

    bases: set[Key] = field(default_factory=lambda: {EVERY})
    holding: dict[Key, tuple[Key, int]] = field(default_factory=dict[Key, tuple[Key, int]])

    def hold(self, key: Key, base: Key, distance: int = 0) -> None:
        """Add a feature that holds; the rollout then belongs to its base."""
        self.bases.add(base)
        self.holding[key] = (base, distance)

    def shows(self, association: "Association") -> bool:
        """Return whether the rollout shows an association."""
        return association.base in self.bases and (association.key in self.holding) == association.holds


@dataclass
class Cell:
    """Counts of failed and passed rollouts.

    mark: sum of one random number per rollout; equal sums mean the same rollouts. distance: sum of the distances of two
    calls.
    """

    failed: int = 0
    passed: int = 0
    mark: int = 0
    distance: int = 0

    def add(self, failed: bool, mark: int, distance: int = 0) -> None:
        """Count a rollout."""
        self.failed, self.passed = self.failed + failed, self.passed + (not failed)
        self.mark, self.distance = (self.mark + mark) % (1 << 64), self.distance + distance


class Association(NamedTuple):
    """A feature, or its absence, with its counts.

    holds: true for the feature, false for its absence. failed, passed: how many rollouts show it, and how many are in
    its base. p, p_holm: before and after the correction; NaN if no table with these margins can be significant. least:
    the least p that the margins allow. also: other names of the same rollouts.
    """

    key: Key
    base: Key
    holds: bool
    failed: tuple[int, int]
    passed: tuple[int, int]
    p: float
    also: list[str]
    least: float
    p_holm: float = float("nan")

    @property
    def name(self) -> str:
        """The feature in words."""
        return name_of(self.key, self.holds)

    @property
    def mistake(self) -> str:
        """What an agent with this feature, or without it, does."""
        phrase = PHRASES[self.key[0]]
        return (phrase.having if self.holds else phrase.without).format(*self.key[1:]) or self.name

    @property
    def excess(self) -> float:
        """The share among failed rollouts minus the share among passed ones. The share of an empty base is 0."""
        return self.failed[0] / max(1, self.failed[1]) - self.passed[0] / max(1, self.passed[1])


def name_of(key: Key, holds: bool = True) -> str:
    """Return a feature (`holds`) or its absence in words."""
    phrase = PHRASES[key[0]]
    return (phrase.holds if holds else phrase.fails).format(*key[1:])


def prompt_line(key: Key) -> str:
    """Return the line for the prompt; "" if there is none."""
    return PHRASES[key[0]].line.format(*key[1:])


class Tally:
    """Counts of the features of one table over rollouts."""

    def __init__(self) -> None:
        self.bases: dict[Key, Cell] = {}
        self.features: dict[Key, tuple[Key, Cell]] = {}
        self._random = Random(0)

    def add(self, traits: Traits, failed: bool) -> None:
        """Count a rollout."""
        mark = self._random.getrandbits(64)
        for base in traits.bases:
            if base in self.bases or len(self.bases) < MOST:
                self.bases.setdefault(base, Cell()).add(failed, mark)
        for key, (base, distance) in traits.holding.items():
            if key in self.features or (len(self.features) < MOST and base in self.bases):
                self.features.setdefault(key, (base, Cell()))[1].add(failed, mark, distance)

    def associations(self) -> list[Association]:
        """Test all features, and return them with the lowest p first.

        Each is given as the feature or as its absence, whichever failed rollouts show more often. The value of a task
        is never given as its absence.
        """
        groups: dict[tuple[int, frozenset[int]], list[Key]] = {}
        for key, (base, cell) in self.features.items():
            whole = self.bases[base].mark
            groups.setdefault((whole, frozenset({cell.mark, (whole - cell.mark) % (1 << 64)})), []).append(key)
        rows = [self._association(sorted(keys, key=self._rank)) for keys in groups.values()]
        # Tarone's bound: the smallest k such that at most k features can reach a p of LEVEL / k.
        bounds = sorted(row.least for row in rows)
        count = next((k for k in range(1, len(rows) + 1) if bisect_right(bounds, LEVEL / k) <= k), 0)
        rows = [row if row.least * count <= LEVEL else row._replace(p=float("nan")) for row in rows]
        corrected = holm([row.p for row in rows])
        rows = [row._replace(p_holm=p) for row, p in zip(rows, corrected, strict=True)]
        return sorted(rows, key=lambda row: (row.p if row.p == row.p else 1.0, -row.excess, *self._rank(row.key)))

    def _rank(self, key: Key) -> tuple[int, float, Key]:
        """Return a sort key for names of the same rollouts: the kind, then the mean distance of the two calls."""
        cell = self.features[key][1]
        return [*PHRASES].index(key[0]), cell.distance / max(1, cell.failed + cell.passed), key

    def _association(self, keys: list[Key]) -> Association:
        base, cell = self.features[keys[0]]
        whole = self.bases[base]
        failed, passed = (cell.failed, whole.failed), (cell.passed, whole.passed)
        p, least = fisher(failed, passed)
        holds = keys[0][0] == "value" or cell.failed * whole.passed > cell.passed * whole.failed
        also = [name_of(key, holds == (self.features[key][1].mark == cell.mark)) for key in keys[1:]]
        if not holds:
            failed, passed = ((total - count, total) for count, total in (failed, passed))
        return Association(keys[0], base, holds, failed, passed, p, also, least)
