"""Items of OpenAI's Responses format: messages, calls and their outputs; reasoning is none of these."""

import json
from collections.abc import Mapping
from typing import TypeGuard

from captrain.interop.logs.source import call_entry, text_of
from captrain.records import JsonObject


def is_item(item: object) -> TypeGuard[Mapping[str, object]]:
    """Tell whether an object is an item that no other format of messages has."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and (kind == "reasoning" or kind.endswith(("_call", "_call_output")))


def of_item(item: Mapping[str, object]) -> list[JsonObject]:
    """Convert an item to messages of OpenAI's chat format: none, one, or a call and its result."""
    kind = str(item["type"])
    name = item.get("call_id") or item.get("id")
    result = {"role": "tool", "tool_call_id": name, "content": _text(item.get("output"))}
    if kind == "reasoning":
        return []
    if kind.endswith("_output"):
        return [result]
    arguments = next((item[key] for key in ("arguments", "input", "action") if item.get(key) is not None), {})
    entry = call_entry(item.get("name") or kind.removesuffix("_call"), arguments, name)
    call = {"role": "assistant", "content": "", "tool_calls": [entry]}
    return [call, result] if item.get("output") is not None else [call]


def _text(output: object) -> str:
    return json.dumps(output) if isinstance(output, Mapping) else text_of(output)
