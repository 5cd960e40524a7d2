"""Findings: which steps, tasks and orders of calls correlate with failure, and what to fix first.

Rollouts are counted one by one. A temporary SQLite database holds their calls, so that orders of calls and trials can
be compared. Calls are made by the agent, or by a simulated user with tools of its own. A text of several words does not
count as a value, because two wordings of one thing are not a difference.
"""

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from random import Random

from captrain.capabilities import (
    CAUSES,
    EVERY,
    LEVEL,
    OF_USER,
    Association,
    Call,
    Grade,
    Key,
    Lack,
    Needs,
    RolloutView,
    Tally,
    Toolbox,
    Traits,
    bare_view,
    calls_in,
    has_solution,
    is_value,
    order_traits,
    place_of,
    prompt_line,
    sourced,
    text_of,
)
from captrain.contract import calls_of
from captrain.diagnosis.rollouts import DiagnosedRollout, RepairStep
from captrain.records import Message, Record, Rollout
from captrain.statistics import fisher, holm

FIXES = 3
"""Number of steps to fix that the report names first."""
QUOTED = 240
"""Maximum number of characters quoted of a message."""
MANY = 3
"""Cap on the number of changes counted in a reference."""
NOT_OF_TASK = ("task", "script", "ending", "user_calls", "milestones", "limit", "grading", "submission")
"""Fields of an imported task's data that captrain adds to the task's own fields."""
REFERENCED: Key = ("referenced",)
REFERENCE: Key = ("suspect", "a suspect reference")
WORD, STEP, CHANGES = "task id", "reference step", "changes in its reference"
"""Names of task values that captrain adds. The first two can occur several times in one task."""
EDITS = {"insert": "made", "replace": "equal", "drop": "beyond", "end": "ended", "say": "told"}
"""The kind of feature for each kind of repair."""
SUBJECTS = {"say": "what was asked", "end": "the end"}
"""Subjects of repairs that concern no tool."""
NO_CALL = "(end)"


class Fault(Record):
    """A step whose repair may turn a failure into a pass.

    key: the feature's key. message: index of the message that shows the fault. lookup: the skipped read tool; "" if the
    evidence names none.
    """

    key: Key
    message: int
    evidence: str
    grade: Grade
    quote: str = ""
    lookup: str = ""


class Played(Record):
    """A rollout in short: its task and trial, calls, faults, primary cause, and the values of its task."""

    place: str
    calls: list[Call]
    faults: list[Fault]
    cause: str | None
    values: list[Key]


@dataclass
class Fix:
    """A step to fix, with figures over all failures that need its repair.

    counts: of failures that need the step (failures), that need only this step (alone), that need it by replay
    (proven), and of passed rollouts with the fault (passed). mark: sum of one random number per failure, equal for
    steps with the same failures. with_same_failures: these other steps.
    causes: the primary causes of these failures. lookups: read tools that were skipped. values: of their tasks. kinds:
    the kinds of task that are over-represented, with their numbers. example: the fault of one failure, at `place`.
    """

    key: Key
    place: str
    example: Fault
    counts: Counter[str] = field(default_factory=Counter[str])
    mark: int = 0
    with_same_failures: list[Key] = field(default_factory=list[Key])
    causes: Counter[str] = field(default_factory=Counter[str])
    lookups: Counter[str] = field(default_factory=Counter[str])
    values: Counter[Key] = field(default_factory=Counter[Key])
    kinds: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])


@dataclass(frozen=True)
class Findings:
    """What correlates with failure, and what to fix.

    steps, tasks, order, seen: associations of reference steps, of task values, of orders of calls, and of observations.
    examples: one for each order of calls that correlates. partings: the first calls in which a passed and a failed
    trial differ, with the number of tasks. mixed: tasks with passed and failed trials. fixes: what to fix first.
    """

    steps: list[Association]
    tasks: list[Association]
    order: list[Association]
    seen: list[Association]
    examples: dict[Key, str]
    partings: list[tuple[tuple[str, str], int]]
    mixed: int
    fixes: list[Fix]


