"""Rollouts as files of data that a page loads when it needs them: one of rows for the table, shards of messages.

A page that was opened from a disk cannot fetch, but it can load a script: each file is one call with JSON. Rollouts of
one task lie in one shard, so that two arms are compared at the price of one; messages that are equal are written once
a shard. Text never becomes markup: `<` is escaped here, and pages set text alone.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from captrain.contract import calls_of
from captrain.records import Message, Rollout
from captrain.reporting.pages.data import Lack
from captrain.reporting.pages.files import plain
from captrain.reporting.show import divergence, shown_call

SHARD = 240
"""Rollouts a shard, at least: it ends with a task."""
REQUEST = 200
"""Letters of a request that the table can be searched for."""


def script(function: str, *arguments: Any) -> str:
    """A script file that calls a function with JSON, safe inside of HTML, too."""
    inner = ",".join(json.dumps(one, separators=(",", ":"), allow_nan=False) for one in arguments)
    return f"{function}({escaped(inner)});\n"


def escaped(text: str) -> str:
    """JSON in which no markup can begin."""
    return text.replace("<", "\\u003c")


def marks(rollout: Rollout, lacking: Sequence[Lack], selected: Collection[str]) -> list[dict[str, Any]]:
    """Where a rollout that failed goes wrong: what the labels point at, and where its tool calls leave the
    reference's. First message first, and what rejected candidates lack last: it does not tell failed from passed."""
    if rollout.outcome != "failed":
        return []
    last = len(rollout.messages) - 1
    found = [
        {
            "at": last if one.message is None else min(one.message, last),
            "why": one.evidence,
            "capability": one.capability,
            "selected": one.capability in selected,
            "runs": f"{one.lacking} of {one.runs}",
        }
        for one in lacking
    ]
    away = divergence(rollout.messages, rollout.reference) if rollout.reference else None
    if away and away.first is not None:
        own = [at for at, one in enumerate(rollout.messages) if one["role"] == "assistant" for _ in calls_of(one)]
        at = own[away.first] if away.first < len(own) else last
        mark = away.marks[away.first] if away.first < len(own) else None
        missing = away.missing.get(away.first, [])
        if mark and mark.verdict == "differs":
            why = f"the reference calls {mark.expected} here"
        elif missing:
            why = f"the reference calls {missing[0]} before this"
        else:
            why = "the reference makes no such call"
        found.append({"at": at, "why": why, "capability": "", "selected": True, "runs": ""})
    return sorted(found, key=lambda one: (not one["selected"], one["at"], not one["capability"], one["capability"]))


def shown(message: Message) -> dict[str, Any]:
    """One message as pages show it: who speaks, the text, tool calls one line each."""
    content = message.get("content") or ""
    return {
        "role": message["role"],
        "name": message.get("name", ""),
        "text": content if isinstance(content, str) else json.dumps(content, ensure_ascii=False),
        "calls": [shown_call(*call) for call in calls_of(message)] if message["role"] == "assistant" else [],
    }


def request(rollout: Rollout) -> str:
    """The beginning of what the user asks for first."""
    first = next((one for one in rollout.messages if one["role"] == "user"), None)
    return shown(first)["text"][:REQUEST] if first else ""


def files(
    discovery: Sequence[Rollout],
    evaluation: Sequence[Rollout],
    outcomes: pd.DataFrame | None,
    lacking: Mapping[str, Sequence[Lack]],
    selected: Collection[str],
    names: Mapping[str, str],
    routed: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """The files of data, name and text.

    Args:
        discovery: rollouts of the diagnosis.
        evaluation: rollouts of the test split.
        outcomes: of these, as `loaders.load_outcomes` gives them, in the same order; None where there are none.
        lacking: rollout -> what it lacks.
        selected: ids of the capabilities that were selected.
        names: arm -> what it is called, where that is not its own name.
        routed: task -> arm that TRACE's router chooses.
    """
    arms = [] if outcomes is None else [names.get(arm, arm) for arm in outcomes["arm"]]
    # Tasks in the order in which they were played first; within one, trials and arms side by side.
    order: dict[str, int] = {}
    for one in (*discovery, *evaluation):
        order.setdefault(one.task.id, len(order))
    played = [*((one, "base") for one in discovery), *zip(evaluation, arms, strict=True)]
    played.sort(key=lambda pair: (order[pair[0].task.id], pair[0].trial))
    tables = _Names(), _Names()
    columns: dict[str, list[Any]] = {
        key: [] for key in ("id", "task", "arm", "trial", "outcome", "reward", "mark", "shard")
    }
    tasks: list[list[str]] = []
    shard, number, previous = _Shard(), 0, ""
    for one, arm in played:
        if len(shard.rollouts) >= SHARD and one.task.id != previous:
            yield f"data/shard-{number:03d}.js", script("captrainShard", number, shard.data())
            shard, number = _Shard(), number + 1
        if tables[0].index(one.task.id) == len(tasks):
            kind = str(one.task.data.get("kind", ""))
            tasks.append([one.task.id, kind, one.task.split, request(one), routed.get(one.task.id, "")])
        found = marks(one, lacking.get(one.id, ()), selected)
        failing = found[0]["at"] if found and found[0]["selected"] else -1
        values = (
            one.id, tables[0].index(one.task.id), tables[1].index(arm), one.trial, one.outcome[0],
            plain(one.score.reward) if one.score else None, failing, number,
        )  # fmt: skip
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
        shard.add(one, found)
        previous = one.task.id
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
        self.rollouts: dict[str, dict[str, Any]] = {}

    def add(self, one: Rollout, found: list[dict[str, Any]]) -> None:
        self.rollouts[one.id] = {
            "messages": [self._place(message) for message in one.messages],
            "reference": [self._place(message) for message in one.reference],
            "marks": found,
            "parts": one.score.parts if one.score else {},
            "error": one.error or "",
            "retries": one.retries,
            "policy": one.policy,
            "adapter": one.adapter or "",
            "tokens": [one.usage.prompt_tokens, one.usage.completion_tokens],
        }

    def _place(self, message: Message) -> int:
        return self.messages.index(json.dumps(shown(message), sort_keys=True))

    def data(self) -> dict[str, Any]:
        return {"messages": [json.loads(one) for one in self.messages.names], "rollouts": self.rollouts}
