"""Trajectories in ATIF (Harbor's). The reward stands in them, or in Harbor's `result.json` beside them."""

from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, json_of
from captrain.interop.trajectories import Atif, Inexpressible, messages_of

RESULT = "result.json"


def _recognizes(row: Foreign) -> bool:
    return str(row.get("schema_version", "")).startswith("ATIF") and isinstance(row.get("steps"), list)


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    steps = [step for step in row["steps"] if not (isinstance(step, dict) and step.get("is_copied_context"))]
    try:
        trajectory = Atif.model_validate({**row, "steps": steps})
        messages = messages_of(trajectory)
    except (ValueError, Inexpressible) as error:
        return f"it cannot be read: {str(error).splitlines()[0]}"
    extra, result = trajectory.extra or {}, _result(path)
    score, rewards = extra.get("score"), (result.get("verifier_result") or {}).get("rewards") or {}
    reward = score.get("reward") if isinstance(score, dict) else next(iter(rewards.values()), None)
    failure, task = result.get("exception_info"), extra.get("task")
    fault = failure.get("exception_type", failure) if isinstance(failure, dict) else failure
    return ChatRow(
        messages,
        0.0 if failure and reward is None else reward,
        task_id=result.get("task_name") or (task.get("id") if isinstance(task, dict) else row.get("session_id")),
        model=row["agent"].get("model_name") or trajectory.agent.name or "unknown",
        tools=trajectory.agent.tool_definitions,
        fault=str(fault) if failure else "",
    )


def _result(path: Path) -> Foreign:
    """Read Harbor's result of the trial, beside the trajectory or one folder up."""
    for folder in (path.parent, path.parent.parent):
        if (folder / RESULT).is_file():
            result = json_of(folder / RESULT)
            return result if isinstance(result, dict) else {}
    return {}


ATIF = RowFormat("ATIF trajectories", _recognizes, _chat_row)
