"""The rollouts of a project as the report has them: indexed where they lie, and written as files of data.

A report shows every rollout, but few at a time. So the files are read once, line by line, which also finds what is
corrupt in them; what has to be known of all rollouts together (their order, what failed ones lack, the rows of the
table) goes into a database that SQLite holds on disk; and a rollout is read again, from its place in its file, when it
is written. Memory does not grow with the number of rollouts.

A page that was opened from a disk cannot fetch, but it can load a script: each file is one call with JSON, one of rows
for the table and shards of messages. Rollouts of one task lie in one shard, so that two arms are compared at the price
of one; messages that are equal are written once a shard. Text never becomes markup: `<` is escaped here, and pages set
text alone.
"""

import heapq
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from captrain.capabilities import is_majority, labels_of_rollouts
from captrain.comparison import Arms, acting_stages
from captrain.contract import calls_of
from captrain.records import IndexEntry, JsonObject, Message, Rollout, RolloutLabels, censored, scan
from captrain.reporting.loaders import ROLLOUTS
from captrain.reporting.pages import files
from captrain.reporting.pages.files import Missing

LABELS = "artifacts/labels/labels.jsonl"
BLOCK = 16
"""Rollouts that are read and searched for keys at once."""
SHARD = 240
"""Rollouts a shard, at least: it ends with a task."""
REQUEST = 200
"""Letters of a request that the table can be searched for."""
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
    id TEXT, task INTEGER, arm INTEGER, trial INTEGER, outcome TEXT, reward REAL, mark INTEGER, shard INTEGER
);
"""
"""Places of rollouts and labels, and (`heading`, `line`) the tasks and rows of the page's table."""
COLUMNS = ("id", "task", "arm", "trial", "outcome", "reward", "mark", "shard")
COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""Made once: `json.dumps` makes one anew for every value that it is given settings for."""
READABLE = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True)
class Lack:
    """Lack of one capability in one failed rollout: the number of labelling runs in which it is LACKING, and the
    evidence that most of those give, with the index of the message it points at."""

    capability: str
    lacking: int
    runs: int
    evidence: str
    message: int | None


def majority_lacks(labels: Sequence[RolloutLabels]) -> dict[str, list[Lack]]:
    """List what each failed rollout lacks in more than half of the runs that labelled it."""
    lacking: defaultdict[str, list[Lack]] = defaultdict(list)
    for rollout, capabilities in labels_of_rollouts(row for row in labels if row.outcome == "failed").items():
        for name, runs in capabilities.items():
            if is_majority([label.verdict == "LACKING" for label in runs]):
                against = [label for label in runs if label.verdict == "LACKING"]
                reasons = Counter((label.evidence, label.message) for label in against)
                ((evidence, message), _), *_ = reasons.most_common(1)
                lacking[rollout].append(Lack(name, len(against), len(runs), evidence, message))
    return dict(lacking)


class Archive:
    """Rollouts and labels of a project, indexed in a temporary database.

    Args:
        root: of the project.

    `discovery`, `evaluation` and `labels` are what is missing of each, None where it is here.

    Raises:
        UserError: a file is corrupt.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._database = sqlite3.connect("", isolation_level=None)  # a file that SQLite removes
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.executescript(SCHEMA)
        self._database.execute("BEGIN")
        self._files: dict[str, BinaryIO] = {}
        for stage in acting_stages():  # each, so that a corrupt one is named
            files.document(root, f"results/{stage}/index.json", stage, dict[str, IndexEntry])
        adapters = files.document(root, "results/adapters/index.json", "adapters", dict[str, IndexEntry])
        discovery, evaluation = ROLLOUTS["diagnosis"], ROLLOUTS["evaluation"]
        self.discovery = files.present(root, discovery, "rollouts", partial(self._read_rollouts, discovery, None))
        self.evaluation: Missing | None = adapters
        if not isinstance(adapters, Missing):
            read = partial(self._read_rollouts, evaluation, Arms(root))
            self.evaluation = files.present(root, evaluation, "evaluation", read)
        self.labels = files.present(root, LABELS, "labels", self._read_labels)
        routes = files.table_of(root, "results/routes/routes.csv")
        rows = [] if isinstance(routes, Missing) else routes
        self._database.executemany("INSERT OR REPLACE INTO route VALUES (:task, :chosen)", rows)
        if self.discovery is None and self.labels is None:
            self._read_lacks()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
        for file in self._files.values():
            file.close()

    def _read_rollouts(self, part: str, arms: Arms | None) -> None:
        for place, rollout in scan(self._root / part, Rollout):
            self._database.execute("INSERT OR IGNORE INTO task (name) VALUES (?)", (rollout.task.id,))
            ((task,),) = self._database.execute("SELECT number FROM task WHERE name = ?", (rollout.task.id,))
            row = (rollout.id, part, place, task, rollout.trial, arms.of(rollout) if arms else "base")
            self._database.execute("INSERT INTO rollout VALUES (NULL, ?, ?, ?, ?, ?, ?)", row)

    def _read_labels(self) -> None:
        rows = scan(self._root / LABELS, RolloutLabels)
        failures = ((row.rollout, place) for place, row in rows if row.outcome == "failed")
        self._database.executemany("INSERT INTO label VALUES (?, ?)", failures)

    def _read_lacks(self) -> None:
        """Enter what failed rollouts of the diagnosis lack."""
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
            self._files[name] = (self._root / name).open("rb")
        self._files[name].seek(place)
        return self._files[name].readline()

    def _read(self, rows: Sequence[tuple[int, str, int]]) -> Iterator[tuple[int, Rollout, list[Lack]]]:
        """Yield rollouts by number, file and place, each with what it lacks."""
        lines = (self._line(part, place) for _, part, place in rows)
        rollouts = censored([Rollout.model_validate_json(line) for line in lines])
        query = "SELECT capability, lacking, runs, evidence, message FROM lack WHERE rollout = ? ORDER BY rowid"
        for (number, *_), rollout in zip(rows, rollouts, strict=True):
            yield number, rollout, [Lack(*row) for row in self._database.execute(query, (number,))]

    @property
    def has_rollouts(self) -> bool:
        """True if there is any rollout."""
        return bool(self._database.execute("SELECT EXISTS (SELECT 1 FROM rollout)").fetchone()[0])

    def examples(self, capability: str, names: Sequence[str], count: int) -> list[tuple[Rollout, Lack]]:
        """List at most `count` rollouts of the diagnosis that lack the capability: first those of these names, in their
        order, then the others in the order in which they were played."""
        query = """SELECT number, part, place, name FROM lack JOIN rollout ON rollout.number = lack.rollout
        WHERE capability = ? ORDER BY number"""
        order = {name: position for position, name in enumerate(names)}
        # Equal ranks stay in their order.
        rows = self._database.execute(query, (capability,))
        first = heapq.nsmallest(count, rows, key=lambda row: order.get(row[3], len(order)))
        return [
            (rollout, lack)
            for _, rollout, lacks in self._read([row[:3] for row in first])
            for lack in lacks
            if lack.capability == capability
        ]

    def data(self, selected: Collection[str]) -> Iterator[tuple[str, str | Iterator[str]]]:
        """Yield the files of data, name and content, whole or piece by piece: tasks in the order in which they were
        played first; within one, trials and arms side by side.

        Args:
            selected: ids of the capabilities that were selected.
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
                    # Of what the user asks for first, the beginning.
                    asks = (message for message in rollout.messages if message["role"] == "user")
                    request = next((message_on_page(message)["text"][:REQUEST] for message in asks), "")
                    heading = compact([last, kind, rollout.task.split, request, route])
                    self._database.execute("INSERT INTO heading VALUES (?)", (heading,))
                marks = marks_of(rollout, lacking, selected)
                mark = marks[0]["at"] if marks and marks[0]["selected"] else -1
                reward = rollout.score.reward if rollout.score else None
                place = arms.setdefault(arm, len(arms))
                row = (rollout.id, tasks - 1, place, rollout.trial, rollout.outcome[0], reward, mark, number)
                self._database.execute("INSERT INTO line VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                shard.add(rollout, marks)
        if shard.rollouts:
            yield f"data/shard-{number:03d}.js", shard.script(number)
        yield "data/rows.js", self._rows(list(arms))

    def _rows(self, arms: list[str]) -> Iterator[str]:
        """Yield the file that hands the table to its page, column by column."""
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


class Shard:
    """Rollouts whose equal messages are written once."""

    def __init__(self) -> None:
        self.messages: dict[str, int] = {}
        self.rollouts: dict[str, JsonObject] = {}

    def add(self, rollout: Rollout, marks: list[JsonObject]) -> None:
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
        """Write the file of the shard of this number."""
        messages = ",".join(self.messages)
        return f'captrainShard({number},{{"messages":[{messages}],"rollouts":{compact(self.rollouts)}}});\n'


def compact(value: object) -> str:
    """Encode JSON without spaces, in which no markup can begin."""
    return COMPACT.encode(value).replace("<", "\\u003c")


def call_text(name: str, arguments: JsonObject) -> str:
    """Format a tool call as one line; equal calls give equal lines."""
    return f"{name}({', '.join(f'{key}={READABLE.encode(arguments[key])}' for key in sorted(arguments))})"


def message_on_page(message: Message) -> JsonObject:
    """Convert a message to what pages show: who speaks, the text, tool calls one line each."""
    content = message.get("content") or ""
    return {
        "calls": [call_text(*call) for call in calls_of(message)],
        "name": message.get("name", ""),
        "role": message["role"],
        "text": content if isinstance(content, str) else json.dumps(content, ensure_ascii=False),
    }


def marks_of(rollout: Rollout, lacking: Sequence[Lack], selected: Collection[str]) -> list[JsonObject]:
    """Mark where a rollout that failed goes wrong: the messages that labels point at, and the call at which it leaves
    the reference. First message first, and what rejected candidates lack last: it does not tell failed from passed.

    Returns:
        Of each mark the index of its message, the evidence, what is lacking there, and in how many runs.
    """
    if rollout.outcome != "failed":
        return []
    last = len(rollout.messages) - 1
    marks: list[JsonObject] = [
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
    """Find the first tool call that is not the reference's, name and arguments: the index of its message (their number,
    where calls are missing at the end), and what the reference does; None without a reference or a departure."""
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
