"""Messages of ShareGPT, `from` and `value`, with calls in turns of their own or, as Hermes has it, between tags."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from captrain.interop.logs.source import call_entry
from captrain.records import JsonObject

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "function"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
TAG = re.compile(r"</?tool_response>")


def is_sharegpt(item: object) -> TypeGuard[Mapping[str, object]]:
    """Tell whether an object is a message of ShareGPT."""
    return isinstance(item, Mapping) and isinstance(item.get("from"), str) and "value" in item


def of_sharegpt(item: Mapping[str, object]) -> list[JsonObject]:
    """Convert a message of ShareGPT to one of OpenAI's format.

    Raises:
        ValueError: a call in it is no JSON.
    """
    speaker, value = str(item["from"]), item["value"]
    role, text = ROLES.get(speaker, speaker), value if isinstance(value, str) else json.dumps(value)
    if role != "assistant":
        return [{"role": role, "content": TAG.sub("", text).strip() if role == "tool" else text}]
    texts = [text] if speaker == "function_call" else CALL.findall(text)
    calls = [call for part in texts for call in _calls(json.loads(part))]
    words = "" if speaker == "function_call" else CALL.sub("", text).strip() if calls else text
    return [{"role": role, "content": words, **({"tool_calls": calls} if calls else {})}]


def _calls(value: object) -> Iterable[JsonObject]:
    """Yield the calls of a JSON value: one, or a list of them."""
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, Mapping):
            raise ValueError("a call in it is not an object")
        function = entry.get("function", entry)
        if not isinstance(function, Mapping):
            raise ValueError("a call in it is not an object")
        yield call_entry(function.get("name"), function.get("arguments"))
