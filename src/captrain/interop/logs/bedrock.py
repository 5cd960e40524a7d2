"""The traces of sessions with an agent of Amazon Bedrock: requests, calls, results and answers, an event a row."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.beside import task_of
from captrain.interop.logs.exchange import items_of
from captrain.interop.logs.records import ChatRow, FileFormat
from captrain.interop.logs.source import Foreign, call_entry, calling, loaded, text_of
from captrain.records import Message

STEPS = "orchestrationTrace"
SESSION = "sessionId"
NAMES = ("function", "apiPath", "agentCollaboratorName")
"""Fields of an invocation that name its tool."""
ERROR = "executionError"
OUTPUTS = ("text", "executionOutput", ERROR, "output")
"""Fields of a result that hold its text."""


def _layers(row: Foreign) -> Iterator[Foreign]:
    """Yield a row and the objects inside it named `trace`, at most two."""
    for _ in range(3):
        yield row
        row = row["trace"] if isinstance(row.get("trace"), Mapping) else {}


def _step(row: Foreign) -> Foreign:
    """Return the step in a row. {} if there is none."""
    return next((layer[STEPS] for layer in _layers(row) if isinstance(layer.get(STEPS), Mapping)), {})


def _session(row: Foreign) -> str:
    return next((str(layer[SESSION]) for layer in _layers(row) if layer.get(SESSION)), "")


def _is_collaborators(row: Foreign) -> bool:
    """Return whether a row is a step of an agent that another agent called."""
    return any(layer.get("collaboratorName") or len(layer.get("callerChain") or ()) > 1 for layer in _layers(row))


def _recognizes(rows: Sequence[Foreign]) -> bool:
    return any(map(_step, rows))


def _sessions(rows: Sequence[Foreign]) -> list[list[Foreign]]:
    """Return the rows of each session. A row without a session belongs to the one before it."""
    sessions: dict[str, list[Foreign]] = {}
    name = next(filter(None, map(_session, rows)), "")
    for row in rows:
        name = _session(row) or name
        sessions.setdefault(name, []).append(row)
    return [session for session in sessions.values() if any(map(_step, session))]


def _messages(rows: Sequence[Foreign]) -> Iterator[Message]:
    """Yield the messages of a session. A request repeats those before it, so that only its last message may be new."""
    is_first, is_over = True, False
    own = [row for row in rows if not _is_collaborators(row)]
    for step in map(_step, own or rows):
        request = loaded((step.get("modelInvocationInput") or {}).get("text"))
        if isinstance(request, Mapping) and (is_first or is_over):
            asked = [item for item in items_of(request, "user") if isinstance(item, Mapping)]
            yield from ({**item} for item in (asked if is_first else asked[-1:]))
            is_first = is_over = False
        called, seen = step.get("invocationInput") or {}, step.get("observation") or {}
        for name, value in called.items():
            if isinstance(value, Mapping) and name.endswith("Input"):
                tool = next((value[field] for field in NAMES if value.get(field)), name.removesuffix("Input"))
                yield calling([call_entry(tool, _arguments(value))])
        for name, value in seen.items():
            if isinstance(value, Mapping) and name.endswith("Output"):
                output = next((value[field] for field in OUTPUTS if value.get(field)), value.get("text", {**value}))
                yield {"role": "tool", "content": text_of(output), "error": bool(value.get(ERROR))}
        if "finalResponse" in seen:
            yield calling([], text_of(seen["finalResponse"].get("text")))
            is_over = True


def _arguments(invocation: Foreign) -> dict[str, object]:
    """Return the arguments of an invocation: its parameters and the fields of its body, or its text or code."""
    content = (invocation.get("requestBody") or {}).get("content") or {}
    parts = [*(invocation.get("parameters") or []), *(part for parts in content.values() for part in parts)]
    if parts:
        return {part["name"]: part.get("value") for part in parts}
    if invocation.get("code"):
        return {"code": invocation["code"]}
    return {"input": text_of(invocation.get("text") or invocation.get("input"))}


def _chat_row(rows: Sequence[Foreign], path: Path) -> ChatRow:
    name = next(filter(None, map(_session, rows)), "")
    return ChatRow([*_messages(rows)], None, task_id=task_of(path), keys=(name,) if name else ())


BEDROCK = FileFormat("Bedrock agent traces", _recognizes, _chat_row, _sessions)
