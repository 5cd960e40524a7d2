"""Runs of LangSmith as its client gives them, alone or with their children, and feedback on them."""

from collections.abc import Iterator, Mapping

from captrain.interop.logs.exchange import exchange, settings_of
from captrain.interop.logs.source import Foreign
from captrain.interop.logs.traces import TraceRun, score_of, tools_of_request


def recognizes_langsmith(row: Foreign) -> bool:
    """Return whether a row is a run or feedback on one."""
    return ("run_type" in row and "inputs" in row) or ("run_id" in row and "key" in row and "score" in row)


def langsmith_runs(row: object) -> Iterator[TraceRun]:
    """Yield the run of a row and its children, or the score of feedback; its task is the example that was played."""
    if not isinstance(row, Mapping):
        return
    if "run_type" not in row:
        score = score_of(row.get("score"))
        scores = {} if score is None else {str(row.get("key")): score}
        yield TraceRun(str(row.get("trace_id") or row["run_id"]), scores=scores)
        return
    request, extra = settings_of(row.get("inputs")), settings_of(row.get("extra"))
    parameters, metadata = settings_of(extra.get("invocation_params")), settings_of(extra.get("metadata"))
    model = request.get("model") or parameters.get("model") or metadata.get("ls_model_name")
    yield TraceRun(
        str(row.get("trace_id") or row["id"]),
        exchange(row.get("inputs"), row.get("outputs"), words=row["run_type"] == "llm" or not row.get("parent_run_id")),
        model,
        tools_of_request(request, parameters),
        row.get("reference_example_id"),
        _scores(row.get("feedback_stats")),
    )
    for child in row.get("child_runs") or []:
        yield from langsmith_runs(child)


def _scores(stats: object) -> dict[str, float]:
    """Return the mean of each kind of feedback that has one."""
    means = {key: score_of(settings_of(entry).get("avg")) for key, entry in settings_of(stats).items()}
    return {key: mean for key, mean in means.items() if mean is not None}
