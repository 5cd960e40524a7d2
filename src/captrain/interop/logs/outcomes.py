"""Decides whether a rollout passed, from the reward in its file, a field named by the user, or a score table.

- 1 and words such as "resolved" pass. 0 and words such as "wrong" fail.
- -1 fails, because some tools write -1 and 1.
- Rewards between 0 and 1 pass if they reach `--pass-at`; without this option only 1 passes.
- A missing or out-of-range reward is reported with its remedy. No reward is silently dropped.
"""

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from captrain.errors import UserError
from captrain.interop.logs.beside import result_beside
from captrain.interop.logs.source import Entry, Foreign, rollout_of
from captrain.interop.logs.verdicts import OUTCOMES, names_outcome, outcome_number
from captrain.records import Rollout, counted, plain, read_text

PERFECT = 1 - 1e-6
NO_REWARD = "no outcome found"
NO_FIELD = "it has no field"
OUT_OF_RANGE = "a reward is outside of 0 to 1"
DEEPEST = 3
LAST = "-1"
"""The last element of a list, in a dotted path."""
KEYS = ("trace_id", "session_id", "file", "instance_id", "task_id", "id", "name")
"""Columns of a table of scores that name a rollout."""
SCORES = "trace_id,reward"


@dataclass(frozen=True)
class Choices:
    """The user's choices about the files.

    outcome, messages, agent: fields that hold these, as dotted paths; "" if not given. pass_at: least reward that
    passes.
    """

    outcome: str = ""
    pass_at: float | None = None
    messages: str = ""
    agent: str = ""


AS_READ = Choices()
"""No choices by the user."""


def at(row: object, path: str) -> object:
    """Return the value at a dotted path of a JSON value; None if there is none."""
    value = row
    for part in path.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, list) and part == LAST and value:
            value = value[-1]
        elif isinstance(value, Mapping) and path in value:
            return value[path]  # a name with dots
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def likely_outcome(row: object) -> str:
    """Return the path of the field that most looks like an outcome; "" if none does."""
    found = [path for path, value in _leaves(row) if outcome_number(value) is not None and names_outcome(path)]
    ranks = {name: place for place, name in enumerate(OUTCOMES)}
    return min(
        found,
        key=lambda path: (not isinstance(at(row, path), bool), path.count("."), ranks.get(_last(path), len(ranks))),
        default="",
    )


