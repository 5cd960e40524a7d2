"""Calls of a model, each in its trace: OpenAI's Agents SDK, Weave, and loggers of their kind.

A row names its trace, and holds a request and its answer as `input` and `output`, in itself or in its `span_data`. The
call with the most messages is the conversation. A file without traces is one run if each request repeats the one before
it. A CSV of scores gives one to each trace.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.beside import task_of
from captrain.interop.logs.chat import REWARD, dialogue_of
from captrain.interop.logs.exchange import exchange, items_of
from captrain.interop.logs.records import ChatRow, FileFormat
from captrain.interop.logs.source import Foreign, loaded
from captrain.interop.logs.traces import TraceFormat, TraceRun
from captrain.interop.logs.verdicts import OUTCOMES

TRACE = ("weave_task_id", "trace_id", "traceId")
SESSION = ("session_id", "sessionId")
REQUESTS = ("input", "inputs", "request", "request_body")
ANSWERS = ("output", "outputs", "response", "response_body")
TRACED = ("input", "inputs", "span_data")
"""Fields of rows that a tracer wrote. Any other log of requests may name their session only."""
SURE_OUTCOMES = OUTCOMES[: OUTCOMES.index("score")]
"""Names that mean nothing but an outcome."""
LOGGED = "messages"
"""Field of a proxy's log that holds a request."""
REPLY = "response"
"""Field of a proxy's log that holds the answer to the request, which then does not end with a message of the agent."""


def _call(row: Foreign) -> tuple[object, object]:
    """Return the request and the answer in a row. Each is None if it is missing."""
    data = row.get("span_data")
    place = data if isinstance(data, Mapping) else row
    request = next((loaded(place[name]) for name in REQUESTS if place.get(name)), None)
    answer = next((loaded(place[name]) for name in ANSWERS if place.get(name)), None)
    if request is None:
        messages, reply = loaded(row.get(LOGGED)), loaded(row.get(REPLY))
        last = messages[-1] if isinstance(messages, list) and messages else None
        if isinstance(reply, Mapping) and isinstance(last, Mapping) and last.get("role") != "assistant":
            return messages, reply
    return request, answer


def _names(row: Foreign) -> tuple[str, ...]:
    """Return the fields that may name the trace of a row."""
    return TRACE if any(name in row for name in TRACED) else (*TRACE, *SESSION)


def _recognizes(row: Foreign) -> bool:
    request, answer = _call(row)
    is_judged = any(name in row for name in (*REWARD, *SURE_OUTCOMES))
    is_traced = any(isinstance(row.get(name), str) for name in _names(row)) and not is_judged
    return is_traced and isinstance(answer, list | Mapping) and bool(items_of(request, ""))


def _runs(row: object) -> Iterator[TraceRun]:
    if not isinstance(row, Mapping) or not _recognizes(row):
        return
    request, answer = _call(row)
    data = row.get("span_data")
    places = [place for place in (data, request, answer, row) if isinstance(place, Mapping)]
    model = next((place["model"] for place in places if isinstance(place.get("model"), str)), None)
    tools = next((place["tools"] for place in places if isinstance(place.get("tools"), list)), None)
    trace = next(str(row[name]) for name in _names(row) if row.get(name))
    yield TraceRun(trace, [*exchange(request, answer)], model, tools)


def _are_of_one_run(rows: Sequence[Foreign]) -> bool:
    """Return whether the rows are one run: each request starts with the whole previous request."""
    calls = [_call(row) for row in rows]
    requests = [dialogue_of(items_of(request, "")) for request, answer in calls if answer]
    pairs = zip(requests, requests[1:], strict=False)
    return len(requests) == len(rows) > 1 and all(requests) and all(b[: len(a)] == a for a, b in pairs)


def _run(rows: Sequence[Foreign], path: Path) -> ChatRow:
    request, answer = _call(rows[-1])
    model = request.get("model") if isinstance(request, Mapping) else None
    return ChatRow([*exchange(request, answer)], None, task_id=task_of(path), model=model or "unknown")


REQUESTS_OF_RUN = FileFormat("calls of a model in one run", _are_of_one_run, _run)
REQUESTS_OF_TRACES = TraceFormat("calls of a model by trace", _recognizes, _runs)
