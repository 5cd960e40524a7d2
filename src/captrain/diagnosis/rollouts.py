"""Diagnoses the rollouts of logs one by one and keeps them on disk. The rest of a diagnosis counts them.

Logs may be larger than memory. They are read three times:

1. to learn what tools do,
2. to collect facts about all rollouts: records before any write, and how often each agent passed each task,
3. to explain each rollout.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from pydantic import Field

from captrain.benchmarks import Replay, ToolKind, World, Worlds, open_worlds
from captrain.capabilities import (
    CAUSES,
    CLAUSES_PAGE,
    INFRASTRUCTURE,
    LIMIT,
    NO_VALUES,
    SIMULATOR,
    Clauses,
    DiagnosisContext,
    Explanation,
    ExpressionError,
    Grade,
    Needs,
    Occasion,
    RecordBook,
    RolloutView,
    Toolbox,
    calls_in,
    explain,
    has_solution,
    learn_needs,
    learn_toolbox,
    possible_causes,
    view_repaired,
)
from captrain.contract import CheckedEnvironment, calls_of
from captrain.diagnosis.observations import DOUBTS, OBSERVATIONS, Observation, Signals, observe
from captrain.errors import InfrastructureError, UserError
from captrain.interop import DROPPED, Logs
from captrain.records import Message, Record, Rollout, Spool, read_yaml, tracked
from captrain.run import Machine
from captrain.statistics import Bootstrap, mean

TRIED = 4
"""Minimum number of rollouts of a task before its reference is suspect because all of them failed in the same way."""
SELECTED_ROWS = "FROM tally WHERE (environment = ?1 OR ?1 IS NULL) AND (agent = ?2 OR ?2 IS NULL)"
"""Rows of one environment or of all, of one agent or of all."""
Standing = Literal["contrasted", "suspect", "spoilt", "limit", "error"]
"""How a rollout counts in the comparison. contrasted: it is compared. It is left out because of its reference
(suspect), its simulated user (spoilt), a limit of the harness (limit), or a missing verdict (error)."""


class OutcomeTally:
    """Counts scored rollouts.

    There may be as many tasks as rollouts, and an interval over tasks needs the rate of each. So the sums by task are
    on disk, and only the rates of one environment are loaded, as an array.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)  # SQLite's own temporary file
        self._database.executescript("""
        PRAGMA journal_mode = OFF;
        CREATE TABLE tally (
            environment TEXT, task TEXT, agent TEXT, rollouts INTEGER, passed INTEGER, reward REAL,
            PRIMARY KEY (environment, task, agent)
        );
        BEGIN""")

    def add(self, rollout: Rollout) -> None:
        """Count a scored rollout; skip one without a verdict."""
        if rollout.outcome != "error":
            reward = rollout.score.reward if rollout.score else 0.0
            row = (rollout.environment, rollout.task.id, rollout.policy, rollout.outcome == "passed", reward)
            addition = """
            INSERT INTO tally VALUES (?1, ?2, ?3, 1, ?4, ?5)
            ON CONFLICT DO UPDATE SET rollouts = rollouts + 1, passed = passed + ?4, reward = reward + ?5"""
            self._database.execute(addition, row)

    def never_passed_reason(self, environment: str, task: str) -> str | None:
        """Return why a task that no rollout passes is suspect; None if one passes or too few have tried."""
        query = "SELECT sum(rollouts), sum(passed), count(*) FROM tally WHERE environment = ? AND task = ?"
        count, passed, agents = self._database.execute(query, (environment, task)).fetchone()
        if passed or agents < 2 or count < TRIED:
            return None
        return f"none of {count} rollouts of {agents} agents passes the task"

    def agents(self) -> list[str]:
        """Return the names of the agents, in the order of the logs."""
        query = "SELECT agent FROM tally GROUP BY agent ORDER BY min(rowid)"
        return [name for (name,) in self._database.execute(query)]

    def environments(self, agent: str | None = None) -> Iterator[tuple[str, tuple[int, ...], tuple[float, ...]]]:
        """Yield the outcomes of one agent or of all: by environment and, if there are several, in total.

        Yields:
            Name; numbers of rollouts, tasks and passed rollouts; pass rate over tasks, the ends of its 95% interval,
            and mean reward over tasks.
        """
        query = f"SELECT environment {SELECTED_ROWS} GROUP BY environment ORDER BY min(rowid)"
        names: list[str | None] = [name for (name,) in self._database.execute(query, (None, agent))]
        if len(names) > 1:
            names.append(None)
        for name in names:
            ratios = "CAST(sum(passed) AS REAL) / sum(rollouts), sum(reward) / sum(rollouts)"
            rows = self._database.execute(
                f"SELECT {ratios} {SELECTED_ROWS} GROUP BY task ORDER BY min(rowid)", (name, agent)
            )
            tasks = np.fromiter(rows, dtype=[("rate", float), ("reward", float)])
            rates, rewards = np.ascontiguousarray(tasks["rate"]), np.ascontiguousarray(tasks["reward"])
            low, high = Bootstrap(len(rates), 2000, 0.95, 0).interval(rates)
            totals = self._database.execute(f"SELECT sum(rollouts), sum(passed) {SELECTED_ROWS}", (name, agent))
            rollouts, passed = totals.fetchone()
            yield name or "all", (rollouts, len(rates), passed), (mean(rates), low, high, mean(rewards))

    def difference(self, first: str, second: str) -> tuple[int, float, float, float] | None:
        """Compare two agents over the tasks that both played.

        Returns:
            Number of tasks, pass rate of the first minus that of the second, and its 95% interval, paired by task; None
            if they share no task.
        """
        query = """
        SELECT CAST(a.passed AS REAL) / a.rollouts, CAST(b.passed AS REAL) / b.rollouts FROM tally a JOIN tally b
        ON a.environment = b.environment AND a.task = b.task WHERE a.agent = ? AND b.agent = ? ORDER BY a.rowid"""
        rows = self._database.execute(query, (first, second))
        rates = np.fromiter(rows, dtype=[("first", float), ("second", float)])
        if not len(rates):
            return None
        differences = np.ascontiguousarray(rates["first"] - rates["second"])
        low, high = Bootstrap(len(differences), 2000, 0.95, 0).interval(differences)
        return len(differences), mean(differences), low, high

    def all_trials_passed(self) -> tuple[int, float] | None:
        """Return the number of trials per task, and the share of tasks whose trials all passed.

        None if a task was played only once, or if tasks were played differently often.
        """
        query = """
        SELECT min(trials), max(trials), avg(passed = trials)
        FROM (SELECT sum(rollouts) AS trials, sum(passed) AS passed FROM tally GROUP BY environment, task)"""
        least, most, share = self._database.execute(query).fetchone()
        return (least, share) if least is not None and least == most > 1 else None