def quote_of(message: Message) -> str:
    """Quote a message: its role and the beginning of its text and calls."""
    text = " ".join(" ".join([text_of(message.get("content") or ""), *call_lines(message)]).split())
    return f"{message['role']}: {text if len(text) <= QUOTED else text[:QUOTED] + ' ...'}"


def call_lines(message: Message) -> list[str]:
    """Return a line for each tool call of a message."""
    return [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls_of(message)]


class Collection:
    """Counts rollouts and makes `Findings` of them.

    Args:
        toolbox: the tools of the logs.
        needs: needs of rollouts without a reference.
    """

    def __init__(self, toolbox: Toolbox, needs: Needs | None = None) -> None:
        self._toolbox, self._needs = toolbox, needs
        self._steps, self._tasks, self._order, self._seen = Tally(), Tally(), Tally(), Tally()
        self._database = sqlite3.connect("", isolation_level=None)  # SQLite's own temporary file
        self._database.executescript("""
        PRAGMA journal_mode = OFF;
        CREATE TABLE played (task TEXT, failed INTEGER, counted INTEGER, content TEXT);
        BEGIN""")

    def add(self, row: DiagnosedRollout, rollout: Rollout) -> None:
        """Count a rollout. If its reference is suspect, count only the fault of the reference."""
        view = bare_view(rollout, self._toolbox)
        calls = sourced(view.calls, rollout.messages)
        failed, counts = row.outcome == "failed", row.standing != "suspect"
        tasks, faults = _task_traits(rollout, view), [*_faults_of(row)]
        if counts:
            self._steps.add(_step_traits(row, view), failed)
            self._tasks.add(tasks, failed)
            self._order.add(order_traits(calls), failed)
            self._seen.add(_seen_traits(row), failed)
        if not faults and self._needs and not has_solution(rollout):
            faults = [_fault_of(lack) for lack in self._needs.of(rollout, view.calls, calls)[0]]
        reads = [call for call in calls_in(rollout.reference, self._toolbox) if call.kind == "read"] if faults else []
        quoted = [
            fault.model_copy(
                update={
                    "quote": "".join(map(quote_of, rollout.messages[fault.message : fault.message + 1])),
                    "lookup": next((read.tool for read in reads if str(read) in fault.evidence), ""),
                }
            )
            for fault in faults
        ]
        cause, values = row.primary.cause if row.primary else None, [*tasks.holding]
        content = Played(place=row.place, calls=calls, faults=quoted, cause=cause, values=values).model_dump_json()
        task = text_of([row.environment, row.task])
        self._database.execute("INSERT INTO played VALUES (?, ?, ?, ?)", (task, failed, counts, content))

    def findings(self) -> Findings:
        """Test the counted features, and choose what to fix first."""
        order = self._order.associations()
        sure = [row for row in reversed(order) if row.p_holm <= LEVEL]
        examples, fixes, draw = dict[Key, str](), dict[Key, Fix](), Random(0)
        for failed, content in self._database.execute("SELECT failed, content FROM played ORDER BY failed DESC, rowid"):
            record, mark = Played.model_validate_json(content), draw.getrandbits(64)
            keys = {fault.key: fault for fault in reversed(record.faults)}
            if not failed:
                for fix in [fixes[key] for key in keys if key in fixes]:
                    fix.counts.update(passed=1)
                continue
            traits = order_traits(record.calls)
            for row in [row for row in sure if traits.shows(row) and record.calls]:
                call = place_of(row.key, record.calls)
                examples.setdefault(row.key, f"{record.place}, message {call.message}: {call}")
            for key, fault in keys.items():
                fix = fixes.setdefault(key, Fix(key, record.place, fault))
                fix.counts.update(failures=1, alone=int(len(keys) == 1), proven=int(fault.grade is Grade.PROVEN))
                fix.mark += mark
                fix.causes.update([record.cause] if record.cause else [])
                fix.lookups.update([fault.lookup] if fault.lookup else [])
                fix.values.update(record.values)
        first = sorted(fixes.values(), key=lambda fix: (-fix.counts["failures"], -fix.counts["alone"], fix.key))
        whole: dict[int, Fix] = {}
        for fix in first:
            # Steps with exactly the same failures are reported as one.
            if whole.setdefault(fix.mark, fix) is not fix:
                whole[fix.mark].with_same_failures.append(fix.key)
        first = [*whole.values()][:FIXES]
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
        steps, tasks, seen = (tally.associations() for tally in (self._steps, self._tasks, self._seen))
        return Findings(steps, tasks, order, seen, examples, parted, mixed, first)

    def _kinds(self, fix: Fix) -> list[tuple[str, int]]:
        """Return task values that are more frequent among these failures than elsewhere, lowest p-value first."""
        rows, features = list[tuple[float, Key, int]](), self._tasks.features
        values = {key: number for key, number in fix.values.items() if key in features and fix.key != REFERENCE}
        reach = Counter({EVERY: fix.counts["failures"]})
        for key, number in values.items():
            # A task has one value for each field, but several words and steps.
            reach[features[key][0]] += number if key[1] not in (WORD, STEP) else 0
        for key, number in values.items():
            base, cell = features[key]
            whole = self._tasks.bases[base]
            remainder = cell.failed + cell.passed - number, whole.failed + whole.passed - reach[base]
            p = fisher((number, reach[base]), remainder)[0]
            is_more = number * remainder[1] > remainder[0] * reach[base] and key[2] != fix.key[1]
            rows.append((p if is_more else 1.0, key, number))
        sure = [row for row, p in zip(rows, holm([row[0] for row in rows]), strict=True) if p <= LEVEL]
        return [(_tasks_with(key), number) for _, key, number in sorted(sure)[:2]]


