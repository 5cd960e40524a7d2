"""Chats with a reward, one JSON object a line, in OpenAI's message format.

The columns go by several names. `tools` (OpenAI schemas), `task_id`, `trial`, `model` and `reference` (assistant
messages of a solution) are used where they are there; everything else is left out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from captrain.interop.logs.source import Source, parsed, record, text_of
from captrain.records import Message, Rollout

MESSAGES = ("messages", "conversation", "trajectory")
REWARD = ("reward", "score", "success")
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def read(path: Path, text: bytes) -> Source:
    """One entry for each line that is not empty."""
    entries: list[tuple[str, Rollout | str]] = []
    tools: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(text.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            entries.append((f"line {number}", f"it is not JSON: {error}"))
            continue
        entries.append((f"line {number}", _imported(path, number, row)))
        if isinstance(row, Mapping):
            tools |= {tool["function"]["name"]: tool for tool in row.get("tools") or [] if _is_schema(tool)}
    return Source({"format": "chat JSONL"}, entries, [*tools.values()])


def _is_schema(tool: Any) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) and "name" in tool["function"]


def _imported(path: Path, number: int, row: Any) -> Rollout | str:
    if not isinstance(row, Mapping):
        return "it is no object"
    messages = next((row[name] for name in MESSAGES if isinstance(row.get(name), list)), None)
    if messages is None:
        return f"there are no messages (a list named {', '.join(MESSAGES)})"
    reward = next((row[name] for name in REWARD if row.get(name) is not None), None)
    reference = row.get("reference") if isinstance(row.get("reference"), list) else []
    try:
        said, gold = [message(one) for one in messages], [message(one) for one in reference or []]
    except ValueError as error:
        return str(error)
    return record(
        path, number,
        environment="chat",
        task=str(row.get("task_id", number)),
        data={"kind": "chat"},
        messages=said,
        reward=float(reward) if isinstance(reward, bool) else reward,
        policy=str(row.get("model", "unknown")),
        trial=row["trial"] if isinstance(row.get("trial"), int) else 0,
        reference=gold,
    )  # fmt: skip


def message(one: Any) -> Message:
    """A chat message with its known fields alone, arguments as objects.

    Raises:
        ValueError: it is no chat message.
    """
    if not isinstance(one, Mapping) or one.get("role") not in ROLES:
        raise ValueError(f"a message has no role of {', '.join(sorted(ROLES))}")
    chat: Message = {
        "role": "tool" if one["role"] == "function" else one["role"],
        "content": text_of(one.get("content")),
    }
    if chat["role"] == "tool":
        chat["tool_call_id"] = str(one.get("tool_call_id") or "")
    if calls := one.get("tool_calls"):
        if not all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls):
            raise ValueError("a tool call has no function")
        chat["tool_calls"] = [
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {
                    "name": str(call["function"].get("name")),
                    "arguments": parsed(call["function"].get("arguments")),
                },
            }
            for call in calls
        ]
    if isinstance(one.get("informs"), list):
        chat["informs"] = [str(value) for value in one["informs"]]
    return chat
