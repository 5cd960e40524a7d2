"""Rollouts as files of data that a page loads when it needs them: one of rows for the table, shards of messages.

A page that was opened from a disk cannot fetch, but it can load a script: each file is one call with JSON. Rollouts of
one task lie in one shard, so that two arms are compared at the price of one; messages that are equal are written once
a shard. Text never becomes markup: `<` is escaped here, and pages set text alone.
"""

import json
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

from captrain.contract import calls_of
from captrain.records import BLOCK, JsonObject, Message, Rollout
from captrain.reporting.divergence import call_text, divergence
from captrain.reporting.pages.archive import Archive, Lack, kind_of
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


Content = str | bytes | Iterable[str]
"""Content of a file: whole, or piece by piece."""
SHARD = 240
"""Rollouts a shard, at least: it ends with a task."""
REQUEST = 200
"""Letters of a request that the table can be searched for."""


COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""Made once: `json.dumps` makes one anew for every value that it is given settings for."""


def compact(value: object) -> str:
    """Encode JSON without spaces, in which no markup can begin."""
    return escaped(COMPACT.encode(value))


def escaped(text: str) -> str:
    """Escape JSON so that no markup can begin in it."""
    return text.replace("<", "\\u003c")


def marks(rollout: Rollout, lacking: Sequence[Lack], selected: Collection[str]) -> list[Mark]:
    """Mark where a rollout that failed goes wrong: the messages that labels point at, and the call at which it leaves
    the reference. First message first, and what rejected candidates lack last: it does not tell failed from passed."""
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
    """Mark the call at which a rollout leaves its reference; nothing for one without reference or departure."""
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
    """Convert a message to what pages show: who speaks, the text, tool calls one line each."""
    content = message.get("content") or ""
    return {
        "calls": [call_text(*call) for call in calls_of(message)],
        "name": message.get("name", ""),
        "role": message["role"],
        "text": content if isinstance(content, str) else json.dumps(content, ensure_ascii=False),
    }


def request(rollout: Rollout) -> str:
    """Return the beginning of what the user asks for first."""
    first = next((message for message in rollout.messages if message["role"] == "user"), None)
    return message_on_page(first)["text"][:REQUEST] if first else ""


def shard_files(archive: Archive, selected: Collection[str], names: Mapping[str, str]) -> Iterator[tuple[str, Content]]:
    """Yield the files of data, name and content.

    Args:
        archive: what there is of rollouts.
        selected: ids of the capabilities that were selected.
        names: arm -> what it is called, where that is not its own name.
    """
    with _Rows() as rows:
        shard, number = _Shard(), 0
        for rollout, arm, lacking in archive.rollouts():
            if len(shard.rollouts) >= SHARD and rollout.task.id != rows.task:
                yield f"data/shard-{number:03d}.js", shard.script(number)
                shard, number = _Shard(), number + 1
            if rollout.task.id != rows.task:
                rows.begin(rollout, archive.route(rollout.task.id))
            points = marks(rollout, lacking, selected)
            failing = points[0]["at"] if points and points[0]["selected"] else -1
            rows.add(rollout, names.get(arm, arm), failing, number)
            shard.add(rollout, points)
        if shard.rollouts:
            yield f"data/shard-{number:03d}.js", shard.script(number)
        yield "data/rows.js", rows.script()


class _Rows:
    """The table of all rollouts, column by column, each on disk until all are there."""

    COLUMNS = ("id", "task", "arm", "trial", "outcome", "reward", "mark", "shard")

    def __init__(self) -> None:
        self.task = ""
        self._arms, self._tasks = _Names(), 0
        names = ("tasks", *self.COLUMNS)
        self._parts = {
            name: tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  (closed with the object)
            for name in names
        }
        self._unwritten: dict[str, list[object]] = {name: [] for name in names}

    def __enter__(self) -> "_Rows":
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts.values():
            part.close()

    def begin(self, rollout: Rollout, route: str) -> None:
        """Begin a task: the rollouts that follow are of this one's."""
        task = rollout.task
        self.task, self._tasks = task.id, self._tasks + 1
        self._unwritten["tasks"].append([task.id, kind_of(rollout), task.split, request(rollout), route])

    def add(self, rollout: Rollout, arm: str, failing: int, shard: int) -> None:
        """Add one row: `failing` is the message that is marked, -1 for none, `shard` where its messages are."""
        values = (
            rollout.id,
            self._tasks - 1,
            self._arms.index(arm),
            rollout.trial,
            rollout.outcome[0],
            plain(rollout.score.reward) if rollout.score else None,
            failing,
            shard,
        )
        for name, value in zip(self.COLUMNS, values, strict=True):
            self._unwritten[name].append(value)
        if len(self._unwritten["id"]) >= SHARD:
            self._write()

    def _write(self) -> None:
        for name, values in self._unwritten.items():
            if values:
                self._parts[name].write(("," if self._parts[name].tell() else "") + compact(values)[1:-1])
                values.clear()

    def script(self) -> Iterator[str]:
        """Yield the file that hands the table to its page, piece by piece."""
        self._write()
        yield f'captrainRows({{"arms":{compact(self._arms.names)},"tasks":['
        yield from self._pieces("tasks")
        yield '],"columns":{'
        for number, name in enumerate(self.COLUMNS):
            yield f'{"," if number else ""}"{name}":['
            yield from self._pieces(name)
            yield "]"
        yield "}});\n"

    def _pieces(self, name: str) -> Iterator[str]:
        self._parts[name].seek(0)
        while piece := self._parts[name].read(BLOCK):
            yield piece


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
        return self.messages.index(compact(message_on_page(message)))

    def script(self, number: int) -> str:
        """Write the file of the shard of this number."""
        messages = ",".join(self.messages.names)
        return f'captrainShard({number},{{"messages":[{messages}],"rollouts":{compact(self.rollouts)}}});\n'
