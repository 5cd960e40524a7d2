"""The rollouts of a project and their labels, left where they lie: an index says where each of them is.

A report shows every rollout, but few at a time. So the files are read once, line by line, which also finds what is
corrupt in them; what has to be known of all rollouts together (their order, which arm played what and how often it
passed, what failed ones lack) goes into a database that SQLite holds on disk; and a rollout is read again, from its
place in its file, when its page is written. Memory does not grow with the number of rollouts.
"""

import heapq
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from captrain.capabilities import demands, is_majority, labels_of_rollouts
from captrain.comparison import Arms, acting_stages
from captrain.records import IndexEntry, JsonObject, Rollout, RolloutLabels, censored, scan
from captrain.reporting import loaders
from captrain.reporting.pages import files
from captrain.reporting.pages.files import Missing

LABELS = "artifacts/labels/labels.jsonl"
ROUTES = "results/routes/routes.csv"
COMPOSITIONS = "results/routes/compositions.json"
BLOCK = 16
"""Rollouts that are read and searched for keys at once."""
Part = Literal["diagnosis", "evaluation"]
STAGES: dict[Part, str] = {"diagnosis": "rollouts", "evaluation": "evaluation"}
SCHEMA = """
CREATE TABLE task (number INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE rollout (
    number INTEGER PRIMARY KEY, name TEXT, part TEXT, place INTEGER, task INTEGER, trial INTEGER, arm TEXT
);
CREATE TABLE tally (
    kind TEXT, task TEXT, arm TEXT, rollouts INTEGER, passed INTEGER, first INTEGER, PRIMARY KEY (arm, task, kind)
);
CREATE TABLE label (rollout TEXT, place INTEGER);
CREATE INDEX labels ON label (rollout);
CREATE TABLE lack (rollout INTEGER, capability TEXT, lacking INTEGER, runs INTEGER, evidence TEXT, message INTEGER);
CREATE INDEX lacks ON lack (rollout);
CREATE INDEX examples ON lack (capability, rollout);
CREATE TABLE route (task TEXT PRIMARY KEY, arm TEXT);
CREATE TABLE composed (name TEXT, task TEXT, PRIMARY KEY (name, task));
"""
ADDITION = """
INSERT INTO tally VALUES (?1, ?2, ?3, ?4, ?5, ?6)
ON CONFLICT DO UPDATE SET rollouts = rollouts + ?4, passed = passed + ?5, first = coalesce(first, ?6)"""
PAIRED = """
SELECT base.kind, CAST(base.passed AS REAL) / base.rollouts, CAST(adapter.passed AS REAL) / adapter.rollouts
FROM tally AS adapter JOIN tally AS base ON base.arm = 'base' AND base.task = adapter.task AND base.kind = adapter.kind
WHERE adapter.arm = ? AND base.rollouts > 0 AND adapter.rollouts > 0 ORDER BY min(base.first, adapter.first)"""


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

    `discovery`, `evaluation`, `labels`, `outcomes` (which arm each rollout of the evaluation is of) and `routes` are
    what is missing of each, None where it is here.

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
        self._demanding: Counter[tuple[str, str]] = Counter()
        self._labelled: Counter[str] = Counter()
        adapters = files.document(root, "results/adapters/index.json", "adapters", dict[str, IndexEntry])
        self.discovery = self._present("diagnosis", lambda: self._read_rollouts("diagnosis", None))
        indices(root)  # so that a corrupt one is named
        arms = None if isinstance(adapters, Missing) else Arms(root)
        self.evaluation = self._present("evaluation", lambda: self._read_rollouts("evaluation", arms))
        self.labels = files.present(root, LABELS, "labels", self._read_labels)
        self.outcomes = self.evaluation or (adapters if isinstance(adapters, Missing) else None)
        document = files.document(root, COMPOSITIONS, "routes", dict[str, object])
        names = set() if isinstance(document, Missing) else {*document}
        self.routes = files.present(root, ROUTES, "routes", lambda: self._read_routes(names))
        if self.discovery is None and self.labels is None:
            self._read_lacks()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
        for file in self._files.values():
            file.close()

    def _present(self, part: Part, read: Callable[[], None]) -> Missing | None:
        return files.present(self._root, loaders.ROLLOUTS[part], STAGES[part], read)

    def _read_rollouts(self, part: Part, arms: Arms | None) -> None:
        for place, rollout in scan(self._root / loaders.ROLLOUTS[part], Rollout):
            name, arm = rollout.task.id, arms.of(rollout) if arms else "base"
            self._database.execute("INSERT OR IGNORE INTO task (name) VALUES (?)", (name,))
            ((task,),) = self._database.execute("SELECT number FROM task WHERE name = ?", (name,))
            row = (rollout.id, part, place, task, rollout.trial, arm)
            number = self._database.execute("INSERT INTO rollout VALUES (NULL, ?, ?, ?, ?, ?, ?)", row).lastrowid
            if arms:
                has_verdict = rollout.outcome != "error"
                counts = (has_verdict, rollout.outcome == "passed", number if has_verdict else None)
                self._database.execute(ADDITION, (kind_of(rollout), name, arm, *counts))

    def _read_labels(self) -> None:
        rows = scan(self._root / LABELS, RolloutLabels)
        failures = ((row.rollout, place) for place, row in rows if row.outcome == "failed")
        self._database.executemany("INSERT INTO label VALUES (?, ?)", failures)

    def _read_routes(self, names: Collection[str]) -> None:
        for part in files.table_parts(self._root, ROUTES):
            self._database.executemany(
                "INSERT OR REPLACE INTO route VALUES (?, ?)", [(row["task"], row["chosen"]) for row in part]
            )
            routers = [column for column in part[0] if column not in ("task", "kind")]
            composed = {(row[name], row["task"]) for row in part for name in routers if row[name] in names}
            self._database.executemany("INSERT OR IGNORE INTO composed VALUES (?, ?)", sorted(composed))

    def _read_lacks(self) -> None:
        """Enter what failed rollouts of the diagnosis lack and which capabilities their tasks demand, by kind."""
        rollouts = self._database.execute("SELECT number, place FROM rollout WHERE part = 'diagnosis' ORDER BY number")
        for number, place in rollouts:
            (rollout,) = self._rollouts([("diagnosis", place)])
            rows = self._labels_of(rollout.id)
            if not rows:
                continue
            lacks = majority_lacks(rows).get(rollout.id, [])
            self._database.executemany(
                "INSERT INTO lack VALUES (?, ?, ?, ?, ?, ?)",
                [(number, lack.capability, lack.lacking, lack.runs, lack.evidence, lack.message) for lack in lacks],
            )
            kind, slugs = kind_of(rollout), {slug for row in rows for slug in row.labels}
            self._labelled[kind] += 1
            self._demanding.update((slug, kind) for slug in demands(rows, slugs)[rollout.id])

    def _labels_of(self, rollout: str) -> list[RolloutLabels]:
        places = self._database.execute("SELECT place FROM label WHERE rollout = ? ORDER BY rowid", (rollout,))
        lines = (self._line(LABELS, place) for (place,) in places.fetchall())
        return [censored(RolloutLabels.model_validate_json(line)) for line in lines]

    def _rollouts(self, places: Iterable[tuple[str, int]]) -> list[Rollout]:
        lines = (self._line(loaders.ROLLOUTS[part], place) for part, place in places)
        return censored([Rollout.model_validate_json(line) for line in lines])

    def _line(self, name: str, place: int) -> bytes:
        if name not in self._files:
            self._files[name] = (self._root / name).open("rb")
        self._files[name].seek(place)
        return self._files[name].readline()

    @property
    def has_rollouts(self) -> bool:
        """True if there is any rollout."""
        return bool(self._database.execute("SELECT EXISTS (SELECT 1 FROM rollout)").fetchone()[0])

    def rollouts(self) -> Iterator[tuple[Rollout, str, list[Lack]]]:
        """Yield every rollout with its arm and what it lacks: tasks in the order in which they were played first;
        within one, trials and arms side by side. Those of the evaluation where their arms are known."""
        parts = ["diagnosis"] if self.outcomes else ["diagnosis", "evaluation"]
        marks = ", ".join("?" * len(parts))
        query = f"SELECT number, part, place, arm FROM rollout WHERE part IN ({marks}) ORDER BY task, trial, number"
        rows = self._database.execute(query, parts)
        while block := rows.fetchmany(BLOCK):
            rollouts = self._rollouts((part, place) for _, part, place, _ in block)
            for rollout, (number, *_, arm) in zip(rollouts, block, strict=True):
                yield rollout, arm, self.lacks(number)

    def lacks(self, number: int) -> list[Lack]:
        """List what one rollout lacks."""
        query = "SELECT capability, lacking, runs, evidence, message FROM lack WHERE rollout = ? ORDER BY rowid"
        return [Lack(*row) for row in self._database.execute(query, (number,))]

    def examples(self, capability: str, names: Sequence[str], count: int) -> list[tuple[Rollout, Lack]]:
        """List at most `count` rollouts of the diagnosis that lack the capability: first those of these names, in their
        order, then the others in the order in which they were played."""
        query = """SELECT name, number, place FROM lack JOIN rollout ON rollout.number = lack.rollout
        WHERE capability = ? ORDER BY number"""
        order = {name: position for position, name in enumerate(names)}
        rows = self._database.execute(query, (capability,))
        # Equal ranks stay in their order.
        first = heapq.nsmallest(count, rows, key=lambda row: order.get(row[0], len(order)))
        places = [(number, place) for _, number, place in first]
        return [
            (rollout, lack)
            for number, place in places
            for rollout in self._rollouts([("diagnosis", place)])
            for lack in self.lacks(number)
            if lack.capability == capability
        ]

    def own_kinds(self, capability: str) -> set[str]:
        """Collect the kinds of task of which most failed rollouts of the diagnosis demand the capability."""
        return {kind for kind, total in self._labelled.items() if 2 * self._demanding[capability, kind] > total}

    def arms(self) -> list[str]:
        """List all arms of the evaluation, by name."""
        return [arm for (arm,) in self._database.execute("SELECT DISTINCT arm FROM tally ORDER BY arm")]

    def paired_rates(self, adapter: str) -> tuple[list[str], NDArray[np.void]]:
        """Return the kinds of task, and of each task that the base and this adapter have played: the index of its kind,
        and the pass rates of both (`kind`, `base`, `adapter`)."""
        kinds: dict[str, int] = {}
        rows = (
            (kinds.setdefault(kind, len(kinds)), base, rate)
            for kind, base, rate in self._database.execute(PAIRED, (adapter,))
        )
        rates = np.fromiter(rows, dtype=[("kind", int), ("base", float), ("adapter", float)])
        return [*kinds], rates

    def route(self, task: str) -> str:
        """Look up the arm that TRACE's router chooses for a task; "" where it is not known."""
        row = self._database.execute("SELECT arm FROM route WHERE task = ?", (task,)).fetchone()
        return row[0] if row else ""

    def composition_names(self, arms: Collection[str]) -> dict[str, str]:
        """Name compositions by the digest that stands for them among the arms: a composition is played on the tasks
        that are routed to it and on no other, and is named where that is true of one alone. `arms`: all others."""
        compositions = self._database.execute("SELECT name, count(*) FROM composed GROUP BY name").fetchall()
        names_of = {}
        for arm, tasks in self._database.execute("SELECT arm, count(DISTINCT task) FROM tally GROUP BY arm").fetchall():
            fitting = [name for name, size in compositions if size == tasks and self._common(name, arm) == tasks]
            if arm not in arms and len(fitting) == 1:
                names_of[arm] = fitting[0]
        return names_of

    def _common(self, composition: str, arm: str) -> int:
        query = """SELECT count(DISTINCT composed.task) FROM composed JOIN tally ON tally.arm = ? AND
        tally.task = composed.task WHERE composed.name = ?"""
        return self._database.execute(query, (arm, composition)).fetchone()[0]


def kind_of(rollout: Rollout) -> str:
    """Return the kind of a rollout's task."""
    return str(rollout.task.data.get("kind", ""))


def indices(root: Path) -> dict[str, JsonObject]:
    """Read the index of each stage that is here: what it has left to act with, by stage and name."""
    documents = {
        stage: files.document(root, f"results/{stage}/index.json", stage, dict[str, IndexEntry])
        for stage in acting_stages()
    }
    return {stage: index for stage, index in documents.items() if not isinstance(index, Missing)}
