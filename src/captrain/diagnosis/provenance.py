"""Values of calls, looked for in the words of a log: in which message one stands, and what kind it is of."""

import re
from collections.abc import Iterator
from typing import TypeGuard

from captrain.capabilities import Call, text_of

IDENTIFIER = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[#\w-]{2,}|\d{8,}")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
SMALL = 10
"""Numbers below this may be anything."""


def is_identifier(value: object) -> TypeGuard[str]:
    """A string of letters and figures, or of many figures, that is no date."""
    return isinstance(value, str) and IDENTIFIER.fullmatch(value) is not None and not DATE.fullmatch(value)


def shape(value: str) -> str:
    """Pattern that identifiers of one kind share: a prefix of letters and so many figures, letters and figures mixed,
    or words and figures."""
    if re.fullmatch(r"\w+", value.strip("#")) and "_" not in value and not re.fullmatch(r"#?[A-Za-z]{1,2}\d+", value):
        return str(len(value))
    figures = re.sub(r"\d", "9", value)
    return re.sub(r"[A-Za-z]+", "A", figures) if re.search(r"[_-]", value) else figures


def squeezed(text: str) -> str:
    """A text in which values are looked for, whatever marks stand in numbers."""
    return text.lower().replace(",", "").replace("$", "").replace(" ", " ").replace("‑", "-")


def holds(text: str, value: object) -> bool:
    """The value stands in a squeezed text as one of its own."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    words = squeezed(text_of(value)).strip()
    if not words or words not in text:
        return False
    return re.search(rf"(?<![\w.]){re.escape(words)}(?:\.0+)?(?!\w|\.\d)", text) is not None


def is_common(value: object) -> bool:
    """The value says nothing of where it is from."""
    return isinstance(value, bool) or value in ("", None) or (isinstance(value, int | float) and abs(value) < SMALL)


def atoms(value: object) -> Iterator[object]:
    """The plain values inside a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from atoms(item)
    elif value is not None:
        yield value


def values_of(call: Call) -> Iterator[object]:
    """The plain values of a call."""
    return atoms(call.arguments)
