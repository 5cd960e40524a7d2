"""Rollouts of NeMo Gym: a request in OpenAI's Responses format, its response, and the reward."""

from pathlib import Path

from captrain.interop.logs.chat import fact
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign

TASK = ("_ng_task_index", "task_id", "id", "task_index", "task_idx")
"""Fields that name the task of a rollout, the framework's own first."""


NONE = (None, "", "none", False, {}, [])
EXPECTED = ("expected_answer", "gold_sql", "rubric_judgements", "reference_solution", "ground_truth")
SUBMITTED = ("model_patch", "extracted_sql", "model_output", "extracted_answer")
FAULTS = ("error", "judge_error", "error_kind")


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
        fault=_fault(row, response),
        limit="time" if row.get("agent_timed_out") else _incomplete(response),
        grading=next((row[name] for name in ("failure_reason", "failure_reasons") if row.get(name) not in NONE), None),
        submission=next((row[name] for name in SUBMITTED if row.get(name)), None),
        expected={name: row.get(name) for name in EXPECTED},
        agent=(row.get("agent_ref") or {}).get("name"),
    )


def _fault(row: Foreign, response: Foreign) -> str:
    """Return why a sample does not count against the agent: it is masked, labelled as a fault, or has an error."""
    labels = [str(label) for label in row.get("failure_labels") or []]
    if row.get("mask_sample") or labels:
        return f"the sample is masked: {', '.join(labels) or row.get('error_kind') or 'no reason is given'}"
    errors = [
        *(row.get(name) for name in FAULTS),
        response.get("error"),
        row.get("eval_timed_out") and "eval_timed_out",
    ]
    return next((fact(error) for error in errors if error not in NONE), "")


def _incomplete(response: Foreign) -> str:
    details = response.get("incomplete_details")
    return str(details.get("reason") or "") if isinstance(details, dict) else ""


NEMO_GYM = RowFormat("NeMo Gym rollouts", _recognizes, _chat_row)
