"""Question answering with a known answer: smolagents (GAIA) and tapes of TapeAgents.

Neither writes whether the answer is right, so the rule of GAIA decides: numbers are compared as numbers, lists element
by element, and text without case, blanks and punctuation.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from captrain.interop.logs.chat import is_message
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry, call_of, calling, text_of
from captrain.records import Message

ERRORS = ("error", "exception")


def equals(answer: object, truth: object) -> bool | None:
    """Tell whether an answer is right by GAIA's rule; None if either is missing."""
    if truth in (None, "", "?") or answer is None:
        return None
    given, right = str(answer), str(truth)
    number = _number(right)
    if number is not None:
        return _number(given) == number
    parts, others = re.split("[,;]", given), re.split("[,;]", right)
    return len(parts) == len(others) and all(map(_is_same, parts, others))


def _is_same(first: str, second: str) -> bool:
    number = _number(second)
    if number is not None:
        return _number(first) == number
    return re.sub(r"[\W_]", "", first).lower() == re.sub(r"[\W_]", "", second).lower()


def _number(text: str) -> float | None:
    try:
        return float(re.sub(r"[$%,\s]", "", text))
    except ValueError:
        return None


def _is_smolagents(row: Foreign) -> bool:
    return isinstance(row.get("intermediate_steps"), list) and "question" in row and "prediction" in row


def _of_smolagents(row: Foreign, path: Path) -> ChatRow:
    error, truth, prediction = row.get("agent_error"), row.get("true_answer"), row.get("prediction")
    is_limit = bool(row.get("iteration_limit_exceeded"))
    messages = [message for step in row["intermediate_steps"] for message in _of_step(step)]
    if not any(message.get("role") == "user" for message in messages):
        messages.insert(0, {"role": "user", "content": text_of(row.get("augmented_question") or row["question"])})
    if prediction is not None:
        messages.append({"role": "assistant", "content": text_of(prediction)})
    is_right = row.get("is_correct", row.get("correct"))
    return ChatRow(
        messages,
        equals(prediction, truth) if is_right is None else is_right,
        task_id=row.get("task_id"),
        model=row.get("model_id") or row.get("agent_name") or "unknown",
        limit="max_steps" if is_limit else "",
        fault=text_of(error) if error and prediction is None and not is_limit else "",
        submission=prediction,
        expected={"true_answer": truth},
    )


def _of_step(step: object) -> Iterator[Message]:
    """Convert a step of an agent's memory, or a message."""
    if not isinstance(step, Mapping):
        yield {"role": "assistant", "content": str(step)}
    elif is_message(step):
        yield {**step}
    elif step.get("system_prompt") or step.get("task"):
        role = "system" if step.get("system_prompt") else "user"
        yield {"role": role, "content": text_of(step.get("system_prompt") or step["task"])}
    else:
        said = step.get("model_output") or (step.get("model_output_message") or {}).get("content") or step.get("plan")
        calls = [call for entry in step.get("tool_calls") or [] if (call := call_of(entry))]
        if said or calls:
            yield calling(calls, text_of(said))
        seen = "\n".join(text_of(step[name]) for name in ("observations", "error") if step.get(name))
        if seen:
            yield {"role": "tool" if calls else "user", "content": seen, "error": bool(step.get("error"))}


def _is_tape(row: Foreign) -> bool:
    steps = row.get("steps")
    return isinstance(steps, list) and bool(steps) and all(isinstance(step, dict) and "kind" in step for step in steps)


def _of_tape(row: Foreign, path: Path) -> ChatRow:
    metadata = row.get("metadata") or {}
    task = metadata["task"] if isinstance(metadata.get("task"), dict) else {}
    truth, result = task.get("Final answer"), metadata.get("result")
    return ChatRow(
        [message for step in row["steps"] if (message := _of_kind(step))],
        equals(result, truth),
        task_id=task.get("task_id") or path.stem,
        fault=text_of(metadata.get("error")),
        submission=result,
        expected={"final_answer": truth},
        keys=(path.stem, str(metadata.get("id") or "")),
    )


def _of_kind(step: Foreign) -> Message | None:
    """Convert a step of a tape by the end of its kind: an action, an observation, a thought, or words."""
    kind = str(step["kind"])
    own = {name: value for name, value in step.items() if name not in ("kind", "metadata") and value not in (None, "")}
    text = text_of(step.get("content") or step.get("reasoning") or step.get("text") or own)
    if kind in ("question", "user", "task", "system"):
        return {"role": "system" if kind == "system" else "user", "content": text}
    if kind.endswith("_observation"):
        return {"role": "tool", "content": text, "error": bool(step.get("error"))}
    if kind.endswith("_action"):
        return calling([call_entry(kind.removesuffix("_action"), own)])
    is_word = kind in ("assistant", "final_answer") or kind.endswith("thought")
    return {"role": "assistant", "content": text} if is_word else None


SMOLAGENTS = RowFormat("smolagents output", _is_smolagents, _of_smolagents)
TAPES = RowFormat("TapeAgents tapes", _is_tape, _of_tape)
