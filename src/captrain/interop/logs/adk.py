"""Google ADK's evaluations: the cases of an `.evalset_result.json`, or of an eval set.

A result holds each invocation as it was and as it should have been, and the status of the case. An eval set holds only
the expected conversations, which have no outcome.
"""

from collections.abc import Iterator
from pathlib import Path

from captrain.interop.logs.chat import dialogue_of
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_of, calling
from captrain.records import Message

PER_INVOCATION = "eval_metric_result_per_invocation"
REWARDS = {1: 1.0, 2: 0.0}
"""Reward of each status of a case. Any other status means that ADK did not judge the case."""
NOT_JUDGED = "ADK did not evaluate this case"
EXPECTED = "an eval set holds only the expected conversations"


def _recognizes(row: Foreign) -> bool:
    return "eval_id" in row and (isinstance(row.get(PER_INVOCATION), list) or isinstance(row.get("conversation"), list))


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    pairs = row.get(PER_INVOCATION)
    runs = [pair["actual_invocation"] for pair in pairs] if pairs is not None else row["conversation"]
    expected = [pair["expected_invocation"] for pair in pairs or [] if pair.get("expected_invocation")]
    metrics = [metric for metric in row.get("overall_eval_metric_results") or [] if metric.get("score") is not None]
    solution = [message for run in expected for message in dialogue_of(_messages(run)) if message.get("tool_calls")]
    return ChatRow(
        [message for run in runs for message in _messages(run)],
        REWARDS.get(row.get("final_eval_status", 0)),
        task_id=row["eval_id"],
        reference=[calling(message["tool_calls"]) for message in solution],
        grading="; ".join(f"{metric['metric_name']} {metric['score']:g}" for metric in metrics),
        expected={"expected": "\n".join(filter(None, map(_answer, expected)))},
        keys=(str(row.get("session_id") or ""),),
        missing=EXPECTED if pairs is None else NOT_JUDGED,
    )


def _messages(run: Foreign) -> Iterator[Message]:
    """Yield what the user asked in an invocation, the calls with their results, and the final response."""
    between = run.get("intermediate_data") or {}
    yield {"role": "user", "parts": run["user_content"]["parts"]}
    yield from (event["content"] for event in between.get("invocation_events") or [] if event.get("content"))
    if calls := [call for use in between.get("tool_uses") or [] if (call := call_of(use))]:
        yield calling(calls)
    responses = between.get("tool_responses") or []
    yield from ({"role": "user", "parts": [{"function_response": response}]} for response in responses)
    if run.get("final_response"):
        yield {"role": "model", "parts": run["final_response"].get("parts") or []}


def _answer(run: Foreign) -> str:
    """Return the text of the final response."""
    parts = (run.get("final_response") or {}).get("parts") or []
    return "".join(part.get("text") or "" for part in parts)


ADK = RowFormat("Google ADK evaluations", _recognizes, _chat_row)
