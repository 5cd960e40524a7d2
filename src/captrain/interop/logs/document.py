"""A large JSON object or array, read piece by piece: a result file holds all simulations of a run in one list.

Members are small, except for the lists that are named: of these one element is in memory at a time. The whole text is
checked before any element is returned, so that a damaged file is refused as a whole.

`ijson` is no replacement: it refuses NaN, integers above 64 bits, byte order marks and UTF-16, all of which Python's
`json` writes or reads, and 100,000 nested brackets exhaust the memory.
"""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

CHUNK = 1 << 18
"""Characters read at a time."""
SPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()
LIST = object()
"""Marks the start of a list in the sequence of a document's parts."""
ARRAY = ""
"""Name of the list if the document is an array."""


class JsonDocument:
    """The JSON object or array in a file.

    Args:
        path: path of the file.
        lists: names of members that are read element by element if they are lists.

    `members` are all other members; `counts` holds the lengths of the lists, or of the array.

    Raises:
        ValueError: the file is not JSON, or not in UTF-8, UTF-16 or UTF-32.
    """

    def __init__(self, path: Path, lists: Collection[str] = ()) -> None:
        self.path, self._lists = path, frozenset(lists)
        self.members: dict[str, object] = {}
        self.counts: dict[str, int] = {}
        for name, is_element, value in self._parts():
            if is_element:
                self.counts[name] += 1
            elif value is LIST:
                self.counts[name] = 0
            else:
                self.members[name] = value

    def elements(self, name: str) -> Iterator[object]:
        """Yield the elements of a list, in order; none if there is no such list."""
        if name in self.counts:
            yield from (value for part, is_element, value in self._parts() if part == name and is_element)

    def _parts(self) -> Iterator[tuple[str, bool, object]]:
        """Yield (name, is_element, value): a list comes as `LIST`, followed by its elements."""
        with self.path.open("rb") as file:
            encoding = json.detect_encoding(file.read(4))
        with self.path.open(encoding=encoding, errors="surrogatepass", newline="") as file:
            text = _Text(file)
            beginning = text.peek()
            if not beginning:
                raise ValueError("the file is empty")
            if beginning == "[":
                yield from _list(ARRAY, text)
            elif beginning == "{":
                for _ in text.items("{", "}"):
                    name = text.value()
                    if not isinstance(name, str):
                        raise ValueError("a name of a member is not a string")
                    text.take(":")
                    if name in self._lists and text.peek() == "[":
                        yield from _list(name, text)
                    else:
                        yield name, False, text.value()
            else:
                text.value()  # a number or a string: no known format
            if text.peek():
                raise text.error("Extra data")


def _list(name: str, text: "_Text") -> Iterator[tuple[str, bool, object]]:
    yield name, False, LIST
    for _ in text.items("[", "]"):
        yield name, True, text.value()


class _Text:
    """Text of a file, read in chunks. Memory holds no more than the largest value."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._buffer, self._place, self._dropped = file, "", 0, 0

    def error(self, reason: str) -> ValueError:
        """Return an error with the current position."""
        return ValueError(f"{reason} (char {self._dropped + self._place})")

    def peek(self) -> str:
        """Return the next character that is no space, without taking it; "" at the end."""
        while True:
            space = SPACE.match(self._buffer, self._place)
            self._place = space.end() if space else self._place
            if self._place < len(self._buffer):
                return self._buffer[self._place]
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        """Skip this character, which must be the next one."""
        if self.peek() != character:
            raise self.error(f"Expecting '{character}'")
        self._place += 1

    def items(self, opening: str, closing: str) -> Iterator[None]:
        """Yield once before each item between brackets. The caller must then read the item."""
        self.take(opening)
        if self.peek() != closing:
            yield
            while self.peek() != closing:
                self.take(",")
                yield
        self.take(closing)

    def value(self) -> object:
        """Parse the next value."""
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._buffer, self._place)
            except RecursionError:
                raise self.error("nested too deeply") from None
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                self._place = error.pos
                raise self.error(error.msg) from None
            # A number may continue: "1" by "e+5".
            if len(self._buffer) - end >= len("e+5") or not self._more():
                self._place = end
                return value

    def _more(self) -> bool:
        """Double the pending text, so that a long value is parsed only a few times. False at the end of the file."""
        text = self._file.read(max(CHUNK, len(self._buffer) - self._place))
        if text:
            self._dropped += self._place
            self._buffer, self._place = self._buffer[self._place :] + text, 0
        return text != ""
