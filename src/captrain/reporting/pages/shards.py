"""Rollouts as files of data that a page loads when it needs them: one of rows for the table, shards of messages.

A page that was opened from a disk cannot fetch, but it can load a script: each file is one call with JSON. Rollouts of
one task lie in one shard, so that two arms are compared at the price of one; messages that are equal are written once
a shard. Text never becomes markup: `<` is escaped here, and pages set text alone.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypedDict

import pandas as pd

from captrain.contract import calls_of
from captrain.records import JsonObject, Message, Rollout
from captrain.reporting.divergence import call_text, divergence
from captrain.reporting.pages.data import Lack
from captrain.reporting.pages.files import plain


class Mark(TypedDict):
    """A message at which a rollout goes wrong: its index, the evidence, what is lacking there, in how many runs."""

    at: int
    why: str
    capability: str
    selected: bool
    runs: str


class ShownMessage(TypedDict):
    """A message as pages show it."""

    role: str
    name: str
    text: str
    calls: list[str]


SHARD = 240
"""Rollouts a shard, at least: it ends with a task."""
REQUEST = 200
"""Letters of a request that the table can be searched for."""


def script(function: str, *arguments: object) -> str:
    """A script file that calls a function with JSON, safe inside of HTML, too."""
    inner = ",".join(json.dumps(argument, separators=(",", ":"), allow_nan=False) for argument in arguments)
    return f"{function}({escaped(inner)});\n"


def escaped(text: str) -> str:
    """JSON in which no markup can begin."""
    return text.replace("<", "\\u003c")


def marks(rollout: Rollout, lacking: Sequence[Lack], selected: Collection[str]) -> list[Mark]:
    """Where a rollout that failed goes wrong: what the labels point at, and where its tool calls leave the
    reference's. First message first, and what rejected candidates lack last: it does not tell failed from passed."""
    if rollout.outcome != "failed":
        return []
    last = len(rollout.messages) - 1
    points: list[Mark] = [
        {
            "at": last if lack.message is None else min(lack.message, last),
            "why": lack.evidence,
            "capability": lack.capability,
            "selected": lack.capability in selected,
            "runs": f"{lack.lacking} of {lack.runs}",
        }
        for lack in lacking
    ]
    points += _departure(rollout, last)
    return sorted(
        points, key=lambda mark: (not mark["selected"], mark["at"], not mark["capability"], mark["capability"])
    )


def _departure(rollout: Rollout, last: int) -> list[Mark]:
    """Where the calls of a rollout leave the reference's; nowhere for one without reference or departure."""
    path = divergence(rollout.messages, rollout.reference) if rollout.reference else None
    if path is None or path.first is None:
        return []
    turns = [index for index, message in enumerate(rollout.messages) if message["role"] == "assistant"]
    calls = [index for index in turns for _ in calls_of(rollout.messages[index])]
    mark = path.marks[path.first] if path.first < len(calls) else None
    missing = path.missing.get(path.first, [])
    if mark and mark.verdict == "differs":
        reason = f"the reference calls {mark.expected} here"
    elif missing:
        reason = f"the reference calls {missing[0]} before this"
    else:
        reason = "the reference makes no such call"
    message = calls[path.first] if path.first < len(calls) else last
    return [{"at": message, "why": reason, "capability": "", "selected": True, "runs": ""}]


def message_on_page(message: Message) -> ShownMessage:
    """One message as pages show it: who speaks, the text, tool calls one line each."""
    content = message.get("content") or ""
    return {
        "role": message["role"],
        "name": message.get("name", ""),
        "text": content if isinstance(content, str) else json.dumps(content, ensure_ascii=False),
        "calls": [call_text(*call) for call in calls_of(message)] if message["role"] == "assistant" else [],
    }


def request(rollout: Rollout) -> str:
    """The beginning of what the user asks for first."""
    first = next((message for message in rollout.messages if message["role"] == "user"), None)
    return message_on_page(first)["text"][:REQUEST] if first else ""


