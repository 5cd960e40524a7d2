"""Results of promptfoo: one answer to one prompt in a row, with the verdict of its assertions."""

from collections.abc import Mapping
from pathlib import Path

from captrain.interop.logs.exchange import items_of
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_of, calling, loaded, text_of
from captrain.records import Message

ERROR = 2
"""Value of `failureReason` if the provider gave no answer. 1 is a failed assertion, which also sets `error`."""


def _recognizes(row: Foreign) -> bool:
    parts = (row.get("prompt"), row.get("response"))
    return all(isinstance(part, Mapping) for part in parts) and "raw" in row["prompt"] and "success" in row


def _answer(output: object) -> Message:
    """Return an answer: a text, or a list of calls that nobody executed."""
    value = loaded(output)
    calls = [call for entry in value if (call := call_of(entry))] if isinstance(value, list) else []
    return calling(calls) if calls else calling([], text_of(output))


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    verdict, provider = row.get("gradingResult") or {}, row.get("provider") or {}
    provider = provider if isinstance(provider, Mapping) else {"id": provider}
    is_error = row.get("failureReason") == ERROR
    return ChatRow(
        [*items_of(row["prompt"]["raw"], "user"), *([] if is_error else [_answer(row["response"].get("output"))])],
        row["success"],
        task_id=row.get("testIdx", row.get("id")),
        model=provider.get("label") or provider.get("id") or "unknown",
        # Labels of prompts are often their whole text.
        agent=f"prompt {row['promptIdx'] + 1}" if row.get("promptIdx") else None,
        fault=text_of(row.get("error")) if is_error else "",
        grading=verdict.get("reason"),
    )


PROMPTFOO = RowFormat("promptfoo results", _recognizes, _chat_row)