class RolloutCause(Record):
    """A cause of one rollout, as it is written to files."""

    cause: str
    message: int
    evidence: str
    grade: Grade


class Remark(Record):
    """An observation on a rollout: the name of an entry of `captrain.diagnosis.observations`, or a cause that is not
    sure."""

    name: str
    message: int
    evidence: str


class RepairStep(Record):
    """A difference from the reference.

    step, kind: what to do to remove it. needed: the rollout passes only with it. proven: by replay. message, evidence:
    where and why. cause: the kind of cause, "" if the step is not needed or not sure. arguments: those that differ in
    a call to replace.
    """

    step: str
    kind: Literal["insert", "replace", "drop", "end", "say"]
    needed: bool
    proven: bool
    message: int
    evidence: str
    cause: str = ""
    arguments: list[str] = Field(default_factory=list)


class DiagnosedRollout(Record):
    """One rollout with its causes.

    primary: None for a passed or an unexplained rollout. secondary: all other causes; for a passed rollout, its lapses.
    observations: observations that are not causes. doubts: why a passed rollout should not have passed. suspicions:
    what contradicts its reference. occasions: the kinds of cause that it could have shown. lacking: those that it
    shows, used as its labels. ended_by: how the dialogue ended. repairs: what would have made it pass.
    unproven: why it could not be replayed.
    """

    rollout: str
    environment: str
    task: str
    trial: int
    agent: str
    outcome: Literal["passed", "failed", "error"]
    standing: Standing
    primary: RolloutCause | None = None
    secondary: list[RolloutCause] = Field(default_factory=list)
    observations: list[Remark] = Field(default_factory=list)
    doubts: list[Remark] = Field(default_factory=list)
    suspicions: list[str] = Field(default_factory=list)
    occasions: list[str] = Field(default_factory=list)
    lacking: list[RolloutCause] = Field(default_factory=list)
    tools: list[str] = Field(default_factory=list)
    ended_by: str = ""
    repairs: list[RepairStep] = Field(default_factory=list)
    unproven: str = ""

    @property
    def place(self) -> str:
        """The id of the task, with the trial if it is not the first."""
        return f"{self.task}, trial {self.trial}" if self.trial else self.task

    @property
    def causes(self) -> list[RolloutCause]:
        """All causes, the primary one first."""
        return ([self.primary] if self.primary else []) + self.secondary

    def lacking_cause(self, kind: str) -> RolloutCause | None:
        """Return the cause of this kind among those used as labels (`lacking`); None if it is not there."""
        return next((cause for cause in self.lacking if cause.cause == kind), None)

    def cause(self, kind: str) -> RolloutCause | None:
        """Return the cause of this kind; None if the rollout does not have it."""
        return next((cause for cause in self.causes if cause.cause == kind), None)


