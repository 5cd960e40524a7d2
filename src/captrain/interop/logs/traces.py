"""Traces of several runs each: the run with the most messages is the conversation; its reward is any run's score.

A file is read twice, so that only the place of each trace's run and its scores are in memory.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from captrain.interop.logs.chat import REWARD, chat_rollout
from captrain.interop.logs.records import ChatRow, rows_of
from captrain.interop.logs.source import MALFORMED, Foreign, Source, reason_of, schemas_by_name
from captrain.records import Rollout, file_digest

NO_REWARD = "there is no reward, neither in it nor by --scores FILE"


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


def read_traces(path: Path, trace_format: TraceFormat, rewards: Mapping[str, float]) -> Source:
    """Read one entry for each trace that holds messages, or that has a score and no messages.

    Args:
        path: of the file.
        trace_format: reads a row.
        rewards: by `trace_key`, from elsewhere; they override scores in the file.
    """
    traces: dict[str, _Trace] = {}
    damages: list[tuple[str, str]] = []
    source = Source(file_digest(path), {"format": trace_format.name}, iter(()))
    for place, run in _runs(path, trace_format):
        if isinstance(run, str):
            damages.append((place, run))
        else:
            traces.setdefault(run.trace, _Trace()).add(run, int(place))
            source.tools.update(schemas_by_name(run.tools))

    def entries() -> Iterator[tuple[str, Rollout | str]]:
        yield from damages
        places = {trace.place for trace in traces.values()}
        for place, run in _runs(path, trace_format):
            if not isinstance(run, str) and int(place) in places:
                yield from _entry(source.file, int(place), run, traces[run.trace], rewards)
        for key, trace in traces.items():
            if trace.place < 0 and (trace.scores or not any(places - {-1})):
                yield f"trace {key}", "none of its runs holds messages"

    return Source(source.file, source.about, entries(), source.tools)


def _entry(
    file: str, place: int, run: TraceRun, trace: _Trace, rewards: Mapping[str, float]
) -> Iterator[tuple[str, Rollout | str]]:
    """Yield the entry of a trace, from the run that holds its conversation."""
    reward = rewards.get(trace_key(run.trace), reward_of(trace.scores))
    task, label = run.trace if trace.task is None else trace.task, f"trace {run.trace}"
    if isinstance(reward, str):
        yield label, reward
        return
    chat = ChatRow(run.messages, reward, task_id=task, model=trace.model or "unknown")
    try:
        yield label, chat_rollout(file, place, chat)
    except MALFORMED as error:
        yield label, f"it cannot be read: {reason_of(error)}"


def _runs(path: Path, trace_format: TraceFormat) -> Iterator[tuple[str, TraceRun | str]]:
    """Yield every run of a file with its number; for an unreadable row its place and the reason."""
    number = 0
    for place, row in rows_of(path):
        if isinstance(row, str):
            yield place, row
            continue
        try:
            for run in trace_format.runs(row):
                number += 1
                yield str(number), run
        except MALFORMED as error:
            yield place, f"it cannot be read: {reason_of(error)}"


def trace_key(trace: str) -> str:
    """Normalise the id of a trace: hexadecimal ids match with and without `0x`, in either case."""
    key = trace.strip().lower().removeprefix("0x")
    return key if re.fullmatch(r"[0-9a-f-]{16,}", key) else trace


def reward_of(scores: Mapping[str, float]) -> float | str:
    """Choose the only score, or the one that is named as a reward; else say why there is none."""
    if len(scores) < 2:
        return next(iter(scores.values()), NO_REWARD)
    reward = next((scores[name] for name in REWARD if name in scores), None)
    names = ", ".join(sorted(scores)[:5])
    return f"it has several scores ({names}), and none is named {', '.join(REWARD)}" if reward is None else reward


def number_of(value: object) -> float | None:
    """Convert a score to a number; None if it is no number."""
    return float(value) if isinstance(value, int | float) else None


def tools_of_request(request: Mapping[str, object], more: object = None) -> object:
    """Find the tools of a request, beside its messages or among its parameters."""
    parameters = more if isinstance(more, Mapping) else {}
    tools = request.get("tools") or parameters.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools
