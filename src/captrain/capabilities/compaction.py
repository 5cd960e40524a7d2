"""Formats rollouts for a language model: shortened to a budget, one message per line, inside a fence.

A long rollout is shortened in the middle of its longest texts, with a mark. All messages stay, so indices are those of
the record. Calls keep their names and arguments, and part of every result remains. The text of a rollout is data and
may try to mislead its reader: the fence's name is a digest of the content, so nothing inside can close it.
"""

import json
from collections.abc import Sequence

from captrain.contract import calls_of
from captrain.records import JsonObject, Message, digest

LEAST = 200
"""Minimum number of characters that are kept of a text."""


def compact(messages: Sequence[Message], budget: int) -> list[Message]:
    """Shorten long texts in the middle until texts and calls together fit into `budget` characters.

    The longest texts are cut first, to one common length: system prompts, tool results and users' texts before the
    assistant's own words. Calls are never cut, nor any text below `LEAST` characters, even if that exceeds the budget.
    """
    texts = [_text(message) for message in messages]
    room = budget - sum(len(line_of(calls_of(message))) for message in messages if message.get("tool_calls"))
    lengths = [(len(text), message["role"] == "assistant") for text, message in zip(texts, messages, strict=True)]
    assistant_lengths = [length for length, is_assistant in lengths if is_assistant]
    other_lengths = [length for length, is_assistant in lengths if not is_assistant]
    limit = _level(other_lengths, room - sum(assistant_lengths))
    own_limit = _level(assistant_lengths, room - sum(min(length, limit) for length in other_lengths))
    return [
        {**message, "content": _shortened(text, own_limit if message["role"] == "assistant" else limit)}
        for text, message in zip(texts, messages, strict=True)
    ]


def rendered(messages: Sequence[Message]) -> str:
    """Return one JSON line for each message, with its index, role, name, text, error and calls."""
    lines = []
    for index, message in enumerate(messages):
        line: JsonObject = {"index": index, "role": message["role"]}
        line |= {key: message[key] for key in ("name", "error") if message.get(key)}
        if text := _text(message):
            line["content"] = text
        if calls := calls_of(message):
            line["calls"] = [{"name": name, "arguments": arguments} for name, arguments in calls]
        lines.append(line_of(line))
    return "\n".join(lines)


def fenced(kind: str, text: str, **attributes: str | int) -> str:
    """Put a text between tags that the text cannot contain; attributes go into the opening tag."""
    tag = f"{kind}-{digest(kind, text)}"
    opening = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f"<{tag}{opening}>\n{text}\n</{tag}>"


def line_of(value: object) -> str:
    """Encode a JSON value as one line. Half of a surrogate pair is escaped, because it cannot be sent."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else line_of(content)


def _level(lengths: Sequence[int], room: int) -> int:
    """Return the largest length to which all texts can be cut so that they fit into the room; at least `LEAST`."""
    remaining = room
    for position, length in enumerate(sorted(lengths)):
        share = remaining // (len(lengths) - position)
        if length > share:
            return max(LEAST, share)
        remaining -= length
    return max(LEAST, *lengths) if lengths else LEAST


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    # The mark is longest for the whole text; beginning and end share the rest.
    length = limit - len(_mark(len(text)))
    head = length - length // 2
    return f"{text[:head]}{_mark(len(text) - length)}{text[len(text) - length // 2 :]}"


def _mark(left_out: int) -> str:
    return f" [... {left_out} characters left out ...] "