@dataclass(frozen=True)
class DiagnosedLogs:
    """The diagnosed rollouts of logs.

    rollouts: in the order of the logs. outcomes: counts of outcomes. toolbox: what the tools do. needs: what rollouts
    without a reference need; None if there are too few of them.
    """

    rollouts: Spool[DiagnosedRollout]
    outcomes: OutcomeTally
    toolbox: Toolbox
    needs: Needs | None


def with_references(logs: Logs, worlds: Worlds) -> Logs:
    """Add references from the benchmark to rollouts without one, if the world of their task opens.

    Values that were redacted on reading are restored from the reference, because worlds would refuse the calls.
    """
    if all(rollout.reference for rollout in logs.rollouts):
        return logs
    rollouts = Spool(Rollout)
    for rollout in logs.rollouts:
        # A rollout without a verdict is not explained, so it needs no reference; its task may be damaged.
        reference = rollout.reference or (worlds.reference(rollout) if rollout.outcome != "error" else [])
        originals = {k: v for message in reference for _, arguments in calls_of(message) for k, v in arguments.items()}
        messages = list[Message]()
        for message in rollout.messages:
            calls = []
            for call, (_, arguments) in zip(message.get("tool_calls") or [], calls_of(message), strict=True):
                values = {k: originals.get(k, v) if v == DROPPED else v for k, v in arguments.items()}
                function = {**call["function"], "arguments": values}
                calls.append({**call, "function": function} if values != arguments else call)
            messages.append({**message, "tool_calls": calls} if calls else message)
        rollouts.add(rollout.model_copy(update={"reference": reference, "messages": messages}))
    return replace(logs, rollouts=rollouts)


def diagnose_rollouts(
    logs: Logs,
    worlds: Worlds | None = None,
    kinds: Mapping[str, ToolKind] | None = None,
    clauses: Sequence[Clauses] = (),
) -> DiagnosedLogs:
    """Explain every rollout of the logs.

    Args:
        logs: the logs that were read.
        worlds: replay rollouts, so that causes are proven; None: no replay.
        kinds: what tools do, for tools with misleading names.
        clauses: clauses of policies, in addition to those of captrain's benchmarks.

    Raises:
        UserError: a clause fails.
    """
    toolbox, outcomes = learn_toolbox(logs.rollouts, logs.tools, worlds, kinds), OutcomeTally()
    settings: dict[str, DiagnosisContext] = {}
    due: dict[str, set[str]] = {}
    signals: dict[str, Signals] = {}
    are_referenced = True
    for rollout in logs.rollouts:
        outcomes.add(rollout)
        are_referenced = are_referenced and has_solution(rollout)
        signals.setdefault(rollout.environment, Signals()).add(rollout)
        if rollout.environment not in settings:
            first = rollout.messages[0] if rollout.messages else {"role": ""}
            instructions = str(first.get("content") or "") if first["role"] in ("system", "developer") else ""
            policy = logs.policies.get(rollout.environment) or instructions
            settings[rollout.environment] = DiagnosisContext(toolbox, policy, RecordBook(), set(), set(), clauses)
        setting, expected = settings[rollout.environment], _tools(rollout.reference)
        due.setdefault(rollout.environment, set()).update(expected)
        if rollout.outcome == "passed":
            tools = _tools(rollout.messages)
            setting.idle_tools.update(tools)
            handovers = {tool for tool in tools - expected if toolbox.kind(tool) == "handover"}
            setting.needless_transfers.update(handovers if rollout.reference else ())
        if setting.policy:
            setting.book.add(calls_in(rollout.messages, toolbox, ("assistant",)))
    for environment, tools in due.items():
        settings[environment].idle_tools.difference_update(tools)
        settings[environment].signals.update(signals[environment].found)
    spool, needs = Spool(DiagnosedRollout), None if are_referenced else learn_needs(logs.rollouts, toolbox)
    for rollout in tracked(logs.rollouts, "diagnosing", len(logs.rollouts)):
        try:
            spool.add(_explained(rollout, settings[rollout.environment], worlds, needs))
        except ExpressionError as error:
            trial = f", trial {rollout.trial}" if rollout.trial else ""
            raise UserError(f"rollout {rollout.task.id}{trial} ({rollout.id}): {error}", CLAUSES_PAGE) from None
    return DiagnosedLogs(_with_consensus(spool, outcomes), outcomes, toolbox, needs)