def _tasks_with(key: Key) -> str:
    """Say which tasks have a value, to follow the word "tasks"."""
    _, field, value = key
    if field == CHANGES:
        return f"whose reference makes {value} change{'' if value == '1' else 's'}"
    phrase = {STEP: "whose reference calls {1}", WORD: "with {1} in the id"}.get(field, "with {0} {1}")
    return phrase.format(field, value)


def _step_traits(row: DiagnosedRollout, view: RolloutView) -> Traits:
    """Return the rollout's differences from its reference: missing, changed and extra steps."""
    user_steps = [step.name + OF_USER for step in view.facts.user_calls]
    if not view.rollout.reference and not user_steps:
        return Traits()
    bases = {("goal", step) for step in (*(goal.tool for goal in view.expected), *user_steps)}
    traits = Traits({EVERY, REFERENCED, *bases} | ({("informs",)} if view.informs else set()))
    for lookup in view.due_lookups:
        traits.hold(("made", lookup.step), ("goal", lookup.step))
    for step in row.repairs:
        key = _key_of(step, is_swap=False)
        base = {"beyond": REFERENCED, "told": ("informs",), "ended": EVERY}.get(key[0], ("goal", key[1]))
        traits.hold(key[:3], base)
    return traits


def _seen_traits(row: DiagnosedRollout) -> Traits:
    """Return the observations on a rollout as features."""
    traits = Traits()
    for remark in row.observations:
        traits.hold(("seen", remark.name), EVERY)
    return traits