def _leaves(value: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and depth < DEEPEST:
        for name, element in value.items():
            yield from _leaves(element, f"{prefix}.{name}" if prefix else str(name), depth + 1)
    elif prefix:
        yield prefix, value


def _last(path: str) -> str:
    return path.rpartition(".")[2].lower()


@dataclass
class Judge:
    """Decides which rollouts passed, and counts unusual rewards for the notes to the user."""

    choices: Choices
    scores: "Scores | None" = None
    between: list[float] = field(default_factory=list[float])
    below: int = 0
    judged: int = 0

    def chosen(self, entry: Entry, row: Foreign, path: Path) -> Entry:
        """Return the entry with the outcome, task and agent from the user's choices and score table.

        Raises:
            ValueError: the row lacks a field that the user named.
        """
        if entry.index == 1 and self.choices.outcome and at(row, self.choices.outcome) is None:
            row = {**row, **result_beside(path)[1]}
        for name in (self.choices.outcome, self.choices.agent):
            is_unjudged = name == self.choices.outcome and bool(entry.fault)
            if name and at(row, name) is None and not is_unjudged:
                raise ValueError(f"{NO_FIELD} {name}{_hint(row) if name == self.choices.outcome else ''}")
        if self.choices.outcome:
            entry = replace(entry, reward=at(row, self.choices.outcome))
        if self.choices.agent:
            entry = replace(entry, agent=str(at(row, self.choices.agent)))
        if self.scores is not None and (line := self.scores.line_of(entry, path)) is not None:
            entry = replace(entry, reward=line.reward, task=line.task or entry.task, agent=line.agent or entry.agent)
        return entry

    def rollout(self, file: str, entry: Entry, row: Foreign, path: Path) -> Rollout | str:
        """Return the rollout of an entry with its outcome, or the reason why it has none."""
        if entry.reward is None and not entry.fault:  # with a fault, no reward is needed
            name, result = result_beside(path) if entry.index == 1 and not _hint(row) else ("", {})
            return entry.missing or f"{NO_REWARD}{_hint(result, f' in {name}') if result else _hint(row)}"
        reward = outcome_number(entry.reward or 0.0 if entry.fault else entry.reward)
        if reward is None:
            return f"the reward {plain(str(entry.reward))[:80]!r} is not a number{_hint(row)}"
        return self._record(file, entry, reward)

    def _record(self, file: str, entry: Entry, reward: float) -> Rollout | str:
        mark = self.choices.pass_at
        is_graded = 0 <= reward <= 1
        if mark is None and not is_graded and reward != -1:
            return f"{OUT_OF_RANGE}: {reward:g}"
        passed = reward >= (PERFECT if mark is None else mark)
        record = rollout_of(file, entry, reward if is_graded else float(passed), passed=passed)
        if isinstance(record, Rollout) and record.score is not None:
            self.judged += 1
            self.below += reward == -1 and mark is None
            if 0 < reward < PERFECT:
                self.between.append(reward)
        return record

    def notes(self) -> Iterator[str]:
        """Yield notes for the user: on rewards other than 0 and 1, and on scores that match no rollout."""
        if self.between:
            least, most, mark = min(self.between), max(self.between), self.choices.pass_at
            passed = 0 if mark is None else sum(reward >= mark for reward in self.between)
            rule = (
                "only a reward of 1 passes; set another threshold with --pass-at X"
                if mark is None
                else f"{passed} of them pass with --pass-at {mark:g}"
            )
            spread = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            yield f"{len(self.between)} of {self.judged} rewards are between 0 and 1 ({spread}): {rule}"
        if self.below:
            yield f"counted as failed: {counted(self.below, 'reward')} of -1"
        if self.scores is not None and (unused := self.scores.unused()):
            total = counted(len(self.scores.lines), "score")
            yield f"{len(unused)} of {total} match no rollout, such as {plain(unused[0])}"


def _hint(row: Foreign, place: str = "") -> str:
    name = likely_outcome(row)
    return f"; `{name}`{place} looks like one: add --outcome {shlex.quote(name)}" if name else ""


@dataclass(frozen=True)
class ScoreLine:
    """A line of a table of scores."""

    key: str
    reward: object
    task: str = ""
    agent: str = ""


class Scores:
    """Rewards by the names of rollouts: traces, sessions, files, tasks.

    Raises:
        UserError: the file is no such table, or names a rollout twice.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._used = path, set[str]()
        remedy = f"give a CSV with the columns {SCORES}; the first may also be one of {', '.join(KEYS)}"
        try:
            rows = [*csv.DictReader(io.StringIO(read_text(path, remedy), newline=""))]
            columns = {name for name in rows[0] if isinstance(name, str)} if rows else set[str]()
            key = next(name for name in KEYS if name in columns)
            reward = next(name for name in (*OUTCOMES, *sorted(columns)) if name in columns and names_outcome(name))
        except (csv.Error, StopIteration, ValueError):
            raise UserError(f"{path} is not a table of scores", remedy) from None
        lines = [
            ScoreLine(
                _key(row[key], row.get("trial")),
                row[reward],
                row.get("task_id") or "" if key != "task_id" else "",
                row.get("agent") or row.get("implementation") or "",
            )
            for row in rows
        ]
        if any(not line.key or outcome_number(line.reward) is None for line in lines):
            raise UserError(f"{path} is not a table of scores", remedy)
        [(name, times)] = Counter(line.key for line in lines).most_common(1)
        if times > 1:
            raise UserError(
                f"{path} scores {key} {plain(name)} {times} times", "give each one reward, or add a column trial"
            )
        self.lines = {line.key: line for line in lines}

    def line_of(self, entry: Entry, path: Path) -> ScoreLine | None:
        """Return the entry's line in the score table, found by its task, another name of it, or its file."""
        names = [
            *entry.keys,
            entry.task,
            f"{path.name}:{entry.index}",
            str(path),
            path.name,
            path.stem,
            path.name.partition(".")[0],
            path.parent.name,
        ]
        trial = None if entry.trial is None else str(entry.trial)
        for name in names:
            for candidate in (_key(name, trial), _key(name, None)):
                if candidate in self.lines:
                    self._used.add(candidate)
                    return self.lines[candidate]
        return None

    def unused(self) -> list[str]:
        """Return the names in the table that match no rollout."""
        return [key for key in self.lines if key not in self._used]


def scores_for(entry: Entry, path: Path) -> tuple[str, str]:
    """Return the header and a line of an example score table that scores this entry."""
    if entry.keys and entry.keys[0]:
        return SCORES, f"{plain(entry.keys[0])},1"
    is_named = not re.fullmatch(r"[0-9a-f]{6}:\d+", entry.task)
    return (
        ("task_id,reward", f"{plain(entry.task)},1")
        if is_named
        else ("file,reward", f"{plain(path.name)}:{entry.index},1")
    )


def _key(name: str | None, trial: str | None) -> str:
    """Normalise a name: hexadecimal ids match with and without `0x`, in either case."""
    text = (name or "").strip()
    key = text.lower().removeprefix("0x")
    key = key if re.fullmatch(r"[0-9a-f-]{16,}", key) else text
    return f"{key}, trial {trial}" if trial else key
