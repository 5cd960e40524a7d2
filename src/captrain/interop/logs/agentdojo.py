"""Runs of AgentDojo: a JSON document each, with utility and security."""

from pathlib import Path

from captrain.interop.logs.records import RowFormat
from captrain.interop.logs.source import call_entry
from captrain.records import JsonObject


def _recognizes(row: JsonObject) -> bool:
    return "suite_name" in row and "user_task_id" in row and isinstance(row.get("messages"), list)


def _chat_row(row: JsonObject, path: Path) -> JsonObject | str:
    injection = row.get("injection_task_id")
    return {
        "messages": [_message(message) for message in row["messages"]],
        "reward": row.get("utility"),
        "model": row.get("pipeline_name", "unknown"),
        "task_id": f"{row['suite_name']}-{row['user_task_id']}{f'-{injection}' if injection else ''}",
        "fault": str(row["error"]) if row.get("error") else None,
        "injections": row.get("injections"),
    }


def _message(message: JsonObject) -> JsonObject:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("content") or part.get("text") or "") for part in content)
    chat: JsonObject = {"role": message.get("role"), "content": content}
    if message.get("role") == "tool":
        chat |= {"tool_call_id": message.get("tool_call_id"), "error": bool(message.get("error"))}
        chat["content"] = content or str(message.get("error") or "")
    if calls := message.get("tool_calls"):
        chat["tool_calls"] = [call_entry(call.get("function"), call.get("args"), call.get("id")) for call in calls]
    return chat


AGENTDOJO = RowFormat("AgentDojo runs", _recognizes, _chat_row)