def needed_causes(
    rollouts: Iterable[Rollout], target: CheckedEnvironment, machine: Machine | None
) -> dict[str, set[str]]:
    """Find the causes whose repair failed rollouts need, proven by replay.

    Args:
        rollouts: of one benchmark.
        target: the benchmark, in whose worlds they are replayed.
        machine: to run its workers.

    Returns:
        Rollout id -> the agent's own causes of the steps without which the rollout does not pass, for failed rollouts.
        Rollouts that cannot be replayed or have a suspect reference are left out, and so are steps that only follow
        from an earlier one.
    """
    spool = Spool(Rollout)
    for rollout in rollouts:
        spool.add(rollout)
    logs = Logs(spool, target.declared_tools, {}, [], [], frozenset())
    with open_worlds(target=target, machine=machine) as worlds:
        diagnosed = diagnose_rollouts(logs, worlds)
    needs: dict[str, set[str]] = {}
    for row in diagnosed.rollouts:
        if row.outcome == "failed" and row.standing == "contrasted":
            steps = {step.cause for step in row.repairs if step.needed and step.proven}
            needs[row.rollout] = {c.cause for c in row.causes if c.cause in steps and CAUSES[c.cause].of_agent}
    return needs


def read_kinds(path: Path) -> dict[str, ToolKind]:
    """Read a file that says what each tool does.

    Raises:
        UserError: the file does not map names to kinds.
    """
    remedy = f"write one line a tool, such as `get_order: read`, with {', '.join(get_args(ToolKind))}"
    return read_yaml(path, dict[str, ToolKind], remedy)


def _tools(messages: Iterable[Message]) -> set[str]:
    """Return the tools that the assistant calls."""
    return {tool for message in messages if message["role"] == "assistant" for tool, _ in calls_of(message)}


def _with_consensus(rows: Spool[DiagnosedRollout], outcomes: OutcomeTally) -> Spool[DiagnosedRollout]:
    """Mark references as suspect if no agent passes the task and all rollouts differ from it in one same step.

    A reference is also suspect if a failed rollout does not differ from it at all.
    """
    common: dict[tuple[str, str], tuple[str, set[str], bool]] = {}
    for row in rows:
        task = row.environment, row.task
        if row.outcome == "failed" and (reason := outcomes.never_passed_reason(*task)):
            steps = {f"{step.kind} {step.step}" for step in row.repairs if step.needed}
            _, shared, differ = common.get(task, (reason, steps, True))
            common[task] = reason, shared & steps, differ and bool(steps)
    if not common:
        return rows
    agreed = Spool(DiagnosedRollout)
    for row in rows:
        reason, shared, differ = common.get((row.environment, row.task), ("", set[str](), True))
        if row.outcome == "failed" and (shared or not differ):
            reason += f", and all differ from the reference in one thing: {min(shared)}" if shared else ""
            row = row.model_copy(update={"suspicions": [*row.suspicions, reason], "standing": "suspect"})
        agreed.add(row)
    return agreed


def _explained(
    rollout: Rollout, context: DiagnosisContext, worlds: Worlds | None, needs: Needs | None
) -> DiagnosedRollout:
    row = DiagnosedRollout(
        rollout=rollout.id,
        environment=rollout.environment,
        task=rollout.task.id,
        trial=rollout.trial,
        agent=rollout.policy,
        outcome=rollout.outcome,
        standing="error",
    )
    if rollout.outcome == "error":
        evidence = rollout.error or "infrastructure: no reason is recorded"
        primary = RolloutCause(cause=INFRASTRUCTURE, message=0, evidence=evidence, grade=Grade.RECORDED)
        return row.model_copy(update={"primary": primary})
    world = None
    try:
        world, unproven = worlds.of(rollout) if worlds else None, worlds.trouble if worlds else ""
        view = view_repaired(rollout, context, world)
    except (UserError, InfrastructureError) as trouble:
        # The benchmark may not know a call, or its worker may die.
        world, unproven = None, str(trouble)
        view = view_repaired(rollout, context, None)
    explanation = explain(view)
    found = needs.found(rollout) if needs else {}
    causes = _causes(explanation, found)
    of_agent = [cause for cause in causes if CAUSES[cause.cause].of_agent]
    unsure = {verdict.cause for verdict in explanation.observations}
    lacking = of_agent if view.repair.proven else [c for c in _label_causes(view, of_agent) if c.cause not in unsure]
    failed = rollout.outcome == "failed"
    standing: Standing = "suspect" if explanation.suspicions else "contrasted"
    if failed and causes and causes[0].cause == SIMULATOR and standing == "contrasted":
        standing = "spoilt"  # a failure that begins with the simulated user says nothing about the agent
    elif failed and view.facts.limit and not of_agent and standing == "contrasted":
        standing, limit = "limit", f"stopped at a limit: {view.facts.limit}"
        causes = [RolloutCause(cause=LIMIT, message=view.last, evidence=limit, grade=Grade.RECORDED)]
    return row.model_copy(
        update={
            "standing": standing,
            "primary": causes[0] if causes and failed else None,
            "secondary": causes[1:] if failed else of_agent,
            "observations": [
                *(Remark(name=v.cause, message=v.message, evidence=v.evidence) for v in explanation.observations),
                *_remarks(view, OBSERVATIONS),
            ],
            "doubts": [*_doubts(view, world)] if rollout.outcome == "passed" else [],
            "suspicions": [*explanation.suspicions],
            "occasions": sorted(possible_causes(view) | found.keys() | {cause.cause for cause in lacking}),
            "lacking": lacking,
            "tools": sorted({tool for cause in explanation.causes if cause.of_agent for tool in cause.tools}),
            "ended_by": explanation.ended_by,
            "repairs": [*_repair_steps(view, explanation)],
            "unproven": unproven.partition("\n")[0],
        }
    )


