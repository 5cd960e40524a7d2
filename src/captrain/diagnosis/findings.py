"""What a developer can act on: which steps, tasks and orders of calls go with failing, where trials part, what to fix.

Rollouts are counted as they go by; what the order of calls and the comparison of trials need of each lies in a database
that SQLite holds on disk.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from captrain.capabilities import Toolbox, text_of
from captrain.contract import calls_of
from captrain.diagnosis.association import LEVEL, PHRASES, Association, Key, Tally, Traits, name_of
from captrain.diagnosis.explained import Explained
from captrain.diagnosis.features import (
    Call,
    Difference,
    add_order,
    add_reference,
    add_task,
    calls_of_rollout,
    goals_of,
    place_of,
    steps_of,
)
from captrain.evaluation import fisher, holm
from captrain.records import Message, Record, Rollout

FIXES = 3
"""Steps or decisions that the report names first."""
QUOTED = 240
"""Characters quoted of a message."""
REFERENCE: Key = ("cause", "a suspect reference")
EDITS = {"insert": "made", "replace": "equal", "drop": "beyond", "end": "ended", "say": "told"}
"""The kind of feature that stands for a repair."""
END = "(end)"


class Fault(Record):
    """A step of a failed rollout whose repair may turn it into a pass, by the key of its feature."""

    key: list[str]
    message: int
    quote: str
    evidence: str
    proven: bool = False


class Played(Record):
    """What is kept of a rollout: where it stands, its calls, the faults of a failed one, its primary cause, and the
    values of its task."""

    place: str
    calls: list[Call]
    faults: list[Fault]
    cause: str | None
    values: list[list[str]]


@dataclass
class Fix:
    """A step or decision: in how many failures it differs, in how many it alone does, in how many replay has proven
    that the repair is needed; the primary causes of these failures, the kinds of task that are over-represented among
    them with how many they are, and one failure."""

    key: Key
    place: str
    example: Fault
    failures: int = 0
    alone: int = 0
    proven: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    values: Counter[Key] = field(default_factory=Counter[Key])
    kinds: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    @property
    def name(self) -> str:
        """The step in words."""
        return name_of(self.key, self.key[0] in ("beyond", "cause", "order"))

    @property
    def line(self) -> str:
        """The line for a prompt, "" where there is none."""
        return self.key[2] if self.key[0] == "order" else PHRASES[self.key[0]].line.format(*self.key[1:])


@dataclass(frozen=True)
class Findings:
    """Associations of steps of the reference, of the task and of the order of calls with failing; examples of the order
    features that hold, by key; of how many tasks that have both the first calls at which a passed and a failed trial
    part are these two; how many tasks have both; and what to fix first."""

    steps: list[Association]
    tasks: list[Association]
    order: list[Association]
    examples: dict[Key, tuple[str, Call]]
    partings: list[tuple[tuple[str, str], int]]
    mixed: int
    fixes: list[Fix]


def quote_of(message: Message) -> str:
    """Who speaks and the beginning of what is said and called."""
    calls = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls_of(message)
    ]
    text = " ".join(" ".join([text_of(message.get("content") or ""), *calls]).split())
    return f"{message['role']}: {text if len(text) <= QUOTED else text[:QUOTED] + ' ...'}"


class Collection:
    """Gathers what `Findings` are made of.

    Args:
        toolbox: the tools of the logs.
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._steps, self._tasks, self._order = Tally(), Tally(), Tally()
        self._database = sqlite3.connect("", isolation_level=None)  # a file that SQLite removes
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE played (task TEXT, failed INTEGER, counted INTEGER, content TEXT)")
        self._database.execute("BEGIN")

    def add(self, row: Explained, rollout: Rollout, *, counts: bool) -> None:
        """Take a rollout in; one of a suspect reference that does not count speaks for that alone."""
        calls, goals = steps_of(rollout.messages, self._toolbox), goals_of(rollout, self._toolbox)
        steps, tasks, order = Traits(), Traits(), Traits()
        played, failed = calls_of_rollout(rollout, calls), row.outcome == "failed"
        differences = add_reference(rollout, calls, goals, steps)
        add_task(rollout, goals, tasks)
        add_order(played, order)
        if counts:
            for tally, traits in ((self._steps, steps), (self._tasks, tasks), (self._order, order)):
                tally.add(traits, failed)
        found = [(difference, False) for difference in differences]
        if repairs := [repair for repair in row.repairs if repair.needed]:
            found = [
                (
                    Difference((EDITS[one.kind], one.step.partition("(")[0], "argument"), one.message, one.evidence),
                    one.proven,
                )
                for one in repairs
            ]
        if not counts:
            found = [(Difference(REFERENCE, len(rollout.messages), "; ".join(row.suspicions)), False)]
        faults = [
            Fault(
                key=[*difference.key],
                message=difference.message,
                quote=_quote(rollout, difference.message),
                evidence=difference.evidence,
                proven=proven,
            )
            for difference, proven in found
        ]
        cause = row.primary
        if cause and not faults:
            fault = Fault(key=["cause", cause.cause], message=cause.message, quote="", evidence=cause.evidence)
            faults = [fault.model_copy(update={"quote": _quote(rollout, cause.message)})]
        content = Played(
            place=row.place,
            calls=played,
            faults=faults if failed else [],
            cause=cause.cause if cause else None,
            values=[[*key] for key in tasks.holding],
        )
        task = text_of([row.environment, row.task])
        self._database.execute(
            "INSERT INTO played VALUES (?, ?, ?, ?)", (task, failed, counts, content.model_dump_json())
        )

    def findings(self) -> Findings:
        """Test what was counted, and name what to fix first."""
        order = self._order.associations()
        sure = [row for row in order if row.p_holm <= LEVEL]
        examples, fixes = dict[Key, tuple[str, Call]](), dict[Key, Fix]()
        for played in self._failed():
            traits, faults = Traits(), [*played.faults]
            add_order(played.calls, traits)
            shown = [row for row in sure if traits.shows(row)]
            for row in shown:
                if row.key not in examples and (call := place_of(row.key, played.calls)):
                    examples[row.key] = played.place, call
            if (not faults or faults[0].key[0] == "cause") and shown and shown[0].key in examples:
                call = place_of(shown[0].key, played.calls) or examples[shown[0].key][1]
                key = ["order", shown[0].name, shown[0].line]
                faults = [Fault(key=key, message=call.message, quote=call.text, evidence=shown[0].name)]
            keys = {tuple(fault.key): fault for fault in reversed(faults)}
            for key, fault in keys.items():
                fix = fixes.setdefault(key, Fix(key, played.place, fault))
                fix.failures += 1
                fix.alone += len(keys) == 1
                fix.proven += fault.proven
                fix.causes.update([played.cause] if played.cause else [])
                fix.values.update(tuple(value) for value in played.values)
        first = sorted(fixes.values(), key=lambda fix: (-fix.failures, -fix.alone, fix.key))[:FIXES]
        for fix in first:
            fix.kinds = self._kinds(fix)
        mixed, partings = self._partings()
        return Findings(self._steps.associations(), self._tasks.associations(), order, examples, partings, mixed, first)

    def _failed(self) -> Iterator[Played]:
        for (content,) in self._database.execute("SELECT content FROM played WHERE failed ORDER BY rowid"):
            yield Played.model_validate_json(content)

    def _kinds(self, fix: Fix) -> list[tuple[str, int]]:
        """The values of the task that more of these failures have than of all other rollouts, the surest first."""
        rows = list[tuple[float, Key, int]]()
        for key, number in fix.values.items():
            base, cell = self._tasks.features.get(key, ((), None))
            if cell is None or fix.key == REFERENCE or key[2] == fix.key[1]:
                continue
            whole = self._tasks.bases[base]
            others = cell.failed + cell.passed - number, whole.failed + whole.passed - fix.failures
            if number * others[1] > others[0] * fix.failures:
                rows.append((fisher((number, fix.failures), others)[0], key, number))
        sure = [row for row, p in zip(rows, holm([row[0] for row in rows]), strict=True) if p <= LEVEL]
        return [(name_of(key, True), number) for _, key, number in sorted(sure)[:2]]

    def _partings(self) -> tuple[int, list[tuple[tuple[str, str], int]]]:
        """Over the tasks with passed and failed trials, the first calls at which a failed one parts from the passed one
        that it goes along with longest: each pair of calls counts once a task."""
        query = "SELECT task, failed, content FROM played WHERE counted ORDER BY task, rowid"
        counts, mixed = Counter[tuple[str, str]](), 0
        for _, rows in groupby(self._database.execute(query), key=lambda row: row[0]):
            trials: tuple[list[list[Call]], list[list[Call]]] = [], []
            for _, failed, content in rows:
                trials[failed].append(Played.model_validate_json(content).calls)
            if all(trials):
                mixed += 1
                counts.update({_parting(failed, trials[0]) for failed in trials[1]})
        return mixed, sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _quote(rollout: Rollout, message: int) -> str:
    return quote_of(rollout.messages[message]) if message < len(rollout.messages) else ""


def _parting(failed: Sequence[Call], passed: Sequence[Sequence[Call]]) -> tuple[str, str]:
    """The first call of a passed trial and of a failed one that are not the same."""
    lengths = [
        next((place for place, (a, b) in enumerate(zip(trial, failed, strict=False)) if _identity(a) != _identity(b)),
             min(len(trial), len(failed)))
        for trial in passed
    ]  # fmt: skip
    length = max(lengths)
    trial = passed[lengths.index(length)]
    ours, theirs = (calls[length] if length < len(calls) else None for calls in (trial, failed))
    if ours and theirs and ours.step == theirs.step:
        names = [name for name in ours.values if ours.values[name] != theirs.values.get(name)]
        return ours.step, f"{ours.step} with another {' and '.join(names[:2]) or 'set of arguments'}"
    return ours.step if ours else END, theirs.step if theirs else END


def _identity(call: Call) -> tuple[str, list[tuple[str, str]]]:
    return call.step, [(name, value) for name, value in call.values.items() if not value.startswith("~")]
