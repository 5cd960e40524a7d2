"""Exports of Langfuse: observations, traces and scores, from its API, its tables or its blob storage."""

from collections.abc import Iterator, Mapping

from captrain.interop.logs.exchange import exchange, settings_of
from captrain.interop.logs.source import Foreign
from captrain.interop.logs.traces import TraceRun, score_of, tools_of_request

MODEL = ("providedModelName", "provided_model_name", "model")
TRACE = ("traceId", "trace_id")
PARENT = ("parentObservationId", "parent_observation_id")
OF_TRACE = ("sessionId", "session_id", "projectId", "project_id", "bookmarked", "htmlPath")
"""Members that only traces of Langfuse have."""


def recognizes_langfuse(row: Foreign) -> bool:
    """Return whether a row is an observation, a trace, a score, or a page of the API with these."""
    page = row.get("data")
    if isinstance(page, list) and page and isinstance(page[0], dict):
        return recognizes_langfuse(page[0])
    is_score = "value" in row and "name" in row and bool({"dataType", "data_type"} & {*row})
    has_words = "input" in row and "output" in row
    is_observation = has_words and "type" in row and any(row.get(name) for name in TRACE)
    is_trace = any(isinstance(row.get(name), list) for name in ("observations", "scores")) or {*OF_TRACE} & {*row}
    scores = row.get("scores")
    is_table = isinstance(scores, Mapping) and any(isinstance(values, list) for values in scores.values())
    return is_score or is_observation or (has_words and "id" in row and bool(is_trace or is_table))


def langfuse_runs(row: object) -> Iterator[TraceRun]:
    """Yield the runs of a row, with the observations and scores inside it."""
    if not isinstance(row, Mapping):
        return
    if isinstance(row.get("data"), list):
        for entry in row["data"]:
            yield from langfuse_runs(entry)
        return
    subject = settings_of(row.get("subject"))
    of_subject = subject.get("id") if subject.get("kind") == "trace" else subject.get("traceId")
    trace = str(next((row[name] for name in TRACE if row.get(name)), None) or of_subject or row["id"])
    if "value" in row and "name" in row:
        score = score_of(row["value"])
        yield TraceRun(trace, scores={} if score is None else {str(row["name"]): score})
        return
    request = settings_of(row.get("input"))
    model = next((row[name] for name in MODEL if row.get(name)), request.get("model"))
    tools = tools_of_request(request, row.get("modelParameters"))
    is_inner = any(row.get(name) for name in PARENT) and row.get("type") != "GENERATION"
    messages = exchange(row.get("input"), row.get("output"), words=not is_inner)
    yield TraceRun(trace, messages, model, tools, scores=_columns(row))
    for name in ("observations", "scores"):
        entries = row.get(name)
        if isinstance(entries, list):
            for entry in entries:
                yield from langfuse_runs({"traceId": trace, **entry} if isinstance(entry, dict) else None)


def _columns(row: Mapping[str, object]) -> dict[str, float]:
    """Read the scores of a table's row: a column for each, with all its values."""
    means = {}
    for name, values in {**row, **settings_of(row.get("scores"))}.items():
        numbers = [score_of(value) for value in values] if isinstance(values, list) else []
        if numbers and None not in numbers:
            means[name] = sum(number for number in numbers if number is not None) / len(numbers)
    return means
