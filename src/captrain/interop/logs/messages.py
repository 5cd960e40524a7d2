"""Messages of LangChain, ShareGPT and OpenAI's Responses, converted to OpenAI's chat format.

LangChain's and LangGraph's are as `messages_to_dict`, `dumpd` or `model_dump` give them. ShareGPT's have `from` and
`value`; calls are turns of their own or, as in Hermes, stand between tags. Items of Responses are messages, calls and
their outputs; reasoning is left out. Messages of Gemini and of Vercel's chats have `parts`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from captrain.interop.logs.source import CallEntry, call_entry, call_of, calling, listed_calls, text_of
from captrain.records import Message

OF_LANGCHAIN = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
OF_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "function"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
TAG = re.compile(r"</?tool_response>")


def _fields(item: object) -> tuple[str, Mapping[str, object]] | None:
    """Return the type and fields of a LangChain message in any of its three forms. None if it is not one."""
    if not isinstance(item, Mapping) or "role" in item:
        return None
    inner = item.get("kwargs") if item.get("lc") else item.get("data", item)
    if not isinstance(inner, Mapping) or "content" not in inner:
        return None
    # Messages of LangChain.js name their type only in the path of their class.
    path = item.get("id") if item.get("lc") else None
    name = str(path[-1]).removesuffix("Chunk").removesuffix("Message") if isinstance(path, list) and path else ""
    kind = str(inner.get("type") or name or item.get("type")).removesuffix("MessageChunk").lower()
    return (kind, inner) if kind in OF_LANGCHAIN or kind == "chat" else None


def is_langchain(item: object) -> bool:
    """Return whether an object is a message of LangChain."""
    return _fields(item) is not None


def of_langchain(item: object) -> Message:
    """Convert a message of LangChain."""
    fields = _fields(item)
    assert fields is not None
    kind, inner = fields
    chat: Message = {"role": OF_LANGCHAIN.get(kind, inner.get("role")), "content": text_of(inner.get("content"))}
    if chat["role"] == "tool":
        chat |= {"tool_call_id": inner.get("tool_call_id"), "error": inner.get("status") == "error"}
    entries = listed_calls(inner)
    if isinstance(entries, list):
        chat["tool_calls"] = [call_of(entry) or call_entry(None, {}) for entry in entries]
    return chat


def is_sharegpt(item: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether an object is a message of ShareGPT."""
    return isinstance(item, Mapping) and isinstance(item.get("from"), str) and "value" in item


def of_sharegpt(item: Mapping[str, object]) -> Message:
    """Convert a message of ShareGPT.

    Raises:
        ValueError: a call in the message is not JSON.
    """
    speaker, value = str(item["from"]), item["value"]
    role, text = OF_SHAREGPT.get(speaker, speaker), value if isinstance(value, str) else json.dumps(value)
    if role != "assistant":
        return {"role": role, "content": TAG.sub("", text).strip() if role == "tool" else text}
    texts = [text] if speaker == "function_call" else CALL.findall(text)
    try:
        calls = [call for part in texts for call in _calls(json.loads(part))]
    except json.JSONDecodeError as error:
        raise ValueError(f"a call in the turn {text[:60]!r} is not JSON: {error}") from None
    if speaker == "function_call":
        return calling(calls)
    return calling(calls, CALL.sub("", text).strip() if calls else text)


def _calls(value: object) -> Iterable[CallEntry]:
    """Yield the calls of a JSON value: one, or a list of them."""
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError("a call in it is not an object")
        yield call_entry(function.get("name"), function.get("arguments"))


def is_item(item: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether an object is an item of OpenAI's Responses of a type that no other format has."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return (
        isinstance(kind, str)
        and kind != "tool_call"
        and (kind == "reasoning" or kind.endswith(("_call", "_call_output")))
    )


def of_item(item: Mapping[str, object]) -> list[Message]:
    """Convert an item of OpenAI's Responses to no message (reasoning), one message, or a call and its result."""
    kind, output = str(item["type"]), item.get("output")
    if kind == "reasoning":
        return []
    name = item.get("call_id") or item.get("id")
    text = json.dumps(output) if isinstance(output, Mapping) else text_of(output)
    result: Message = {"role": "tool", "tool_call_id": name, "content": text}
    if kind.endswith("_output"):
        return [result]
    arguments = next((item[key] for key in ("arguments", "input", "action") if item.get(key) is not None), {})
    call = calling([call_entry(item.get("name") or kind.removesuffix("_call"), arguments, name)])
    return [call, result] if output is not None else [call]


def of_parts(item: Mapping[str, object]) -> list[Message]:
    """Convert a message with parts. A call is merged into the text or calls before it. A result is a tool message."""
    messages: list[Message] = []
    parts = item["parts"] if isinstance(item["parts"], list) else []
    for part in [part for part in parts if isinstance(part, Mapping)]:
        kind = str(part.get("type") or "")
        call = part.get("functionCall") or part.get("function_call")
        answer = part.get("functionResponse") or part.get("function_response")
        if kind.startswith("tool-") or kind == "dynamic-tool":
            name, is_done = part.get("toolName") or kind.removeprefix("tool-"), "output" in part or "errorText" in part
            call = {"name": name, "args": part.get("input"), "id": part.get("toolCallId")}
            answer = {"response": part.get("output", part.get("errorText"))} if is_done else None
        if isinstance(call, Mapping):
            entry = call_entry(call.get("name"), call.get("args"), call.get("id"))
            last = messages.pop() if messages and messages[-1]["role"] == "assistant" else calling([])
            messages.append({**last, "tool_calls": [*last.get("tool_calls", []), entry]})
        if isinstance(answer, Mapping):
            seen = answer.get("response")
            text = json.dumps(seen) if isinstance(seen, Mapping) else text_of(seen)
            messages.append({"role": "tool", "content": text, "error": "errorText" in part})
        if isinstance(part.get("text"), str) and kind in ("", "text"):
            role = "assistant" if item.get("role") == "model" else item.get("role")
            messages.append({"role": role, "content": part["text"]})
    return messages
