"""Messages of AutoGen's AgentChat (0.4 and later), converted to OpenAI's chat format.

A message names its class as `type` and its agent as `source`. Calls and their results are events of their own; thoughts
and other events that nobody else sees are left out.
"""

import re
from collections.abc import Mapping
from typing import TypeGuard

from captrain.interop.logs.source import call_of, calling, text_of
from captrain.records import Message

CALLS, RESULTS, RAN = "ToolCallRequestEvent", "ToolCallExecutionEvent", "CodeExecutionEvent"
SPOKEN = re.compile(
    r"(?:Text|MultiModal|Stop|Handoff|ToolCallSummary)Message|StructuredMessage(?:\[.*\])?|CodeGenerationEvent"
)
ASIDE = ("ThoughtEvent", "MemoryQueryEvent", "UserInputRequestedEvent", "ModelClientStreamingChunkEvent")
USER = re.compile(r"user(?:_?proxy)?", re.IGNORECASE)
LIMIT = re.compile(r"Maximum number of|Timeout of|Token usage limit")
"""Start of the stop reason if a limit stopped the team."""


def is_autogen(item: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether an object is a message or an event of AgentChat."""
    if not isinstance(item, Mapping) or "role" in item or not isinstance(item.get("source"), str):
        return False
    kind = str(item.get("type"))
    is_said = kind in (CALLS, RESULTS, *ASIDE) or SPOKEN.fullmatch(kind) is not None
    return kind == RAN or (is_said and "content" in item)


def of_autogen(item: Mapping[str, object]) -> list[Message]:
    """Convert a message: to none, one, or a result for each call."""
    kind, content, source = item["type"], item.get("content"), str(item["source"])
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    if kind in ASIDE:
        return []
    if kind == CALLS:
        return [{**calling([call for part in parts if (call := call_of(part))]), "name": source}]
    if kind == RESULTS:
        return [_result(part) for part in parts]
    if kind == RAN:
        result = item.get("result")
        return [{"role": "user", "content": text_of(result.get("output") if isinstance(result, Mapping) else result)}]
    role = "user" if USER.fullmatch(source) else "assistant"
    return [{"role": role, "content": text_of(content), "name": source}]


def _result(part: Mapping[str, object]) -> Message:
    """Convert the result of one call."""
    is_error = part.get("is_error") is True
    return {"role": "tool", "tool_call_id": part.get("call_id"), "content": part.get("content"), "error": is_error}
