"""Runs of AgentDojo: one JSON document each, with utility and security."""

from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry
from captrain.records import Message


def _recognizes(row: Foreign) -> bool:
    return "suite_name" in row and "user_task_id" in row and isinstance(row.get("messages"), list)


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    injection = row.get("injection_task_id")
    injections = row.get("injections")
    return ChatRow(
        [_message(message) for message in row["messages"]],
        row.get("utility"),
        task_id=f"{row['suite_name']}-{row['user_task_id']}{f'-{injection}' if injection else ''}",
        model=row.get("pipeline_name", "unknown"),
        injections=injections if isinstance(injections, dict) else {},
        fault=str(row.get("error") or ""),
    )


def _message(message: Foreign) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("content") or part.get("text") or "") for part in content)
    chat: Message = {"role": message.get("role"), "content": content}
    if message.get("role") == "tool":
        chat |= {"tool_call_id": message.get("tool_call_id"), "error": bool(message.get("error"))}
        chat["content"] = content or str(message.get("error") or "")
    if calls := message.get("tool_calls"):
        chat["tool_calls"] = [call_entry(call.get("function"), call.get("args"), call.get("id")) for call in calls]
    return chat


AGENTDOJO = RowFormat("AgentDojo runs", _recognizes, _chat_row)
