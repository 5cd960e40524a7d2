"""Trajectories in ATIF (Harbor's). The reward stands in them, or in a result beside them (`beside.py`)."""

from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign
from captrain.interop.trajectories import Atif, Inexpressible, messages_of


def _recognizes(row: Foreign) -> bool:
    return str(row.get("schema_version", "")).startswith("ATIF") and isinstance(row.get("steps"), list)


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    steps = [step for step in row["steps"] if not (isinstance(step, dict) and step.get("is_copied_context"))]
    try:
        trajectory = Atif.model_validate({**row, "steps": steps})
        messages = messages_of(trajectory)
    except (ValueError, Inexpressible) as error:
        return f"it cannot be read: {str(error).splitlines()[0]}"
    extra = trajectory.extra or {}
    score, task = extra.get("score"), extra.get("task")
    return ChatRow(
        messages,
        score.get("reward") if isinstance(score, dict) else None,
        task_id=task.get("id") if isinstance(task, dict) else row.get("session_id"),
        model=row["agent"].get("model_name") or trajectory.agent.name or "unknown",
        tools=trajectory.agent.tool_definitions,
        agent=trajectory.agent.name,
        keys=(str(row.get("session_id") or ""),),
    )


ATIF = RowFormat("ATIF trajectories", _recognizes, _chat_row)
