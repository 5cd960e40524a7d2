"""Traces of several runs each: the run that holds the most messages holds the conversation, scores of any are its.

A file is read twice, so that of a trace no more is in memory than which run it is, and its scores.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from captrain.interop.logs.chat import REWARD, chat_rollout
from captrain.interop.logs.records import rows_of
from captrain.interop.logs.source import MALFORMED, Source, entries_of, reason_of, schemas_by_name
from captrain.records import JsonObject, Rollout, file_digest

NO_REWARD = "there is no reward, neither in it nor by --scores FILE"


@dataclass(frozen=True)
class Run:
    """Share of one row in a trace: messages of any format that chats are read in, the model and its tools, the task
    (None: the trace is one of its own), and scores by name."""

    trace: str
    messages: list[object] = field(default_factory=list[object])
    model: object = None
    tools: object = None
    task: object = None
    scores: dict[str, float] = field(default_factory=dict[str, float])


RunsOf = Callable[[object], Iterable[Run]]
"""The runs in a row of a file."""


@dataclass(slots=True)
class _Trace:
    length: int = 0
    place: int = -1
    task: object = None
    model: object = None
    scores: dict[str, float] = field(default_factory=dict[str, float])


def read_traces(path: Path, name: str, runs_of: RunsOf, rewards: Mapping[str, float]) -> Source:
    """Read one entry for each trace that holds messages, or that was scored and holds none.

    Args:
        path: of the file.
        name: of its format.
        runs_of: reads a row.
        rewards: by `trace_key`, from elsewhere; they go before scores in the file.
    """
    traces: dict[str, _Trace] = {}
    damages: list[tuple[str, str]] = []
    tools: dict[str, JsonObject] = {}
    for place, run in _runs(path, runs_of):
        if isinstance(run, str):
            damages.append((place, run))
            continue
        trace = traces.setdefault(run.trace, _Trace())
        trace.scores |= run.scores
        trace.task = run.task if run.task is not None else trace.task
        trace.model = run.model or trace.model
        if run.messages and len(run.messages) >= trace.length:
            trace.length, trace.place = len(run.messages), int(place)
        tools |= schemas_by_name(run.tools)
    file = file_digest(path)

    def entries() -> Iterator[tuple[str, Rollout | str]]:
        yield from damages
        places = {trace.place for trace in traces.values()}
        for place, run in _runs(path, runs_of):
            if not isinstance(run, str) and int(place) in places:
                trace = traces[run.trace]
                reward = rewards.get(trace_key(run.trace), reward_of(trace.scores))
                task = run.trace if trace.task is None else trace.task
                chat = {"messages": run.messages, "model": trace.model or "unknown", "task_id": task, "reward": reward}
                if isinstance(reward, str):
                    yield f"trace {run.trace}", reward
                else:
                    yield from entries_of([(f"trace {run.trace}", chat)], partial(chat_rollout, file), int(place))
        for key, trace in traces.items():
            if trace.place < 0 and (trace.scores or not any(places - {-1})):
                yield f"trace {key}", "none of its runs holds messages"

    return Source(file, {"format": name}, entries(), tools)


def _runs(path: Path, runs_of: RunsOf) -> Iterator[tuple[str, Run | str]]:
    """Yield every run of a file with its number as its place; of a row that does not read its own, and the reason."""
    number = 0
    for place, row in rows_of(path):
        if isinstance(row, str):
            yield place, row
            continue
        try:
            for run in runs_of(row):
                number += 1
                yield str(number), run
        except MALFORMED as error:
            yield place, f"it does not read: {reason_of(error)}"


def trace_key(trace: str) -> str:
    """Name a trace as scores name it: hexadecimal ids are alike with `0x` and without, in either case."""
    key = trace.strip().lower().removeprefix("0x")
    return key if re.fullmatch(r"[0-9a-f-]{16,}", key) else trace


def reward_of(scores: Mapping[str, float]) -> float | str:
    """Choose the one score there is, or the one that is named as a reward; else say why there is none."""
    if len(scores) < 2:
        return next(iter(scores.values()), NO_REWARD)
    reward = next((scores[name] for name in REWARD if name in scores), None)
    names = ", ".join(sorted(scores)[:5])
    return f"it has several scores ({names}), and none is named {', '.join(REWARD)}" if reward is None else reward


def number_of(value: object) -> float | None:
    """Convert a score to a number, None for what is none."""
    return float(value) if isinstance(value, int | float) else None


def tools_of_request(request: Mapping[str, object], more: object = None) -> object:
    """Find the tools of a request, beside its messages or among its parameters."""
    parameters = more if isinstance(more, Mapping) else {}
    tools = request.get("tools") or parameters.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools
