"""Reads traces that consist of several runs (spans, calls).

The run with the most messages is the conversation. The reward may come from the score of any run. A file is read twice,
so that memory holds only the position and the scores of each trace.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from captrain.interop.logs.chat import REWARD, chat_entry
from captrain.interop.logs.outcomes import NO_REWARD
from captrain.interop.logs.records import ChatRow
from captrain.interop.logs.source import MALFORMED, Entry, Foreign, Read, Source, reason_of, schemas_by_name
from captrain.records import file_digest

NO_MESSAGES = "none of its runs holds messages"
Rows = Callable[[], Iterator[tuple[str, object]]]
"""Function that yields the rows of a file with their places. Each call starts at the first row."""


@dataclass(frozen=True)
class TraceRun:
    """One run of a trace.

    trace: id of its trace. messages: in any chat format. task: None if the trace is a task of its own. scores: name ->
    score.
    """

    trace: str
    messages: list[object] = field(default_factory=list[object])
    model: object = None
    tools: object = None
    task: object = None
    scores: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class TraceFormat:
    """A format of traces. `recognizes` tests a row, and `runs` yields the runs in a row."""

    name: str
    recognizes: Callable[[Foreign], bool]
    runs: Callable[[object], Iterable[TraceRun]]


@dataclass(slots=True)
class _Trace:
    length: int = 0
    place: int = -1
    task: object = None
    model: object = None
    scores: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, run: TraceRun, place: int) -> None:
        self.scores |= run.scores
        self.task = run.task if run.task is not None else self.task
        self.model = run.model or self.model
        if run.messages and len(run.messages) >= self.length:
            self.length, self.place = len(run.messages), place


def read_traces(path: Path, trace_format: TraceFormat, rows: Rows) -> Source:
    """Read one entry for each trace that holds messages, or that has a score and no messages.

    Args:
        path: path of the file.
        trace_format: format of its rows.
        rows: yields the rows of the file.
    """
    traces: dict[str, _Trace] = {}
    damages: list[tuple[str, Read, Foreign]] = []
    source = Source(file_digest(path), {"format": trace_format.name}, iter(()))
    for place, run in _runs(rows(), trace_format):
        if isinstance(run, str):
            damages.append((place, run, {}))
        else:
            traces.setdefault(run.trace, _Trace()).add(run, int(place))
            source.tools.update(schemas_by_name(run.tools))

    def entries() -> Iterator[tuple[str, Read, Foreign]]:
        yield from damages
        places = {trace.place for trace in traces.values()}
        for place, run in _runs(rows(), trace_format):
            if not isinstance(run, str) and int(place) in places:
                trace = traces[run.trace]
                yield f"trace {run.trace}", _entry(source.file, int(place), run, trace), {"scores": trace.scores}
        for key, trace in traces.items():
            if trace.place < 0 and (trace.scores or not any(places - {-1})):
                yield f"trace {key}", NO_MESSAGES, {}

    return Source(source.file, source.about, entries(), source.tools)


def _entry(file: str, place: int, run: TraceRun, trace: _Trace) -> Entry | str:
    """Return the entry of a trace, from the run that holds its conversation."""
    reward = reward_of(trace.scores)
    chat = ChatRow(
        run.messages,
        None if isinstance(reward, str) else reward,
        task_id=run.trace if trace.task is None else trace.task,
        model=trace.model or "unknown",
        keys=(run.trace,),
    )
    try:
        entry = chat_entry(file, place, chat)
    except MALFORMED as error:
        return f"it cannot be read: {reason_of(error)}"
    return replace(entry, missing=reward) if isinstance(entry, Entry) and isinstance(reward, str) else entry


def _runs(rows: Iterable[tuple[str, object]], trace_format: TraceFormat) -> Iterator[tuple[str, TraceRun | str]]:
    """Yield (number, run) for every run of a file, and (place, reason) for every unreadable row."""
    number = 0
    for place, row in rows:
        if isinstance(row, str):
            yield place, row
            continue
        try:
            for run in trace_format.runs(row):
                number += 1
                yield str(number), run
        except MALFORMED as error:
            yield place, f"it cannot be read: {reason_of(error)}"


def reward_of(scores: Mapping[str, float]) -> float | str:
    """Return the only score, or the score with a usual name of a reward. Otherwise return why there is no reward."""
    if len(scores) < 2:
        return next(iter(scores.values()), NO_REWARD)
    reward = next((scores[name] for name in REWARD if name in scores), None)
    if reward is not None:
        return reward
    names = sorted(scores)
    return (
        f"it has several scores ({', '.join(names[:5])}), and none is named {', '.join(REWARD)}: add --outcome "
        f"scores.{names[0]}, or another of them"
    )


def score_of(value: object) -> float | None:
    """Convert a score to a number; None if it is no number."""
    return float(value) if isinstance(value, int | float) else None


def tools_of_request(request: Mapping[str, object], more: object = None) -> object:
    """Return the tool schemas of a request, from beside its messages or from its parameters."""
    parameters = more if isinstance(more, Mapping) else {}
    tools = request.get("tools") or parameters.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools
