"""A large JSON object or array read piece by piece: result files hold all simulations of a run in one list.

Members are few and small, but for the lists that are named: of these one element is in memory at a time. The whole
text is read once before anything is taken from it, so that a damaged file is refused and not half believed.
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from captrain.records import JsonObject

CHUNK = 1 << 18
"""Characters read at a time."""
SPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()


LIST = object()
ARRAY = ""
"""Name of the list that a JSON array is."""


class JsonDocument:
    """The JSON object or array in a file.

    Args:
        path: of the file.
        lists: names of members that are read element by element where they are lists.

    `members` are all others, `counts` how many elements the lists have, or the array.

    Raises:
        ValueError: the file is not JSON, or of no known encoding.
    """

    def __init__(self, path: Path, lists: Collection[str] = ()) -> None:
        self.path, self._lists = path, frozenset(lists)
        self.members: JsonObject = {}
        self.counts: dict[str, int] = {}
        for name, is_element, value in self._parts():
            if is_element:
                self.counts[name] += 1
            elif value is LIST:
                self.counts[name] = 0
            else:
                self.members[name] = value

    def elements(self, name: str) -> Iterator[object]:
        """Yield the elements of a list, in order; none where there is no such list."""
        if name in self.counts:
            yield from (value for part, is_element, value in self._parts() if part == name and is_element)

    def _parts(self) -> Iterator[tuple[str, bool, object]]:
        """Name, whether it is an element of a list, and value: a list comes as `LIST`, then its elements."""
        with _opened(self.path) as text:
            beginning = text.next()
            if not beginning:
                raise ValueError("the file is empty")
            if beginning == "[":
                yield ARRAY, False, LIST
                for value in text.items("[", "]"):
                    yield ARRAY, True, value
            elif beginning != "{":
                text.value()  # JSON of no known format
            for name in text.items("{", "}") if beginning == "{" else ():
                if not isinstance(name, str):
                    raise ValueError("a name of a member is not a string")
                text.take(":")
                if name in self._lists and text.next() == "[":
                    yield name, False, LIST
                    for value in text.items("[", "]"):
                        yield name, True, value
                else:
                    yield name, False, text.value()
            text.end()


@contextmanager
def _opened(path: Path) -> Iterator["_Text"]:
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
    with path.open(encoding=encoding, errors="surrogatepass", newline="") as file:
        yield _Text(file)


class _Text:
    """JSON values one after the other, with no more of the text in memory than the largest of them takes."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._buffer, self._place, self._dropped = file, "", 0, 0

    def _more(self) -> bool:
        """Read on; as much again as is pending, so that a long value is tried few times."""
        text = self._file.read(max(CHUNK, len(self._buffer) - self._place))
        self._dropped += self._place
        self._buffer, self._place = self._buffer[self._place :] + text, 0
        return bool(text)

    def next(self) -> str:
        """Look at the next character that is no space, which stays; "" at the end."""
        while True:
            space = SPACE.match(self._buffer, self._place)
            self._place = space.end() if space else self._place
            if self._place < len(self._buffer):
                return self._buffer[self._place]
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        """Pass over this character."""
        if self.next() != character:
            raise self._error(f"Expecting '{character}'", self._place)
        self._place += 1

    def items(self, opening: str, closing: str) -> Iterator[object]:
        """Yield the values of a list between its brackets; of an object the names, after each of which its value is
        taken."""
        self.take(opening)
        if self.next() == closing:
            self.take(closing)
            return
        while True:
            yield self.value()
            if self.next() == closing:
                self.take(closing)
                return
            self.take(",")

    def value(self) -> object:
        """Parse the next value, whole."""
        self.next()
        while True:
            try:
                value, end = DECODER.raw_decode(self._buffer, self._place)
            except RecursionError:
                raise self._error("nested too deeply", self._place) from None
            except json.JSONDecodeError as error:
                reason, place = error.msg, error.pos - self._place
                if not self._more():
                    raise self._error(reason, self._place + place) from None
                continue
            length = end - self._place
            # A number may go on: after "1" there may come "e+5".
            if len(self._buffer) - end < len("e+5") and self._more():
                continue
            self._place += length
            return value

    def end(self) -> None:
        """Check that nothing follows."""
        if self.next():
            raise self._error("Extra data", self._place)

    def _error(self, reason: str, place: int) -> ValueError:
        return ValueError(f"{reason} (char {self._dropped + place})")
