"""Trajectories of SWE-agent (`.traj`) and mini-swe-agent (`.traj.json`); `resolved` stands beside them."""

import re
from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry
from captrain.records import Message

LIMIT = re.compile(
    r"exit_(?:cost|context|total_execution_time)|LimitsExceeded|TimeExceeded|ContextWindow\w*", re.IGNORECASE
)
FAULT = re.compile(
    r"exit_(?:api|environment_error|error)\b|(?:API|RateLimit|Connection|Auth|Retry|Server|Service)\w*Error"
)


def _recognizes(row: Foreign) -> bool:
    info, history = row.get("info"), row.get("history") or row.get("messages")
    return isinstance(history, list) and isinstance(info, dict) and bool({"exit_status", "submission"} & info.keys())


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    info, config = row["info"], row["info"].get("config") or {}
    status = str(info.get("exit_status") or "")
    limit, fault = LIMIT.search(status), FAULT.search(status)
    name = row.get("instance_id") or re.sub(r"(\.traj|\.json)+$", "", path.name)
    model = (config.get("model") or {}).get("model_name") or row.get("model")
    return ChatRow(
        _messages(row.get("history") or row["messages"]),
        next((place["resolved"] for place in (row, info) if isinstance(place.get("resolved"), bool)), None),
        task_id=name,
        model=model or "unknown",
        limit=limit[0] if limit else "",
        fault="" if limit or not fault else status,
        submission=info.get("submission"),
    )


def _messages(history: list[Foreign]) -> list[Message]:
    """Convert a history. The action of a turn becomes a shell call, and the next message its result."""
    messages: list[Message] = []
    is_acting = False
    for item in history:
        if item.get("is_demo") or item.get("role") == "exit":
            continue
        message: Message = {**item}
        action = item.get("action")
        if item.get("role") == "assistant":
            is_acting = isinstance(action, str) and bool(action.strip()) and not item.get("tool_calls")
            if is_acting:
                message |= {"content": item.get("thought") or item.get("content")}
                message["tool_calls"] = [call_entry("bash", {"command": action})]
        elif is_acting:
            message["role"], is_acting = "tool", False
        messages.append(message)
    return messages


SWE_AGENT = RowFormat("SWE-agent trajectories", _recognizes, _chat_row)