def shard_files(
    discovery: Sequence[Rollout],
    evaluation: Sequence[Rollout],
    outcomes: pd.DataFrame | None,
    lacking: Mapping[str, Sequence[Lack]],
    selected: Collection[str],
    names: Mapping[str, str],
    routes: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """The files of data, name and text.

    Args:
        discovery: rollouts of the diagnosis.
        evaluation: rollouts of the test split.
        outcomes: of these, as `loaders.load_outcomes` gives them, in the same order; None where there are none.
        lacking: rollout -> what it lacks.
        selected: ids of the capabilities that were selected.
        names: arm -> what it is called, where that is not its own name.
        routes: task -> arm that TRACE's router chooses.
    """
    arms = [] if outcomes is None else [names.get(arm, arm) for arm in outcomes["arm"]]
    # Tasks in the order in which they were played first; within one, trials and arms side by side.
    order: dict[str, int] = {}
    for rollout in (*discovery, *evaluation):
        order.setdefault(rollout.task.id, len(order))
    pairs = [*((rollout, "base") for rollout in discovery), *zip(evaluation, arms, strict=True)]
    pairs.sort(key=lambda pair: (order[pair[0].task.id], pair[0].trial))
    tables = _Names(), _Names()
    columns: dict[str, list[object]] = {
        key: [] for key in ("id", "task", "arm", "trial", "outcome", "reward", "mark", "shard")
    }
    tasks: list[list[str]] = []
    shard, number, previous = _Shard(), 0, ""
    for rollout, arm in pairs:
        if len(shard.rollouts) >= SHARD and rollout.task.id != previous:
            yield f"data/shard-{number:03d}.js", script("captrainShard", number, shard.data())
            shard, number = _Shard(), number + 1
        if tables[0].index(rollout.task.id) == len(tasks):
            kind, task = str(rollout.task.data.get("kind", "")), rollout.task
            tasks.append([task.id, kind, task.split, request(rollout), routes.get(task.id, "")])
        points = marks(rollout, lacking.get(rollout.id, ()), selected)
        failing = points[0]["at"] if points and points[0]["selected"] else -1
        values = (
            rollout.id,
            tables[0].index(rollout.task.id),
            tables[1].index(arm),
            rollout.trial,
            rollout.outcome[0],
            plain(rollout.score.reward) if rollout.score else None,
            failing,
            number,
        )
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
        shard.add(rollout, points)
        previous = rollout.task.id
    if shard.rollouts:
        yield f"data/shard-{number:03d}.js", script("captrainShard", number, shard.data())
    yield "data/rows.js", script("captrainRows", {"arms": tables[1].names, "tasks": tasks, "columns": columns})


class _Names:
    """Names by the order in which they first came."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self.places)

    def index(self, name: str) -> int:
        return self.places.setdefault(name, len(self.places))


class _Shard:
    """Rollouts whose equal messages are written once."""

    def __init__(self) -> None:
        self.messages = _Names()
        self.rollouts: dict[str, JsonObject] = {}

    def add(self, rollout: Rollout, points: list[Mark]) -> None:
        self.rollouts[rollout.id] = {
            "messages": [self._place(message) for message in rollout.messages],
            "reference": [self._place(message) for message in rollout.reference],
            "marks": points,
            "parts": rollout.score.parts if rollout.score else {},
            "error": rollout.error or "",
            "retries": rollout.retries,
            "policy": rollout.policy,
            "adapter": rollout.adapter or "",
            "tokens": [rollout.usage.prompt_tokens, rollout.usage.completion_tokens],
        }

    def _place(self, message: Message) -> int:
        return self.messages.index(json.dumps(message_on_page(message), sort_keys=True))

    def data(self) -> JsonObject:
        return {"messages": [json.loads(text) for text in self.messages.names], "rollouts": self.rollouts}