def _task_traits(rollout: Rollout, view: RolloutView) -> Traits:
    """Return the values of the task as features: environment, own fields, words of the id, calls of the reference."""
    traits, data = Traits(), {"environment": rollout.environment, **rollout.task.data}
    for name, value in data.items():
        if name not in NOT_OF_TASK and not isinstance(value, dict) and is_value(value):
            traits.hold(("value", name, text_of(value)), ("field", name))
    for word in re.findall(r"[A-Za-z][A-Za-z_]{2,}", rollout.task.id):
        traits.hold(("value", WORD, word.strip("_")), EVERY)
    user_calls = [call.name + OF_USER for call in rollout.task.facts.user_calls]
    changes = sum(act.kind != "read" for act in view.expected) + len(user_calls)
    if rollout.reference or user_calls:
        count = str(changes) if changes < MANY else f"{MANY} or more"
        traits.hold(("value", CHANGES, count), REFERENCED)
    for step in [*(act.tool for act in view.expected), *user_calls]:
        traits.hold(("value", STEP, step), REFERENCED)
    return traits


def _fault_of(lack: Lack) -> Fault:
    """Make a fault from a need that a contrast of passed and failed rollouts shows."""
    row, causes = lack.need.association, {"missing_lookup", "extra_write", "invalid_call", "fabricated_fact"}
    line = prompt_line(row.key) if lack.need.kind in causes and not row.holds else ""
    key = ("order", row.mistake, line)
    return Fault(key=key, message=lack.message, evidence=lack.need.evidence, grade=Grade.CONTRAST)


def _key_of(step: RepairStep, *, is_swap: bool) -> Key:
    """Return the key of a step to repair: its kind, its subject and the arguments that differ."""
    subject = SUBJECTS.get(step.kind) or step.step.partition("(")[0]
    key: Key = ("instead" if is_swap else EDITS[step.kind], subject)
    if step.kind == "replace":
        key += (" and ".join(step.arguments) if len(step.arguments) in (1, 2) else "arguments",)
    return key


def _faults_of(row: DiagnosedRollout) -> Iterator[Fault]:
    """Yield the steps that must be repaired in a rollout; if there are none, its primary cause.

    A dropped and an inserted call with the same reason count as one fault. Steps without a sure cause are skipped.
    """
    if row.standing == "suspect":
        evidence = "; ".join(row.suspicions)
        yield Fault(key=REFERENCE, message=0, evidence=evidence, grade=Grade.RECORDED)
        return
    repairs = [step for step in row.repairs if step.needed and step.cause and CAUSES[step.cause].of_agent]
    reasons = {kind: {(r.message, r.evidence) for r in repairs if r.kind == kind} for kind in ("insert", "drop")}
    for step in repairs:
        is_swap = (step.message, step.evidence) in reasons["insert"] & reasons["drop"]
        if not (is_swap and step.kind == "drop"):
            grade = Grade.PROVEN if step.proven else Grade.TRACED
            yield Fault(key=_key_of(step, is_swap=is_swap), message=step.message, evidence=step.evidence, grade=grade)
    causes = [cause for cause in row.causes if CAUSES[cause.cause].of_agent and cause.grade is not Grade.CONTRAST]
    if not repairs and causes:
        first = causes[0]
        yield Fault(key=("cause", first.cause), message=first.message, evidence=first.evidence, grade=first.grade)


def _parting(failed: Sequence[Call], passed: Sequence[Sequence[Call]]) -> tuple[str, str]:
    """Return the first calls that differ between a failed trial and the passed trial with the longest common start."""

    def identity(call: Call) -> tuple[str, list[tuple[str, str]]]:
        return call.step, [(name, value) for name, value in call.values.items() if not value.startswith("~")]

    lengths = list[int]()
    for trial in passed:
        pairs = zip(map(identity, trial), map(identity, failed), strict=False)
        lengths.append(len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]))
    length = max(lengths)
    trial = passed[lengths.index(length)]
    steps = [calls[length].step if length < len(calls) else NO_CALL for calls in (trial, failed)]
    if steps[0] != steps[1] or steps[0] == NO_CALL:
        return steps[0], steps[1]
    names = [name for name, value in trial[length].values.items() if failed[length].values.get(name) != value]
    return steps[0], f"{steps[1]} with the wrong {' and '.join(names[:2]) or 'arguments'}"
