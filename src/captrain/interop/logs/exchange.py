"""Inputs and outputs of a traced call as one dialogue, wherever in the two values its messages lie.

Tracing keeps both as the traced call has them: lists of messages, a request and a completion of some API, batches of
LangChain, a graph's state before and after. Messages may be of any format that chats are read in.
"""

from collections.abc import Mapping
from pathlib import Path

from captrain.interop.logs.chat import chat_row, dialogue_of, is_message
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, loaded

HOLDERS = ("messages", "input", "output", "choices", "generations", "message", "response", "values")
"""Members in which messages lie, the likelier first."""
INSTRUCTIONS = ("instructions", "system")


def exchange(inputs: object, outputs: object, *, words: bool = True) -> list[object]:
    """Join the messages of both, each once: a graph's state afterwards repeats the one before.

    Args:
        inputs: of a traced call, any JSON value.
        outputs: of the same call.
        words: whether plain text in the outputs is the assistant's; an inner step outputs names of steps.
    """
    before, after = items_of(inputs, "user"), items_of(outputs, "assistant" if words else "")
    if before and len(after) > len(before) and dialogue_of(after[: len(before)]) == dialogue_of(before):
        return after
    return [*before, *after]


def items_of(value: object, role: str) -> list[object]:
    """List the messages in a value; plain text is one of this role, or none if the role is ""."""
    value = loaded(value)
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value and role else []
    if is_message(value):
        return [value]
    if isinstance(value, list):
        if value and all(map(is_message, value)):
            return value
        return items_of(value[0], role) if value and isinstance(value[0], list | Mapping) else []
    if not isinstance(value, Mapping):
        return []
    words = next((value[name] for name in INSTRUCTIONS if isinstance(value.get(name), str)), None)
    opening: list[object] = [{"role": "system", "content": words}] if words and role == "user" else []
    candidates = (items_of(value[name], role) for name in HOLDERS if value.get(name))
    items = next((items for items in candidates if items), [])
    return [*opening, *items] if items else []


def settings_of(inputs: object) -> Foreign:
    """Return the request whose messages `items_of` takes: model and tools stand beside them."""
    value = loaded(inputs)
    return value if isinstance(value, Mapping) else {}


def _recognizes(row: Foreign) -> bool:
    outputs = row.get("response") or row.get("output")
    has_items = isinstance(outputs, list) or (isinstance(outputs, Mapping) and isinstance(outputs.get("output"), list))
    return isinstance(row.get("input"), str | list) and has_items


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    response = settings_of(row.get("response"))
    settings = {name: row.get(name) or response.get(name) for name in ("instructions", "tools", "model")}
    inputs = {"input": row["input"], "instructions": settings["instructions"]}
    return chat_row({**row, **settings, "messages": exchange(inputs, response or row.get("output"))})


RESPONSES = RowFormat("OpenAI Responses items", _recognizes, _chat_row)
