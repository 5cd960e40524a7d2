"""Records of OpenAI's evals: events by sample. The last request holds the dialogue, the match the outcome."""

from collections.abc import Iterator, Mapping

from captrain.interop.logs.exchange import exchange
from captrain.interop.logs.source import Foreign
from captrain.interop.logs.traces import TraceRun, score_of

VERDICTS = ("match", "metrics")


def recognizes_evals(row: Foreign) -> bool:
    """Return whether a row is an event of a sample."""
    return isinstance(row.get("sample_id"), str) and "event_id" in row and isinstance(row.get("data"), Mapping)


def evals_runs(row: object) -> Iterator[TraceRun]:
    """Yield the request of a sampling event, or the score of an event with a verdict."""
    if not isinstance(row, Mapping) or not recognizes_evals(row):
        return
    data = row["data"]
    if row.get("type") == "sampling":
        sampled = data.get("sampled")
        answer = sampled[0] if isinstance(sampled, list) and sampled else sampled
        yield TraceRun(row["sample_id"], exchange(data.get("prompt"), answer), task=row["sample_id"])
    elif row.get("type") in VERDICTS:
        numbers = {name: score_of(value) for name, value in data.items()}
        scores = {name: number for name, number in numbers.items() if number is not None}
        yield TraceRun(row["sample_id"], scores={"score": scores["correct"]} if "correct" in scores else scores)
