"""Traces of several runs each: the run with the most messages is the conversation; its reward is any run's score.

A file is read twice, so that only the place of each trace's run and its scores are in memory.
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
"""Reads the rows of a file with their places, from the first again."""


@dataclass(frozen=True)
class TraceRun:
    """What one row adds to a trace.

    messages: of any format that chats are read in. task: None if the trace is a task of its own. scores: by name.
    """

    trace: str
    messages: list[object] = field(default_factory=list[object])
    model: object = None
    tools: object = None
    task: object = None
    scores: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class TraceFormat:
    """A format of traces. `runs` yields the runs in a row."""

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
        path: of the file.
        trace_format: reads a row.
        rows: of the file.
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
    """Yield every run of a file with its number; for an unreadable row its place and the reason."""
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
    """Choose the only score, or the one that is named as a reward; else say why there is none."""
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


def number_of(value: object) -> float | None:
    """Convert a score to a number; None if it is no number."""
    return float(value) if isinstance(value, int | float) else None


def tools_of_request(request: Mapping[str, object], more: object = None) -> object:
    """Find the tools of a request, beside its messages or among its parameters."""
    parameters = more if isinstance(more, Mapping) else {}
    tools = request.get("tools") or parameters.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools
