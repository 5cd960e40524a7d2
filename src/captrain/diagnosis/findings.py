"""Findings that a developer can act on: the steps, tasks and orders of calls that correlate with failure, and what to
fix.

Rollouts are counted one by one. What the order of calls and the comparison of trials need of each is stored in a
temporary SQLite database. Calls are those of the agent, and those of a simulated user with tools of its own. A text of
several words is not a value: two wordings of one thing are not a difference.
"""

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

from captrain.capabilities import (
    EVERY,
    LEVEL,
    OF_USER,
    Association,
    Call,
    Key,
    Needs,
    RolloutView,
    Tally,
    Toolbox,
    Traits,
    bare_view,
    calls_in,
    has_solution,
    is_value,
    name_of,
    number_of,
    order_traits,
    place_of,
    prompt_line,
    same,
    sourced_calls,
    text_of,
)
from captrain.contract import calls_of
from captrain.diagnosis.rollouts import DiagnosedRollout
from captrain.records import Message, Record, Rollout
from captrain.statistics import fisher, holm

FIXES = 3
"""Steps that the report names first."""
QUOTED = 240
"""Most characters quoted of a message."""
MANY = 3
"""Changes of a reference are counted up to this number; more count as this many."""
NOT_OF_TASK = ("task", "script", "ending", "user_calls", "milestones", "limit", "grading", "submission")
"""Fields of an imported task's data that captrain adds to the task's own fields."""
REFERENCED: Key = ("referenced",)
REFERENCE: Key = ("suspect", "a suspect reference")
WORD, STEP = "task id", "reference step"
"""Names of values of which a task may have several."""
EDITS = {"insert": "made", "replace": "equal", "drop": "beyond", "end": "ended", "say": "told"}
"""The kind of feature for each kind of repair."""
SUBJECTS = {"say": "what was asked", "end": "the end"}
"""Subjects of repairs that concern no tool."""
END = "(end)"


class Fault(Record):
    """A step whose repair may turn a failure into a pass.

    key: of its feature. message: where it shows. proven: by replay. lookup: the skipped read tool, "" if the evidence
    names none.
    """

    key: Key
    message: int
    evidence: str
    proven: bool = False
    quote: str = ""
    lookup: str = ""


class Played(Record):
    """A rollout in short: its place, calls, faults if it failed, primary cause, and the values of its task."""

    place: str
    calls: list[Call]
    faults: list[Fault]
    cause: str | None
    values: list[Key]


@dataclass
class Fix:
    """A step to fix, over all failures that differ in it.

    counts: failures with it, failures with it alone, failures where replay proved that the repair is needed. causes:
    the primary causes of these failures. lookups: read tools that were skipped. values: of their tasks. kinds: the
    kinds of task that are over-represented, with their numbers. example: the fault of one failure, at `place`.
    """

    key: Key
    place: str
    example: Fault
    counts: Counter[str] = field(default_factory=Counter[str])
    causes: Counter[str] = field(default_factory=Counter[str])
    lookups: Counter[str] = field(default_factory=Counter[str])
    values: Counter[Key] = field(default_factory=Counter[Key])
    kinds: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])


@dataclass(frozen=True)
class Findings:
    """What correlates with failure, and what to fix.

    steps, tasks, order: associations of reference steps, of task values and of orders of calls. examples: one for each
    order feature that holds. partings: the first calls in which a passed and a failed trial differ, with the number of
    tasks. mixed: tasks with passed and failed trials. fixes: what to fix first.
    """

    steps: list[Association]
    tasks: list[Association]
    order: list[Association]
    examples: dict[Key, str]
    partings: list[tuple[tuple[str, str], int]]
    mixed: int
    fixes: list[Fix]


def quote_of(message: Message) -> str:
    """Quote a message: its role and the beginning of its text and calls."""
    text = " ".join(" ".join([text_of(message.get("content") or ""), *call_lines(message)]).split())
    return f"{message['role']}: {text if len(text) <= QUOTED else text[:QUOTED] + ' ...'}"


def call_lines(message: Message) -> list[str]:
    """A line for each tool call of a message."""
    return [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls_of(message)]


