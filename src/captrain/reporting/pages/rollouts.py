"""Indexes the rollouts of a project on disk, and writes them as data files for the report page.

A report contains every rollout but shows few at a time. Rollout files are read once, line by line, which also finds
corrupt lines. Data about all rollouts together (their order, the capabilities that failed ones lack, the rows of the
table) goes into a temporary SQLite database. A rollout is read again from its position in the file when it is written.
So memory use does not grow with the number of rollouts.

A page that is opened from disk cannot fetch data, but it can load scripts. So each data file is a script that calls a
function with JSON. One file has the rows of the table, and the shards have the messages. All rollouts of a task are in
one shard, so comparing two arms loads one file. Within a shard, equal messages are stored once. Text never becomes
markup: `<` is escaped here, and the page sets only text.
"""

import heapq
import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypedDict

from captrain.capabilities import is_majority, labels_of_rollouts
from captrain.comparison import BASE, PLAYED, acting_stages, evaluation_rows, played
from captrain.contract import calls_of
from captrain.records import IndexEntry, JsonObject, Message, Rollout, RolloutLabels, censored, scan
from captrain.reporting.loaders import ROLLOUTS
from captrain.reporting.pages import files
from captrain.reporting.pages.files import Missing

LABELS = "artifacts/labels/labels.jsonl"
BLOCK = 16
"""Number of rollouts that are read and cleaned of secrets at a time."""
SHARD = 240
"""Least number of rollouts in a shard. A shard always ends with the last rollout of a task."""
REQUEST = 200
"""Characters of the user's first message that the table can search."""
SCHEMA = """
CREATE TABLE task (number INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE rollout (
    number INTEGER PRIMARY KEY, name TEXT, part TEXT, place INTEGER, task INTEGER, trial INTEGER, arm TEXT
);
CREATE TABLE label (rollout TEXT, place INTEGER);
CREATE INDEX labels ON label (rollout);
CREATE TABLE lack (rollout INTEGER, capability TEXT, lacking INTEGER, runs INTEGER, evidence TEXT, message INTEGER);
CREATE INDEX lacks ON lack (rollout);
CREATE INDEX examples ON lack (capability, rollout);
CREATE TABLE route (task TEXT PRIMARY KEY, arm TEXT);
CREATE TABLE heading (task TEXT);
CREATE TABLE line (
    id TEXT, task INTEGER, arm INTEGER, trial INTEGER, outcome TEXT, reward REAL, mark INTEGER, shard INTEGER,
    lacks TEXT
);
"""
"""Database schema: positions of rollouts and labels in their files, and the page's table.

`heading` has the table's tasks, and `line` its rows.
"""
COLUMNS = ("id", "task", "arm", "trial", "outcome", "reward", "mark", "shard", "lacks")
COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""Shared encoder, because `json.dumps` with settings would create a new one for each value."""
CONTROL = re.compile(r"\\(?:\\|[bfr]|u(?:00(?:[01]|7f|[89]\w)|061c|200[b-f]|202[89a-e]|206|feff|fff[9ab])\w?)")
"""A backslash in JSON, or the escape of a control character, an invisible one, or one that sets the direction."""
READABLE = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True)
class MajorityLack:
    """A capability that a failed rollout lacks according to most labelling runs.

    Holds how many of how many runs say LACKING, their most frequent evidence, and the index of its message.
    """

    capability: str
    lacking: int
    runs: int
    evidence: str
    message: int | None


def majority_lacks(labels: Sequence[RolloutLabels]) -> dict[str, list[MajorityLack]]:
    """List the capabilities that each failed rollout lacks in more than half of the runs that labelled it."""
    lacking: defaultdict[str, list[MajorityLack]] = defaultdict(list)
    for rollout, capabilities in labels_of_rollouts(row for row in labels if row.outcome == "failed").items():
        for name, runs in capabilities.items():
            if is_majority([label.verdict == "LACKING" for label in runs]):
                against = [label for label in runs if label.verdict == "LACKING"]
                reasons = Counter((label.evidence, label.message) for label in against)
                ((evidence, message), _), *_ = reasons.most_common(1)
                lacking[rollout].append(MajorityLack(name, len(against), len(runs), evidence, message))
    return dict(lacking)


class Archive(ExitStack):
    """Rollouts and labels of a project, indexed in a temporary database.

    `discovery`, `evaluation` and `labels` are a `Missing` if a file is not there, else None.

    Args:
        root: folder of the project.

    Raises:
        UserError: a file is corrupt.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._database = sqlite3.connect("", isolation_level=None)  # a temporary file that SQLite removes
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.executescript(SCHEMA)
        self._database.execute("BEGIN")
        self.callback(self._database.close)
        self._files: dict[str, BinaryIO] = {}
        for stage in acting_stages():  # read all, so that a corrupt one is named
            files.document(root, f"results/{stage}/index.json", stage, dict[str, IndexEntry])
        discovery = ROLLOUTS["diagnosis"]
        self.discovery = files.present(root, discovery, "rollouts", partial(self._read_discovery, discovery))
        self.evaluation = files.present(root, PLAYED.as_posix(), "evaluation", lambda: None)
        for row in (row for row in evaluation_rows() if (root / PLAYED / row).exists()):
            file = (PLAYED / row / "rollouts.jsonl").as_posix()
            missing = files.present(root, file, f"evaluation@{row}", partial(self._read_evaluation, row))
            self.evaluation = self.evaluation or missing
        self.labels = files.present(root, LABELS, "labels", self._read_labels)
        routes = files.table_of(root, "results/routes/routes.csv")
        rows = [] if isinstance(routes, Missing) else routes
        self._database.executemany("INSERT OR REPLACE INTO route VALUES (:task, :chosen)", rows)
        if self.discovery is None and self.labels is None:
            self._read_lacks()

    def _read_discovery(self, part: str) -> None:
        for place, rollout in scan(self._root / part, Rollout):
            self._add(rollout, part, place, BASE)

    def _read_evaluation(self, row: str) -> None:
        for outcome, rollout, file, place in played(self._root, [row]):
            self._add(rollout, file.as_posix(), place, outcome.arm)

    def _add(self, rollout: Rollout, part: str, place: int, arm: str) -> None:
        self._database.execute("INSERT OR IGNORE INTO task (name) VALUES (?)", (rollout.task.id,))
        ((task,),) = self._database.execute("SELECT number FROM task WHERE name = ?", (rollout.task.id,))
        row = (rollout.id, part, place, task, rollout.trial, arm)
        self._database.execute("INSERT INTO rollout VALUES (NULL, ?, ?, ?, ?, ?, ?)", row)

    def _read_labels(self) -> None:
        rows = scan(self._root / LABELS, RolloutLabels)
        failures = ((row.rollout, place) for place, row in rows if row.outcome == "failed")
        self._database.executemany("INSERT INTO label VALUES (?, ?)", failures)

    def _read_lacks(self) -> None:
        """Store, for each failed rollout of the diagnosis, the capabilities that it lacks."""
        query = "SELECT number, name FROM rollout WHERE part = ? ORDER BY number"
        for number, name in self._database.execute(query, (ROLLOUTS["diagnosis"],)):
            places = self._database.execute("SELECT place FROM label WHERE rollout = ? ORDER BY rowid", (name,))
            lines = [self._line(LABELS, place) for (place,) in places.fetchall()]
            labels = [censored(RolloutLabels.model_validate_json(line)) for line in lines]
            self._database.executemany(
                "INSERT INTO lack VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (number, lack.capability, lack.lacking, lack.runs, lack.evidence, lack.message)
                    for lack in majority_lacks(labels).get(name, [])
                ],
            )

    def _line(self, name: str, place: int) -> bytes:
        if name not in self._files:
            self._files[name] = self.enter_context((self._root / name).open("rb"))
        self._files[name].seek(place)
        return self._files[name].readline()

    def _read(self, rows: Sequence[tuple[int, str, int]]) -> Iterator[tuple[int, Rollout, list[MajorityLack]]]:
        """Yield the rollouts at the given (number, file, position), each with the capabilities that it lacks."""
        lines = (self._line(part, place) for _, part, place in rows)
        rollouts = censored([Rollout.model_validate_json(line) for line in lines])
        query = "SELECT capability, lacking, runs, evidence, message FROM lack WHERE rollout = ? ORDER BY rowid"
        for (number, *_), rollout in zip(rows, rollouts, strict=True):
            yield number, rollout, [MajorityLack(*row) for row in self._database.execute(query, (number,))]

    @property
    def has_rollouts(self) -> bool:
        """True if there is any rollout."""
        return bool(self._database.execute("SELECT EXISTS (SELECT 1 FROM rollout)").fetchone()[0])

    def examples(self, capability: str, names: Sequence[str], count: int) -> list[tuple[Rollout, MajorityLack]]:
        """List up to `count` rollouts of the diagnosis that lack the capability.

        The rollouts in `names` come first, in that order, then the others in the order in which they were played.
        """
        query = """SELECT number, part, place, name FROM lack JOIN rollout ON rollout.number = lack.rollout
        WHERE capability = ? ORDER BY number"""
        order = {name: position for position, name in enumerate(names)}
        rows = self._database.execute(query, (capability,))
        first = heapq.nsmallest(count, rows, key=lambda row: order.get(row[3], len(order)))
        return [
            (rollout, lack)
            for _, rollout, lacks in self._read([row[:3] for row in first])
            for lack in lacks
            if lack.capability == capability
        ]

    def data(self, selected: Collection[str]) -> Iterator[tuple[str, str | Iterator[str]]]:
        """Yield name and content of the data files. Tasks come in the order in which they were first played; trials and
        arms of a task are side by side.

        Args:
            selected: ids of the selected capabilities.
        """
        arms, tasks, last, number = dict[str, int](), 0, "", 0
        shard = Shard()
        query = """SELECT rollout.number, part, place, rollout.arm, coalesce(route.arm, '') FROM rollout
        JOIN task ON task.number = rollout.task LEFT JOIN route ON route.task = task.name
        ORDER BY rollout.task, trial, rollout.number"""
        cursor = self._database.execute(query)
        while block := cursor.fetchmany(BLOCK):
            for (_, rollout, lacking), (*_, arm, route) in zip(
                self._read([row[:3] for row in block]), block, strict=True
            ):
                if rollout.task.id != last:
                    if len(shard.rollouts) >= SHARD:
                        yield f"data/shard-{number:03d}.js", shard.script(number)
                        shard, number = Shard(), number + 1
                    last, tasks = rollout.task.id, tasks + 1
                    kind = str(rollout.task.data.get("kind", ""))
                    asks = (message for message in rollout.messages if message["role"] == "user")
                    request = next((message_on_page(message)["text"][:REQUEST] for message in asks), "")
                    heading = compact([last, kind, rollout.task.split, request, route])
                    self._database.execute("INSERT INTO heading VALUES (?)", (heading,))
                marks = marks_of(rollout, lacking, selected)
                mark = marks[0]["at"] if marks and marks[0]["selected"] else -1
                reward = rollout.score.reward if rollout.score else None
                lacks = " ".join(sorted(lack.capability for lack in lacking))
                place = arms.setdefault(arm, len(arms))
                row = (rollout.id, tasks - 1, place, rollout.trial, rollout.outcome[0], reward, mark, number, lacks)
                self._database.execute("INSERT INTO line VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
                shard.add(rollout, marks)
        if shard.rollouts:
            yield f"data/shard-{number:03d}.js", shard.script(number)
        yield "data/rows.js", self._rows(list(arms))

    def _rows(self, arms: list[str]) -> Iterator[str]:
        """Yield the text of the data file with the table in pieces, column by column."""
        yield f'captrainRows({{"arms":{compact(arms)},"tasks":['
        for number, (heading,) in enumerate(self._database.execute("SELECT task FROM heading ORDER BY rowid")):
            yield f"{',' if number else ''}{heading}"
        yield '],"columns":{'
        for place, name in enumerate(COLUMNS):
            yield f'{"," if place else ""}"{name}":['
            for number, (cell,) in enumerate(self._database.execute(f"SELECT {name} FROM line ORDER BY rowid")):
                yield f"{',' if number else ''}{compact(cell)}"
            yield "]"
        yield "}});\n"


class PageMessage(TypedDict):
    """A message as pages show it; each tool call is one line."""

    calls: list[str]
    name: str
    role: str
    text: str


class Mark(TypedDict):
    """A place where a failed rollout goes wrong: index of the message, evidence, and the missing capability.

    `capability` is "" for the first difference from the reference.
    """

    at: int
    why: str
    capability: str
    selected: bool
    runs: str


class Shard:
    """One data file of rollouts; equal messages are stored once."""

    def __init__(self) -> None:
        self.messages: dict[str, int] = {}
        self.rollouts: dict[str, JsonObject] = {}

    def add(self, rollout: Rollout, marks: list[Mark]) -> None:
        """Add a rollout with its marks."""

        def places(messages: Sequence[Message]) -> list[int]:
            texts = [compact(message_on_page(message)) for message in messages]
            return [self.messages.setdefault(text, len(self.messages)) for text in texts]

        self.rollouts[rollout.id] = {
            "messages": places(rollout.messages),
            "reference": places(rollout.reference),
            "marks": marks,
            "parts": rollout.score.parts if rollout.score else {},
            "error": rollout.error or "",
            "retries": rollout.retries,
            "policy": rollout.policy,
            "adapter": rollout.adapter or "",
            "tokens": [rollout.usage.prompt_tokens, rollout.usage.completion_tokens],
        }

    def script(self, number: int) -> str:
        """Return the content of the file."""
        messages = ",".join(self.messages)
        return f'captrainShard({number},{{"messages":[{messages}],"rollouts":{compact(self.rollouts)}}});\n'


def compact(value: object) -> str:
    """Encode JSON for a script element: compact, with `<` and control characters escaped."""
    text = CONTROL.sub(lambda sign: sign[0] if sign[0] == "\\\\" else f"\\{sign[0]}", COMPACT.encode(value))
    return text.replace("<", "\\u003c")


def call_text(name: str, arguments: JsonObject) -> str:
    """Format a tool call as one line; equal calls give equal lines."""
    return f"{name}({', '.join(f'{key}={READABLE.encode(arguments[key])}' for key in sorted(arguments))})"


def message_on_page(message: Message) -> PageMessage:
    """Convert a message to what pages show."""
    content = message.get("content") or ""
    return {
        "calls": [call_text(*call) for call in calls_of(message)],
        "name": message.get("name", ""),
        "role": message["role"],
        "text": content if isinstance(content, str) else json.dumps(content, ensure_ascii=False),
    }


def marks_of(rollout: Rollout, lacking: Sequence[MajorityLack], selected: Collection[str]) -> list[Mark]:
    """Return the places where a failed rollout goes wrong.

    These are the messages that labels point at, and the first call that differs from the reference. Marks are in the
    order of messages, and marks of rejected candidates come last.
    """
    if rollout.outcome != "failed":
        return []
    last = len(rollout.messages) - 1
    marks: list[Mark] = [
        {
            "at": last if lack.message is None else min(lack.message, last),
            "why": lack.evidence,
            "capability": lack.capability,
            "selected": lack.capability in selected,
            "runs": f"{lack.lacking} of {lack.runs}",
        }
        for lack in lacking
    ]
    if departure := departure_of(rollout.messages, rollout.reference):
        index, reason = departure
        marks.append({"at": min(index, last), "why": reason, "capability": "", "selected": True, "runs": ""})
    return sorted(
        marks, key=lambda mark: (not mark["selected"], mark["at"], not mark["capability"], mark["capability"])
    )


def departure_of(messages: Sequence[Message], reference: Sequence[Message]) -> tuple[int, str] | None:
    """Find the first tool call that differs from the reference in name or arguments.

    Returns:
        The index of the call's message, and a sentence on what the reference does. The index is the number of messages
        if calls are missing at the end. None if there is no reference or no difference.
    """
    actual, expected = (
        [
            (index, call_text(*call))
            for index, message in enumerate(dialogue)
            if message["role"] == "assistant"
            for call in calls_of(message)
        ]
        for dialogue in (messages, reference)
    )
    common = 0
    while common < min(len(actual), len(expected)) and actual[common][1] == expected[common][1]:
        common += 1
    if not expected or common == len(actual) == len(expected):
        return None
    index = actual[common][0] if common < len(actual) else len(messages)
    if common == len(expected):
        return index, "the reference makes no such call"
    call, later = expected[common][1], [text for _, text in expected[common:]]
    is_skipped = common == len(actual) or actual[common][1] in later
    return index, f"the reference calls {call} {'before this' if is_skipped else 'here'}"
