"""Findings that a developer can act on: which steps, tasks and orders of calls go with failing, where trials part, what
to fix.

Rollouts are counted as they go by; what the order of calls and the comparison of trials need of each lies in a database
that SQLite holds on disk.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

from captrain.capabilities import (
    EVERY,
    LEVEL,
    Association,
    Call,
    Key,
    Needs,
    Tally,
    Toolbox,
    fisher,
    has_solution,
    holm,
    name_of,
    order_traits,
    place_of,
    prompt_line,
    sourced_calls,
    text_of,
)
from captrain.contract import calls_of
from captrain.diagnosis.explained import Explained, RepairStep
from captrain.diagnosis.features import (
    STEP,
    WORD,
    Fault,
    reference_traits,
    task_traits,
)
from captrain.records import Message, Record, Rollout

FIXES = 3
"""Steps or decisions that the report names first."""
QUOTED = 240
"""Characters quoted of a message."""
REFERENCE: Key = ("suspect", "a suspect reference")
EDITS = {"insert": "made", "replace": "equal", "drop": "beyond", "end": "ended", "say": "told"}
"""The kind of feature that stands for a repair."""
SUBJECTS = {"say": "what was asked", "end": "the end"}
"""Subjects of repairs that are of no tool."""
END = "(end)"


class Played(Record):
    """Summary of a rollout: where it stands, its calls, the faults of a failed one, its primary cause, and the
    values of its task."""

    place: str
    calls: list[Call]
    faults: list[Fault]
    cause: str | None
    values: list[tuple[str, ...]]


@dataclass
class Fix:
    """A step or decision: in how many failures it differs, in how many it alone does, in how many replay has proven
    that the repair is needed (`counts`); the primary causes of these failures, the values of their tasks, the kinds of
    task that are over-represented among them with how many they are, and one failure."""

    key: Key
    place: str
    example: Fault
    counts: Counter[str] = field(default_factory=Counter[str])
    causes: Counter[str] = field(default_factory=Counter[str])
    values: Counter[Key] = field(default_factory=Counter[Key])
    kinds: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])


@dataclass(frozen=True)
class Findings:
    """Associations of steps of the reference, of the task and of the order of calls with failing; examples of the order
    features that hold, by key; of how many tasks that have both the first calls at which a passed and a failed trial
    part are these two; how many tasks have both; and what to fix first."""

    steps: list[Association]
    tasks: list[Association]
    order: list[Association]
    examples: dict[Key, str]
    partings: list[tuple[tuple[str, str], int]]
    mixed: int
    fixes: list[Fix]


def quote_of(message: Message) -> str:
    """Quote a message: its role and the beginning of what is said and called."""
    calls = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls_of(message)
    ]
    text = " ".join(" ".join([text_of(message.get("content") or ""), *calls]).split())
    return f"{message['role']}: {text if len(text) <= QUOTED else text[:QUOTED] + ' ...'}"


class Collection:
    """Gathers what `Findings` are made of.

    Args:
        toolbox: the tools of the logs.
        needs: of rollouts without a reference.
    """

    def __init__(self, toolbox: Toolbox, needs: Needs | None = None) -> None:
        self._toolbox, self._needs = toolbox, needs
        self._steps, self._tasks, self._order = Tally(), Tally(), Tally()
        self._database = sqlite3.connect("", isolation_level=None)  # a file that SQLite removes
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE played (task TEXT, failed INTEGER, counted INTEGER, content TEXT)")
        self._database.execute("BEGIN")

    def add(self, row: Explained, rollout: Rollout, *, counts: bool) -> None:
        """Take a rollout in; one of a suspect reference that does not count speaks for that alone."""
        calls, tasks, failed = (
            sourced_calls(rollout, self._toolbox),
            task_traits(rollout, self._toolbox),
            row.outcome == "failed",
        )
        steps, faults = reference_traits(rollout, self._toolbox)
        for tally, traits in ((self._steps, steps), (self._tasks, tasks), (self._order, order_traits(calls))):
            if counts:
                tally.add(traits, failed)
        repairs = _faults_of(row)
        lacks = self._needs.of(rollout)[0] if self._needs and not has_solution(rollout) else []
        causes = [_fault_of(lack.need.association, lack.message, lack.need.evidence) for lack in lacks] or [
            Fault(key=("cause", cause.cause), message=cause.message, evidence=cause.evidence)
            for cause in row.causes[:1]
        ]
        if not counts:
            repairs = [Fault(key=REFERENCE, message=len(rollout.messages), evidence="; ".join(row.suspicions))]
        quoted = [
            fault.model_copy(update={"quote": quote_of(rollout.messages[fault.message])})
            if fault.message < len(rollout.messages)
            else fault
            for fault in repairs or faults or causes
        ]
        cause, values = row.primary.cause if row.primary else None, [*tasks.holding]
        content = Played(place=row.place, calls=calls, faults=quoted, cause=cause, values=values).model_dump_json()
        task = text_of([row.environment, row.task])
        self._database.execute("INSERT INTO played VALUES (?, ?, ?, ?)", (task, failed, counts, content))

    def findings(self) -> Findings:
        """Test what was counted, and name what to fix first."""
        order = self._order.associations()
        examples, fixes = dict[Key, str](), dict[Key, Fix]()
        for record in self._read("WHERE failed ORDER BY rowid"):
            traits, faults = order_traits(record.calls), record.faults
            for row in [row for row in reversed(order) if row.p_holm <= LEVEL and traits.shows(row) and record.calls]:
                call = place_of(row.key, record.calls)
                examples.setdefault(row.key, f"{record.place}, message {call.message}: {call}")
                if not record.faults or record.faults[0].key[0] == "cause":
                    faults = [_fault_of(row, call.message, row.name).model_copy(update={"quote": str(call)})]
            keys = {fault.key: fault for fault in reversed(faults)}
            for key, fault in keys.items():
                fix = fixes.setdefault(key, Fix(key, record.place, fault))
                fix.counts.update(failures=1, alone=len(keys) == 1, proven=fault.proven)
                fix.causes.update([record.cause] if record.cause else [])
                fix.values.update(record.values)
        first = sorted(fixes.values(), key=lambda fix: (-fix.counts["failures"], -fix.counts["alone"], fix.key))[:FIXES]
        for fix in first:
            fix.kinds = self._kinds(fix)
        partings, mixed = Counter[tuple[str, str]](), 0
        query = "SELECT task, failed, content FROM played WHERE counted ORDER BY task, rowid"
        for _, rows in groupby(self._database.execute(query), key=lambda row: row[0]):
            trials: tuple[list[list[Call]], list[list[Call]]] = [], []
            for _, failed, content in rows:
                trials[failed].append(Played.model_validate_json(content).calls)
            mixed += all(trials)
            partings.update({_parting(failed, trials[0]) for failed in trials[1] if trials[0]})
        parted = sorted(partings.items(), key=lambda item: (-item[1], item[0]))
        return Findings(self._steps.associations(), self._tasks.associations(), order, examples, parted, mixed, first)

    def _read(self, condition: str) -> Iterator[Played]:
        for (content,) in self._database.execute(f"SELECT content FROM played {condition}"):
            yield Played.model_validate_json(content)

    def _kinds(self, fix: Fix) -> list[tuple[str, int]]:
        """The values of the task that more of these failures have than of all other rollouts, the surest first."""
        rows, features = list[tuple[float, Key, int]](), self._tasks.features
        values = {key: number for key, number in fix.values.items() if key in features and fix.key != REFERENCE}
        reach = Counter({EVERY: fix.counts["failures"]})
        for key, number in values.items():
            # A task has one value of each field, but several words and steps.
            reach[features[key][0]] += number if key[1] not in (WORD, STEP) else 0
        for key, number in values.items():
            base, cell = features[key]
            whole = self._tasks.bases[base]
            remainder = cell.failed + cell.passed - number, whole.failed + whole.passed - reach[base]
            p = fisher((number, reach[base]), remainder)[0]
            is_more = number * remainder[1] > remainder[0] * reach[base] and key[2] != fix.key[1]
            rows.append((p if is_more else 1.0, key, number))
        sure = [row for row, p in zip(rows, holm([row[0] for row in rows]), strict=True) if p <= LEVEL]
        return [(name_of(key), number) for _, key, number in sorted(sure)[:2]]


def _fault_of(row: Association, message: int, evidence: str) -> Fault:
    """A fault by what goes with failing."""
    return Fault(key=("order", row.name, "" if row.holds else prompt_line(row.key)), message=message, evidence=evidence)


def _faults_of(row: Explained) -> list[Fault]:
    """The needed repairs of a rollout; a call to be dropped and one to be made for the same reason are one decision."""
    repairs, faults = [repair for repair in row.repairs if repair.needed], list[Fault]()
    reasons = {kind: {_reason(repair) for repair in repairs if repair.kind == kind} for kind in ("insert", "drop")}
    swaps = {reason for reason in reasons["insert"] & reasons["drop"] if reason[1]}
    for repair in repairs:
        is_swap = _reason(repair) in swaps
        if is_swap and repair.kind == "drop":
            continue
        subject = SUBJECTS.get(repair.kind) or repair.step.partition("(")[0]
        step = ("instead" if is_swap else EDITS[repair.kind], subject)
        names = [" and ".join(repair.arguments) if len(repair.arguments) in (1, 2) else "set of arguments"]
        key = (*step, *(names if repair.kind == "replace" else []))
        faults.append(Fault(key=key, message=repair.message, evidence=repair.evidence, proven=repair.proven))
    return faults


def _reason(repair: RepairStep) -> tuple[int, str]:
    return repair.message, repair.evidence


def _parting(failed: Sequence[Call], passed: Sequence[Sequence[Call]]) -> tuple[str, str]:
    """The first calls at which a failed trial parts from the passed one that it goes along with longest."""
    lengths = [
        sum(
            1
            for _ in takewhile(lambda pair: _identity(pair[0]) == _identity(pair[1]), zip(trial, failed, strict=False))
        )
        for trial in passed
    ]
    length = max(lengths)
    trial = passed[lengths.index(length)]
    steps = [calls[length].step if length < len(calls) else END for calls in (trial, failed)]
    if steps[0] != steps[1] or steps[0] == END:
        return steps[0], steps[1]
    names = [name for name, value in trial[length].values.items() if failed[length].values.get(name) != value]
    return steps[0], f"{steps[1]} with another {' and '.join(names[:2]) or 'set of arguments'}"


def _identity(call: Call) -> tuple[str, list[tuple[str, str]]]:
    return call.step, [(name, value) for name, value in call.values.items() if not value.startswith("~")]
