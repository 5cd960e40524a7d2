"""Replies of a process that nobody vouches for, and how much of them is believed.

JSON readers take more than JSON, and more than can be written again: numbers that are not finite, halves of
characters, thousands of levels. What has passed here, nothing of ours can stumble over.
"""

import json
import math
from typing import TypeVar

from captrain.records import JsonObject, Message

T = TypeVar("T")

DEPTH = 64
"""Levels of lists and objects."""
LONGEST = 300
"""Characters of what an environment says, in a message."""


class Misbehaviour(Exception):
    """Behaviour of an environment that did not answer as it should: "raised ValueError: ..."."""


def one_line(text: str) -> str:
    """Return what an environment says as a line of a message: printable, without breaks, of bounded length."""
    words = " ".join(text.split())
    plain = "".join(sign if sign.isprintable() else "?" for sign in words)
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}..."


def preview(value: object) -> str:
    """A value, fit for a line of a message."""
    return one_line(json.dumps(value))


def bounded(value: T) -> T:
    """The result in a reply, if it is JSON that can be written again.

    Raises:
        Verdict: it has a number that is not finite or beyond 64 bits, text that is not Unicode, or too many levels.
    """
    pending: list[tuple[object, int]] = [(value, 0)]
    while pending:
        element, depth = pending.pop()
        if depth > DEPTH:
            raise Misbehaviour(f"returned more than {DEPTH} levels of lists and objects")
        if isinstance(element, dict):
            pending += [(part, depth + 1) for pair in element.items() for part in pair]
        elif isinstance(element, list):
            pending += [(part, depth + 1) for part in element]
        elif isinstance(element, float) and not math.isfinite(element):
            raise Misbehaviour(f"returned the number {element}, which is not JSON")
        elif isinstance(element, int) and element.bit_length() > 63:
            raise Misbehaviour("returned a number beyond 64 bits")
        elif isinstance(element, str) and not element.isascii():
            try:
                element.encode()
            except UnicodeEncodeError:
                raise Misbehaviour("returned text that is not Unicode") from None
    return value


def messages_of(value: object) -> list[Message]:
    """Messages, in the shape that all of our code counts on.

    Raises:
        Verdict: it is something else.
    """
    if not isinstance(value, list) or not all(map(_is_message, value)):
        raise Misbehaviour(f"returned what is not a list of messages ({preview(value)})")
    return value


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("tool_calls")
    texts = [value.get(name) for name in ("content", "name", "tool_call_id")]
    calls_formed = calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))
    return calls_formed and all(text is None or isinstance(text, str) for text in texts)


def _is_call(value: object) -> bool:
    match value:
        case {"function": {"name": str(), "arguments": dict() | str()}}:
            return True
    return False


def tools_of(value: object) -> list[JsonObject]:
    """Schemas of functions, by their names at least.

    Raises:
        Verdict: it is something else.
    """
    if not isinstance(value, list) or not all(map(_is_tool, value)):
        raise Misbehaviour(f"returned what is not a list of tools ({preview(value)})")
    return value


def _is_tool(value: object) -> bool:
    match value:
        case {"function": {"name": str()}}:
            return True
    return False


def text_of(value: object) -> str:
    """Text.

    Raises:
        Verdict: it is something else.
    """
    if not isinstance(value, str):
        raise Misbehaviour(f"returned what is not text ({preview(value)})")
    return value
