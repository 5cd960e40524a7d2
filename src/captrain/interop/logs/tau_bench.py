"""Results of the first tau-bench: rows of a trajectory, its reward, and the task with its gold actions.

Only the first call of a turn was executed there, so only that one is read. An error that was not the agent's is no
failure: with a trajectory it is a fault, without one the row is skipped.
"""

from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry, calling
from captrain.records import Message

WORDS = "respond"
"""Name of the action that sends a message to the user."""


def _recognizes(row: Foreign) -> bool:
    return isinstance(row.get("traj"), list) and isinstance(row.get("info"), dict) and "task_id" in row


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    task, error = row["info"].get("task"), row["info"].get("error")
    if task is None and error is None:
        return "its info has no task"
    reason = str(error).strip().splitlines()[-1] if error else ""
    if reason and not row["traj"]:
        return f"it ended before the first message: {reason}"
    return ChatRow(
        [_message(message) for message in row["traj"]],
        row.get("reward"),
        task_id=row["task_id"],
        trial=row.get("trial"),
        reference=_reference(task or {}),
        script=(task or {}).get("instruction"),
        fault=reason,
    )


def _message(message: Foreign) -> Message:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {**message, "error": str(content).startswith("Error")}
    return {**message, "content": content, "tool_calls": (message.get("tool_calls") or [])[:1]}


def _reference(task: Foreign) -> list[Message]:
    actions = [action for action in task.get("actions") or [] if action["name"] != WORDS]
    entries = [call_entry(action["name"], action["kwargs"], f"gold-{place}") for place, action in enumerate(actions)]
    informs = [str(output) for output in task.get("outputs") or []]
    telling: list[Message] = [{"role": "assistant", "content": "", "informs": informs}]
    return [calling([entry]) for entry in entries] + telling * bool(informs)


TAU_BENCH = RowFormat("tau-bench results", _recognizes, _chat_row)
