"""Joins the inputs and outputs of a traced call to one dialogue. The messages may be anywhere inside the two values.

Tracing tools store the inputs and outputs in the form of the traced call: lists of messages, an API's request and
completion, LangChain's batches, or a graph's state before and after. Messages may have any chat format.
"""

from collections.abc import Mapping
from pathlib import Path

from captrain.interop.logs.chat import chat_row, dialogue_of, is_message
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, loaded

HOLDERS = ("messages", "input", "output", "choices", "generations", "message", "response", "values")
"""Names of fields that may hold the messages, the most likely first."""
INSTRUCTIONS = ("instructions", "system")


def exchange(inputs: object, outputs: object, *, words: bool = True) -> list[object]:
    """Join the messages of inputs and outputs. Outputs that repeat the inputs, such as a graph's state, count once.

    Args:
        inputs: inputs of a traced call, any JSON value.
        outputs: outputs of the same call.
        words: treat plain text in the outputs as the assistant's. False for inner steps, which output names of steps.
    """
    before, after = items_of(inputs, "user"), items_of(outputs, "assistant" if words else "")
    if before and len(after) > len(before) and dialogue_of(after[: len(before)]) == dialogue_of(before):
        return after
    return [*before, *after]


def items_of(value: object, role: str) -> list[object]:
    """Return the messages in a value. Plain text is one message of this role, or is ignored if the role is ""."""
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
    """Return the request object of the inputs, which holds the model and the tools. {} if there is none."""
    value = loaded(inputs)
    return value if isinstance(value, Mapping) else {}


def _is_logged(row: Foreign) -> bool:
    """Return whether a row of a proxy's log holds the bodies of a request and of its response."""
    bodies = [loaded(row.get(name)) for name in ("request_body", "response_body")]
    return all(isinstance(body, Mapping) for body in bodies) and bool(items_of(bodies[0], ""))


def _recognizes(row: Foreign) -> bool:
    if _is_logged(row):
        return True
    outputs = row.get("response") or row.get("output")
    has_items = isinstance(outputs, list) or (isinstance(outputs, Mapping) and isinstance(outputs.get("output"), list))
    return isinstance(row.get("input"), str | list) and has_items


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    if _is_logged(row):
        request, reply = settings_of(row["request_body"]), row["response_body"]
        return chat_row({**row, "tools": request.get("tools"), "messages": exchange(request, reply)})
    response = settings_of(row.get("response"))
    settings = {name: row.get(name) or response.get(name) for name in ("instructions", "tools", "model")}
    inputs = {"input": row["input"], "instructions": settings["instructions"]}
    return chat_row({**row, **settings, "messages": exchange(inputs, response or row.get("output"))})


RESPONSES = RowFormat("OpenAI Responses items", _recognizes, _chat_row)
