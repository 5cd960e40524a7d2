"""Results of tau-bench, the first of its name: rows of a trajectory, its reward, and the task with its gold actions.

A turn's further calls were never executed there, so the first alone is read. What went wrong beside the agent is no
failure: with a trajectory it is a fault, and without one the row is left out, with the reason.
"""

from pathlib import Path

from captrain.interop.logs.records import RowFormat
from captrain.interop.logs.source import call_entry
from captrain.records import JsonObject, Message

WORDS = "respond"
"""The action that stands for a message to the user."""


def _recognizes(row: JsonObject) -> bool:
    return isinstance(row.get("traj"), list) and isinstance(row.get("info"), dict) and "task_id" in row


def _chat_row(row: JsonObject, path: Path) -> JsonObject | str:
    task, error = row["info"].get("task"), row["info"].get("error")
    if task is None and error is None:
        return "its info has no task"
    reason = str(error).strip().splitlines()[-1] if error else None
    if reason and not row["traj"]:
        return f"it ended before the first message: {reason}"
    return {
        "messages": [_message(message) for message in row["traj"]],
        "reward": row.get("reward"),
        "task_id": row["task_id"],
        "trial": row.get("trial"),
        "reference": _reference(task or {}),
        "script": (task or {}).get("instruction"),
        "fault": reason,
    }


def _message(message: JsonObject) -> JsonObject:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {**message, "error": str(content).startswith("Error")}
    return {**message, "content": content, "tool_calls": (message.get("tool_calls") or [])[:1]}


def _reference(task: JsonObject) -> list[Message]:
    actions = [action for action in task.get("actions") or [] if action["name"] != WORDS]
    entries = [call_entry(action["name"], action["kwargs"], f"gold-{place}") for place, action in enumerate(actions)]
    calls: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [entry]} for entry in entries]
    informs = [str(output) for output in task.get("outputs") or []]
    return [*calls, *([{"role": "assistant", "content": "", "informs": informs}] if informs else [])]


TAU_BENCH = RowFormat("tau-bench results", _recognizes, _chat_row)
