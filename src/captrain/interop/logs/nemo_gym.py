"""Rollouts of NeMo Gym: what was request, in OpenAI's Responses format, what came back, and the reward."""

from pathlib import Path

from captrain.interop.logs.records import RowFormat
from captrain.records import JsonObject

TASK = ("_ng_task_index", "task_id", "id", "task_index", "task_idx")
"""Fields that name the task of a rollout, the framework's own name first."""


def _recognizes(row: JsonObject) -> bool:
    return isinstance(row.get("responses_create_params"), dict) and "response" in row


def _chat_row(row: JsonObject, path: Path) -> JsonObject | str:
    request, response = row["responses_create_params"], row["response"]
    prompt_items = request.get("input")
    prompt = [{"role": "user", "content": prompt_items}] if isinstance(prompt_items, str) else prompt_items or []
    if request.get("instructions"):
        prompt = [{"role": "system", "content": request["instructions"]}, *prompt]
    output = (response or {}).get("output") or []
    if output and isinstance(output[-1], list):  # transitions: each holds all before it, the prompt included
        prompt, output = prompt[:1] if request.get("instructions") else [], output[-1]
    return {
        "messages": [*prompt, *output],
        "reward": row.get("reward"),
        "tools": request.get("tools") or (response or {}).get("tools"),
        "model": (response or {}).get("model") or request.get("model") or "unknown",
        "task_id": next((row[name] for name in TASK if row.get(name) is not None), None),
        "trial": row.get("_ng_rollout_index"),
    }


NEMO_GYM = RowFormat("NeMo Gym rollouts", _recognizes, _chat_row)
