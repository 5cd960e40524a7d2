"""Messages of LangChain, and so LangGraph's state: as `messages_to_dict`, `dumpd` or `model_dump` give them."""

from collections.abc import Mapping

from captrain.interop.logs.source import call_entry, text_of
from captrain.records import JsonObject

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def _fields(item: object) -> tuple[str, Mapping[str, object]] | None:
    """Return the type of a message and its fields, in whichever of the three forms; None for what is none."""
    if not isinstance(item, Mapping) or "role" in item:
        return None
    inner = item.get("kwargs") if item.get("lc") else item.get("data", item)
    if not isinstance(inner, Mapping) or "content" not in inner:
        return None
    kind = str(inner.get("type") or item.get("type")).removesuffix("MessageChunk").lower()
    return (kind, inner) if kind in ROLES or kind == "chat" else None


def is_langchain(item: object) -> bool:
    """Tell whether an object is a message of LangChain."""
    return _fields(item) is not None


def of_langchain(item: object) -> list[JsonObject]:
    """Convert a message of LangChain to one of OpenAI's format."""
    fields = _fields(item)
    assert fields is not None
    kind, inner = fields
    entries = inner.get("tool_calls")
    calls = [
        call_entry(call.get("name"), call.get("args"), call.get("id"))
        for call in (entries if isinstance(entries, list) else [])
    ]
    chat: JsonObject = {"role": ROLES.get(kind, inner.get("role")), "content": text_of(inner.get("content"))}
    if chat["role"] == "tool":
        chat |= {"tool_call_id": inner.get("tool_call_id"), "error": inner.get("status") == "error"}
    return [{**chat, "tool_calls": calls} if calls else chat]
