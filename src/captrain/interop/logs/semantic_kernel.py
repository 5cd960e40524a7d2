"""Messages of a chat history as Semantic Kernel for .NET writes it, converted to OpenAI's chat format.

A message names its role as an object with a label, and holds items that name their class as `$type`. Names of fields
are in Pascal case or, with the web defaults of .NET, in camel case.
"""

from collections.abc import Mapping
from typing import TypeGuard

from captrain.interop.logs.source import Foreign, call_entry, calling, text_of
from captrain.records import Message


def _lower(value: Foreign) -> Foreign:
    return {name.lower(): part for name, part in value.items()}


def is_kernel(item: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether an object is a message of a chat history."""
    if not isinstance(item, Mapping) or not isinstance(role := item.get("Role", item.get("role")), Mapping):
        return False
    items = _lower(item).get("items")
    return isinstance(_lower(role).get("label"), str) and isinstance(items, list)


def of_kernel(item: Foreign) -> list[Message]:
    """Convert a message: its texts and calls become one message, and each result becomes a tool message."""
    fields = _lower(item)
    parts = [_lower(part) for part in fields["items"]]
    role, messages, calls = _lower(fields["role"])["label"], list[Message](), []
    for part in parts:
        name = "-".join(str(part[key]) for key in ("pluginname", "functionname") if part.get(key))
        if part.get("$type") == "FunctionCallContent":
            calls.append(call_entry(name, part.get("arguments") or {}, part.get("id")))
        elif part.get("$type") == "FunctionResultContent":
            messages.append(
                {"role": "tool", "tool_call_id": part.get("callid"), "content": text_of(part.get("result"))}
            )
    text = "".join(text_of(part.get("text")) for part in parts if part.get("$type") == "TextContent")
    if calls:
        return [calling(calls, text), *messages]
    return messages or [{"role": role, "content": text}]