def _causes(explanation: Explanation, found: Mapping[str, Occasion]) -> list[RolloutCause]:
    """Return the causes of a rollout, the primary one first. Causes that only the contrast shows come last."""
    causes = [
        RolloutCause(cause=verdict.cause, message=verdict.message, evidence=verdict.evidence, grade=verdict.grade)
        for verdict in explanation.causes
    ]
    kinds = {cause.cause for cause in causes}
    lacking = {kind: occasion for kind, occasion in found.items() if occasion.lacking and kind not in kinds}
    return causes + [
        RolloutCause(cause=kind, message=occasion.message, evidence=occasion.evidence, grade=Grade.CONTRAST)
        for kind, occasion in lacking.items()
    ]


def _remarks(view: RolloutView, entries: tuple[Observation, ...]) -> Iterator[Remark]:
    for name, message, evidence in observe(view, entries):
        yield Remark(name=name, message=message, evidence=evidence)


def _doubts(view: RolloutView, world: World | None) -> Iterator[Remark]:
    """Yield reasons why a passed rollout should not have passed. One is that an idle agent passes too, by replay."""
    yield from _remarks(view, DOUBTS)
    if world is not None and view.repair.passes and world.passes(Replay(())):
        yield Remark(name="nothing_to_do", message=view.last, evidence="replayed without a call, it passes, too")


def _label_causes(view: RolloutView, of_agent: Sequence[RolloutCause]) -> Iterator[RolloutCause]:
    """Yield the causes that a rollout shows, for labels without a proof by replay.

    The label is the programmatic analyst's: LACKING at the first occasion that went wrong. If no occasion did, a cause
    that the contrast with passed rollouts shows counts. For causes without such a label (no occasions, or
    `is_unreferenced`), the rules decide.
    """
    for slug, kind in CAUSES.items():
        is_compared = bool(kind.occasions) and not kind.is_unreferenced
        lapse = kind.lapse(view, NO_VALUES) if is_compared else None
        # Beside the analyst's label, only the contrast with passed rollouts counts. Without a label, every rule counts.
        causes = [cause for cause in of_agent if cause.cause == slug]
        causes = [cause for cause in causes if not is_compared or cause.grade is Grade.CONTRAST]
        if lapse is not None:
            yield RolloutCause(cause=slug, message=lapse.message, evidence=lapse.evidence, grade=Grade.TRACED)
        else:
            yield from causes[:1]


def _repair_steps(view: RolloutView, explanation: Explanation) -> Iterator[RepairStep]:
    """Yield the differences of a rollout from its reference, needed ones first, each with the evidence of its cause."""
    repair, verdicts = view.repair, {id(edit): verdict for edit, verdict in explanation.steps}
    for edit in (*repair.edits, *(edit for edit in repair.differences if edit not in repair.edits)):
        verdict, call = verdicts.get(id(edit)), next(iter(edit.calls), None)
        place = call.message if call else view.last
        yield RepairStep(
            step=str(edit.goal or call or edit.text or "end the dialogue"),
            kind=edit.kind,
            needed=edit in repair.edits,
            proven=repair.proven,
            message=verdict.message if verdict else place,
            evidence=verdict.evidence if verdict else "",
            cause=verdict.cause if verdict and verdict.grade is not Grade.OBSERVED else "",
            arguments=edit.wrong,
        )