class Collection:
    """Counts rollouts and makes `Findings` of them.

    Args:
        toolbox: the tools of the logs.
        needs: what rollouts without a reference need.
    """

    def __init__(self, toolbox: Toolbox, needs: Needs | None = None) -> None:
        self._toolbox, self._needs = toolbox, needs
        self._steps, self._tasks, self._order = Tally(), Tally(), Tally()
        self._database = sqlite3.connect("", isolation_level=None)  # SQLite's own temporary file
        self._database.executescript("""
        PRAGMA journal_mode = OFF;
        CREATE TABLE played (task TEXT, failed INTEGER, counted INTEGER, content TEXT);
        BEGIN""")

    def add(self, row: DiagnosedRollout, rollout: Rollout) -> None:
        """Count a rollout; one with a suspect reference counts only as a fault of the reference."""
        calls, view = sourced_calls(rollout, self._toolbox), bare_view(rollout, self._toolbox)
        failed, counts = row.outcome == "failed", row.standing != "suspect"
        tasks = _task_traits(rollout, view)
        steps, faults = reference_traits(rollout, view)
        if counts:
            self._steps.add(steps, failed)
            self._tasks.add(tasks, failed)
            self._order.add(order_traits(calls), failed)
            faults = _needed_faults(row) or faults
        else:
            faults = [Fault(key=REFERENCE, message=len(rollout.messages), evidence="; ".join(row.suspicions))]
        if not faults and self._needs and not has_solution(rollout):
            lacks = self._needs.of(rollout)[0]
            faults = [_fault_of(lack.need.association, lack.message, lack.need.evidence) for lack in lacks]
        if not faults and row.causes:
            cause = row.causes[0]
            faults = [Fault(key=("cause", cause.cause), message=cause.message, evidence=cause.evidence)]
        reads = [call for call in calls_in(rollout.reference, self._toolbox) if call.kind == "read"]
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
        examples, fixes = dict[Key, str](), dict[Key, Fix]()
        for (content,) in self._database.execute("SELECT content FROM played WHERE failed ORDER BY rowid"):
            record = Played.model_validate_json(content)
            traits, faults = order_traits(record.calls), record.faults
            changes = [call for call in record.calls if call.kind == "write"]
            for row in [row for row in sure if traits.shows(row) and record.calls]:
                call = place_of(row.key, record.calls)
                examples.setdefault(row.key, f"{record.place}, message {call.message}: {call}")
                # Other changes may need a read tool and fail for want of it; that does not explain this failure.
                is_lookup = row.key[0] == "called" and not row.holds and self._toolbox.kind(row.key[1]) == "read"
                if not (is_lookup and changes) and (not record.faults or record.faults[0].key[0] == "cause"):
                    faults = [_fault_of(row, call.message, row.name).model_copy(update={"quote": str(call)})]
            keys = {fault.key: fault for fault in reversed(faults)}
            for key, fault in keys.items():
                fix = fixes.setdefault(key, Fix(key, record.place, fault))
                fix.counts.update(failures=1, alone=len(keys) == 1, proven=fault.proven)
                fix.causes.update([record.cause] if record.cause else [])
                fix.lookups.update([fault.lookup] if fault.lookup else [])
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

    def _kinds(self, fix: Fix) -> list[tuple[str, int]]:
        """Values of the task that are more frequent among these failures than elsewhere, the surest first."""
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
        return [(name_of(key), number) for _, key, number in sorted(sure)[:2]]


def reference_traits(rollout: Rollout, view: RolloutView) -> tuple[Traits, list[Fault]]:
    """Compare a rollout with its reference: steps that it misses or makes differently, and changes that the reference
    lacks.

    Returns:
        All differences as traits, and as faults those that change something. A further change is no fault if the check
        does not compare the final state.
    """
    traits, faults, bases = Traits(), list[Fault](), {"beyond": REFERENCED, "told": ("informs",)}
    facts = rollout.task.facts
    user_calls = [(call.name, call.arguments) for call in facts.user_calls]
    if not rollout.reference and not user_calls:
        return traits, faults

    def add(key: Key, message: int, evidence: str) -> None:
        faults.append(Fault(key=key, message=message, evidence=evidence))
        traits.hold(key, bases.get(key[0], ("goal", key[1])))

    for goal in _unmade(view):
        traits.hold(("made", goal.tool), ("goal", goal.tool))
    traits.bases |= {REFERENCED, *(("goal", act.tool) for act in view.expected)}
    for pair in view.pairs:
        goal, write = pair.goal, pair.write
        wrong = [name for name in write.differing(goal) if is_value(goal.arguments[name])] if write else []
        evidence = f"the reference has {goal}"
        if write is None:
            add(("made", goal.tool), view.last, evidence)
        elif write.tool != goal.tool or wrong:
            kind = "equal" if write.tool == goal.tool else "instead"
            add((kind, goal.tool, *wrong[:1]), write.message, evidence)
    if facts.compares_state:
        for act in view.extras:
            add(("beyond", act.tool), act.message, f"the reference has no {act}")
    calls = [call for message in rollout.messages if message["role"] == "user" for call in calls_of(message)]
    for tool, arguments in user_calls:
        traits.bases.add(("goal", tool + OF_USER))
        if not any(name == tool and same(arguments, actual) for name, actual in calls):
            add(("made", tool + OF_USER), view.last, f"the user never made {tool}")
    traits.bases |= {("informs",)} if view.informs else set()
    for value in [value for value in view.informs if view.first_telling(value) is None][:1]:
        add(("told", "what was asked"), view.last, f"{value} was not told")
    return traits, faults


