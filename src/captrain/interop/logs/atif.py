"""Trajectories in ATIF (Harbor's), with the reward that stands in them or in Harbor's `result.json` beside them."""

from pathlib import Path

from captrain.interop.logs.records import RowFormat
from captrain.interop.logs.source import json_of
from captrain.interop.trajectories import Atif, Inexpressible, messages_of
from captrain.records import JsonObject

RESULT = "result.json"


def _recognizes(row: JsonObject) -> bool:
    return str(row.get("schema_version", "")).startswith("ATIF") and isinstance(row.get("steps"), list)


def _chat_row(row: JsonObject, path: Path) -> JsonObject | str:
    steps = [step for step in row["steps"] if not (isinstance(step, dict) and step.get("is_copied_context"))]
    try:
        trajectory = Atif.model_validate({**row, "steps": steps})
        messages = messages_of(trajectory)
    except (ValueError, Inexpressible) as error:
        return f"it does not read: {str(error).splitlines()[0]}"
    extra = row.get("extra") if isinstance(row.get("extra"), dict) else {}
    result = _result(path)
    score, rewards = (extra or {}).get("score"), (result.get("verifier_result") or {}).get("rewards") or {}
    reward = score.get("reward") if isinstance(score, dict) else next(iter(rewards.values()), None)
    failure = result.get("exception_info")
    agent = row.get("agent") if isinstance(row.get("agent"), dict) else {}
    task = (extra or {}).get("task")
    return {
        "messages": messages,
        "reward": 0.0 if failure and reward is None else reward,
        "tools": trajectory.agent.tool_definitions or [],
        "model": (agent or {}).get("model_name") or (agent or {}).get("name") or "unknown",
        "task_id": result.get("task_name") or (task.get("id") if isinstance(task, dict) else row.get("session_id")),
        "fault": str(failure.get("exception_type", failure) if isinstance(failure, dict) else failure)
        if failure
        else None,
    }


def _result(path: Path) -> JsonObject:
    """Read Harbor's account of the trial, beside the trajectory or one folder up."""
    for folder in (path.parent, path.parent.parent):
        if (folder / RESULT).is_file():
            result = json_of(folder / RESULT)
            return result if isinstance(result, dict) else {}
    return {}


ATIF = RowFormat("ATIF trajectories", _recognizes, _chat_row)
