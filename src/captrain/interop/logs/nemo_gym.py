"""Rollouts of NeMo Gym: a request in OpenAI's Responses format, its response, and the reward."""

from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign

TASK = ("_ng_task_index", "task_id", "id", "task_index", "task_idx")
"""Fields that name the task of a rollout, the framework's own first."""


def _recognizes(row: Foreign) -> bool:
    return isinstance(row.get("responses_create_params"), dict) and "response" in row


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    request, response = row["responses_create_params"], row["response"] or {}
    items, instructions = request.get("input"), request.get("instructions")
    prompt = [{"role": "user", "content": items}] if isinstance(items, str) else items or []
    system = [{"role": "system", "content": instructions}] if instructions else []
    output = response.get("output") or []
    if output and isinstance(output[-1], list):  # transitions: each holds everything before it, with the prompt
        prompt, output = [], output[-1]
    return ChatRow(
        [*system, *prompt, *output],
        row.get("reward"),
        task_id=next((row[name] for name in TASK if row.get(name) is not None), None),
        trial=row.get("_ng_rollout_index"),
        model=response.get("model") or request.get("model") or "unknown",
        tools=request.get("tools") or response.get("tools"),
    )


NEMO_GYM = RowFormat("NeMo Gym rollouts", _recognizes, _chat_row)
