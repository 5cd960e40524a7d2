"""Values that references tell users, by their words: which of them a text may say, without trying each.

A log has as many such values as it has records, and every rollout is held against them. `says` (see `alignment`) asks
for a value as whole words, so that a text without its first word need not be searched for it.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

WORD = re.compile(r"\w+")


class Vocabulary:
    """Values that references tell users, to be looked up in texts: there may be as many as there are rollouts.

    Args:
        values: distinct, in an order that stays.
    """

    def __init__(self, values: Iterable[str]) -> None:
        self.values = tuple(values)
        self._wordless: list[int] = []
        self._by_word: dict[str, list[int]] = {}
        for place, value in enumerate(self.values):
            word = WORD.search(value.lower())
            (self._by_word.setdefault(word.group(), []) if word else self._wordless).append(place)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def near(self, text: str) -> list[str]:
        """The values that the text may say, in their order: `says` is false of all others, whose first word it lacks
        as a whole."""
        words = {*WORD.findall(text.lower())}
        places = {place for word in words for place in self._by_word.get(word, ())}
        return [self.values[place] for place in sorted(places.union(self._wordless))]

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of all values, in lower case."""
        return frozenset(word for value in self.values for word in WORD.findall(value.lower()))
