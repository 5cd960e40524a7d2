"""The trace of a session with an agent of Amazon Bedrock: its requests, calls, results and answers, an event a row."""

from collections.abc import Iterator, Mapping, Sequence

from captrain.interop.logs.beside import task_of
from captrain.interop.logs.exchange import items_of
from captrain.interop.logs.records import ChatRow, FileFormat
from captrain.interop.logs.source import Foreign, call_entry, calling, loaded, text_of
from captrain.records import Message

STEPS = "orchestrationTrace"


def _step(row: Foreign) -> Foreign:
    """Return the step in a row, which some clients wrap in `trace` once or twice. {} if there is none."""
    for _ in range(3):
        if isinstance(row.get(STEPS), Mapping):
            return row[STEPS]
        row = row["trace"] if isinstance(row.get("trace"), Mapping) else {}
    return {}


def _recognizes(rows: Sequence[Foreign]) -> bool:
    return any(map(_step, rows)) and len({str(row.get("sessionId")) for row in rows}) == 1


def _messages(rows: Sequence[Foreign]) -> Iterator[Message]:
    is_asked = False
    for step in map(_step, rows):
        request = loaded((step.get("modelInvocationInput") or {}).get("text"))
        if isinstance(request, Mapping) and not is_asked:  # later requests repeat the first
            is_asked = True
            asked = [item for item in items_of(request, "user") if isinstance(item, Mapping)]
            yield from ({**item} for item in asked)
        called, seen = step.get("invocationInput") or {}, step.get("observation") or {}
        for name, value in called.items():
            if isinstance(value, Mapping) and name.endswith("Input"):
                tool = value.get("function") or value.get("apiPath") or name.removesuffix("Input")
                given = value.get("parameters") or []
                more = {part["name"]: part.get("value") for part in given} or {"input": text_of(value.get("text"))}
                yield calling([call_entry(tool, more)])
        for name, value in seen.items():
            if isinstance(value, Mapping) and name.endswith("Output"):
                yield {"role": "tool", "content": text_of(value.get("text", {**value}))}
        if "finalResponse" in seen:
            yield calling([], text_of(seen["finalResponse"].get("text")))


BEDROCK = FileFormat(
    "Bedrock agent traces",
    _recognizes,
    lambda rows, path: ChatRow([*_messages(rows)], None, task_id=task_of(path), keys=(str(rows[0].get("sessionId")),)),
)