def _unmade(view: RolloutView) -> Iterator[Call]:
    """Read calls and transfers of a reference that the rollout never makes.

    Each is compared with the smallest group of calls that share a value with it: comparing every pair takes minutes
    where there are thousands.
    """
    index: dict[tuple[str, str, object], list[Call]] = {}
    for act in view.acts:
        for name, value in act.arguments.items():
            if isinstance(value, str | int | float):
                index.setdefault((act.tool, name, number_of(value)), []).append(act)
    for goal in view.expected:
        groups = [
            index.get((goal.tool, name, number_of(value)), [])
            for name, value in goal.arguments.items()
            if isinstance(value, str | int | float) and name in goal.names
        ]
        peers = min(groups, key=len) if groups else [act for act in view.acts if act.tool == goal.tool]
        if goal.kind != "write" and all(act.differing(goal) for act in peers):
            yield goal


def _task_traits(rollout: Rollout, view: RolloutView) -> Traits:
    """Values of the task: environment, its own fields, the words of its id, the calls of its reference."""
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
        traits.hold(("value", "changes in its reference", count), REFERENCED)
    for step in [*(act.tool for act in view.expected), *user_calls]:
        traits.hold(("value", STEP, step), REFERENCED)
    return traits


def _fault_of(row: Association, message: int, evidence: str) -> Fault:
    """A fault from an order of calls that correlates with failure."""
    return Fault(key=("order", row.name, "" if row.holds else prompt_line(row.key)), message=message, evidence=evidence)


def _needed_faults(row: DiagnosedRollout) -> list[Fault]:
    """The needed repairs of a rollout; a dropped and an inserted call with the same reason are one fault."""
    repairs, faults = [repair for repair in row.repairs if repair.needed], list[Fault]()
    reasons = {kind: {(r.message, r.evidence) for r in repairs if r.kind == kind} for kind in ("insert", "drop")}
    for repair in repairs:
        reason = repair.message, repair.evidence
        is_swap = reason in reasons["insert"] & reasons["drop"] and bool(repair.evidence)
        if is_swap and repair.kind == "drop":
            continue
        subject = SUBJECTS.get(repair.kind) or repair.step.partition("(")[0]
        key = ("instead" if is_swap else EDITS[repair.kind], subject)
        if repair.kind == "replace":
            key += (" and ".join(repair.arguments) if len(repair.arguments) in (1, 2) else "set of arguments",)
        faults.append(Fault(key=key, message=repair.message, evidence=repair.evidence, proven=repair.proven))
    return faults


def _parting(failed: Sequence[Call], passed: Sequence[Sequence[Call]]) -> tuple[str, str]:
    """The first calls in which a failed trial differs from the passed trial that it follows longest."""

    def identity(call: Call) -> tuple[str, list[tuple[str, str]]]:
        return call.step, [(name, value) for name, value in call.values.items() if not value.startswith("~")]

    lengths = list[int]()
    for trial in passed:
        pairs = zip(map(identity, trial), map(identity, failed), strict=False)
        lengths.append(len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]))
    length = max(lengths)
    trial = passed[lengths.index(length)]
    steps = [calls[length].step if length < len(calls) else END for calls in (trial, failed)]
    if steps[0] != steps[1] or steps[0] == END:
        return steps[0], steps[1]
    names = [name for name, value in trial[length].values.items() if failed[length].values.get(name) != value]
    return steps[0], f"{steps[1]} with another {' and '.join(names[:2]) or 'set of arguments'}"
