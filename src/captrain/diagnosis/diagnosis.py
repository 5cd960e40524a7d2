"""Diagnosis of an agent's own logs: explain each failure, compare failed with passed rollouts, select causes.

It needs no model, network or torch. Each failed rollout gets the causes that the log proves. The comparison and the
selection are the pipeline's, with causes in place of capabilities. Two groups are listed but not compared, because they
say nothing about the agent: rollouts spoilt by infrastructure or the simulated user, and rollouts judged by a suspect
reference. With fewer than `FEW` passed or failed rollouts, the report says so first and selects nothing.

Logs may be larger than memory: they are read rollout by rollout, a few times, and only counts stay in memory.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from captrain.benchmarks import ToolKind, Worlds
from captrain.capabilities import (
    CAUSES,
    EXAMPLES,
    SUSPECT,
    Clauses,
    SelectionAccount,
    Toolbox,
    Verdicts,
    code_of,
    has_solution,
    select_by_verdicts,
)
from captrain.diagnosis.findings import Collection, Findings
from captrain.diagnosis.rollouts import (
    DiagnosedLogs,
    DiagnosedRollout,
    Remark,
    Standing,
    diagnose_rollouts,
    with_references,
)
from captrain.interop import Logs
from captrain.records import Capability, Label, Rollout, RolloutLabels, Spool, Verdict, counted
from captrain.run import SelectionSettings

FEW = 10
"""Minimum number of passed and of failed rollouts for a conclusion. With 9, the 95% interval of a rate of one half is
wider than 0.6."""
QUOTES = 20
"""Maximum number of quotes of one observation."""
LIST_LENGTH = 200
"""Maximum number of rollouts listed one by one; the rest are only counted."""


class DiagnosedLabels(RolloutLabels):
    """Labels of a rollout of logs. `suspect`: its reference is suspect, so it is not counted."""

    suspect: bool = False


@dataclass(frozen=True)
class StreamedLabels:
    """Labels of all runs.

    verdicts: on the compared rollouts, as arrays. examples: candidate -> the first failed rollouts that lack it.
    explained: all diagnosed rollouts.
    """

    candidates: list[Capability]
    verdicts: Verdicts
    examples: dict[str, list[Rollout]]
    explained: Spool[DiagnosedRollout]

    @property
    def lines(self) -> Iterator[str]:
        """The JSON of a `DiagnosedLabels` for each run and rollout, run by run.

        Labels of a program are the same in each run, so a rollout's lines differ only in the run and the count.
        """
        kinds = [candidate.id for candidate in self.candidates]
        labelled, suspect = Spool(DiagnosedLabels), bytearray()
        for row in self.explained:
            if row.outcome != "error" and row.standing in ("contrasted", "suspect"):
                labelled.add(
                    DiagnosedLabels(
                        run=0,
                        rollout=row.rollout,
                        task=row.task,
                        outcome=row.outcome,
                        count=0,
                        labels={kind: label_of(row, kind) for kind in kinds},
                        suspect=row.standing == "suspect",
                    )
                )
                suspect.append(row.standing == "suspect")
        for run, counts in enumerate(self.verdicts.counts):
            draws = iter(counts)
            for line, is_suspect in zip(labelled.lines, suspect, strict=True):
                # A quotation mark inside a text is escaped, so the first match is the field.
                line = line.replace('"run":0,', f'"run":{run},', 1)
                yield line if is_suspect else line.replace(',"count":0,', f',"count":{next(draws)},', 1)


def label_of(row: DiagnosedRollout, kind: str) -> Label:
    """Return the label of a rollout for a kind of cause."""
    cause = row.lacking_cause(kind)
    verdict = verdict_of(row, kind)
    return Label(verdict=verdict, evidence=cause.evidence, message=cause.message) if cause else Label(verdict=verdict)


def verdict_of(row: DiagnosedRollout, kind: str) -> Verdict:
    """Return the verdict of a rollout's label for a kind of cause."""
    if row.lacking_cause(kind) is not None:
        return "LACKING"
    return "PRESENT" if kind in row.occasions else "NA"


def label_causes(
    rows: Spool[DiagnosedRollout],
    rollouts: Iterable[Rollout],
    shown: Container[str],
    runs: int,
    seed: int,
    toolbox: Toolbox,
) -> StreamedLabels:
    """Label the compared rollouts with every kind of cause that some failed rollout shows.

    Args:
        rows: all diagnosed rollouts.
        rollouts: the same, in the same order.
        shown: the kinds of cause that some failed rollout shows.
        runs: number of resamples of the tasks.
        seed: of the resamples.
        toolbox: of the logs.
    """
    kinds = [kind for kind, entry in CAUSES.items() if entry.of_agent and kind in shown]
    examples: dict[str, list[Rollout]] = {kind: [] for kind in kinds}
    tools: dict[str, set[str]] = {kind: set() for kind in kinds}
    # Only a byte for each candidate and rollout stays in memory.
    codes, could, failed, tasks, numbers = bytearray(), bytearray(), bytearray(), list[int](), dict[str, int]()
    for row, rollout in zip(rows, rollouts, strict=True):
        if row.standing != "contrasted":
            continue
        verdicts_of_row: list[Verdict] = [verdict_of(row, kind) for kind in kinds]
        codes.extend(code_of(verdict) for verdict in verdicts_of_row)
        # Most causes cannot be seen without a solution, so rollouts without one must not lower their coverage.
        is_solved = has_solution(rollout)
        could.extend(is_solved or verdict != "NA" for verdict in verdicts_of_row)
        failed.append(row.outcome == "failed")
        tasks.append(numbers.setdefault(row.task, len(numbers)))
        for kind, verdict in zip(kinds, verdicts_of_row, strict=True):
            if row.outcome == "failed" and verdict == "LACKING":
                tools[kind].update(row.tools)
                if len(examples[kind]) < EXAMPLES:
                    examples[kind].append(rollout)
    draws = [np.random.default_rng([seed, run]).integers(len(numbers), size=len(numbers)) for run in range(runs)]
    counts = np.array([np.bincount(draw, minlength=len(numbers)) for draw in draws], np.uint16)[:, tasks]
    shape = len(tasks), len(kinds)
    verdicts = Verdicts(
        np.ascontiguousarray(np.frombuffer(codes, np.uint8).reshape(shape).T)[:, None],
        counts,
        # Rules look for the same causes in each resample, so every run proposes every candidate.
        np.ones((len(kinds), runs), bool),
        np.frombuffer(failed, bool),
        np.array(tasks, np.intp),
        np.ascontiguousarray(np.frombuffer(could, bool).reshape(shape).T),
    )
    unnamed: dict[str, object] = {"kinds": toolbox.unnamed} if toolbox.unnamed else {}
    candidates = [
        Capability(
            id=kind,
            name=CAUSES[kind].name,
            description=CAUSES[kind].description,
            details={"tools": sorted(tools[kind]), **unnamed},
            examples=[rollout.id for rollout in examples[kind]],
        )
        for kind in kinds
    ]
    return StreamedLabels(candidates, verdicts, examples, rows)


@dataclass
class CauseTally:
    """Counts for one cause.

    primary, secondary: failures with it as primary or as another cause. passed: passed rollouts with it. example: the
    first failure with it as primary cause.
    """

    primary: int = 0
    secondary: int = 0
    passed: int = 0
    example: DiagnosedRollout | None = None


@dataclass
class ObservationTally:
    """Counts of failed and passed rollouts with an observation, and quotes of the first ones, failed ones first."""

    failed: int = 0
    passed: int = 0
    quotes: list[str] = field(default_factory=list[str])

    def add(self, row: DiagnosedRollout, remark: Remark) -> None:
        """Count a rollout."""
        quote = f"{row.place}, message {remark.message}: {remark.evidence}"
        is_failed = row.outcome == "failed"
        self.quotes.insert(0 if is_failed and not self.failed else len(self.quotes), quote)
        del self.quotes[QUOTES:]
        self.failed, self.passed = self.failed + is_failed, self.passed + (row.outcome == "passed")


def counted_cause(row: DiagnosedRollout) -> str | None:
    """Return the cause under which a failure is counted; None if it is unexplained.

    A failure with a suspect reference is always counted under the reference.
    """
    if row.standing == "suspect":
        return SUSPECT
    return row.primary.cause if row.primary else None


@dataclass
class Account:
    """Counts over diagnosed rollouts.

    standings: rollouts by their part in the comparison. passed, failed: of the compared ones. tasks: their first `FEW`
    tasks. failures: all failed rollouts. unexplained: failures without a cause. causes: by kind. shown: kinds of cause
    that some failure shows in its label. unreferenced: rollouts with neither reference nor milestones. unproven:
    rollouts whose world failed to replay them; then the first of them. left_out: the first rollouts left out, by
    standing. seen: observations by name. doubts: likewise why passed rollouts should not have passed.
    """

    standings: Counter[Standing] = field(default_factory=Counter[Standing])
    passed: int = 0
    failed: int = 0
    tasks: set[str] = field(default_factory=set[str])
    failures: int = 0
    unexplained: int = 0
    causes: dict[str, CauseTally] = field(default_factory=dict[str, CauseTally])
    shown: set[str] = field(default_factory=set[str])
    unreferenced: int = 0
    unproven: int = 0
    first_unproven: DiagnosedRollout | None = None
    left_out: dict[Standing, list[DiagnosedRollout]] = field(default_factory=dict[Standing, list[DiagnosedRollout]])
    seen: dict[str, ObservationTally] = field(default_factory=dict[str, ObservationTally])
    doubts: dict[str, ObservationTally] = field(default_factory=dict[str, ObservationTally])

    @property
    def unproven_note(self) -> str:
        """A sentence on the rollouts that could not be replayed; "" if there are none."""
        if self.first_unproven is None:
            return ""
        reason = f"{self.first_unproven.place}: {self.first_unproven.unproven}"
        count = counted(self.unproven, "rollout")
        return f"{count} could not be replayed, so their causes are not proven. The first is {reason}"

    @property
    def shares(self) -> list[tuple[str, CauseTally]]:
        """The causes, those that are primary in most failures first."""
        return sorted(self.causes.items(), key=lambda item: (-item[1].primary, -item[1].secondary, item[0]))

    def add(self, row: DiagnosedRollout, rollout: Rollout) -> None:
        """Count a rollout."""
        self.standings[row.standing] += 1
        self.unreferenced += not has_solution(rollout)
        if row.unproven:
            self.unproven, self.first_unproven = self.unproven + 1, self.first_unproven or row
        if row.standing == "contrasted":
            self.tasks |= {row.task} if len(self.tasks) < FEW else set()
            self.passed += row.outcome == "passed"
            self.failed += row.outcome == "failed"
        else:
            entries = self.left_out.setdefault(row.standing, [])
            entries += [row] if len(entries) < LIST_LENGTH else []
        for remarks, seen in ((row.observations, self.seen), (row.doubts, self.doubts)):
            for remark in remarks:
                seen.setdefault(remark.name, ObservationTally()).add(row, remark)
        if row.outcome == "failed":
            self.failures += 1
            self.shown.update(cause.cause for cause in row.lacking if row.standing != "spoilt")
            if (kind := counted_cause(row)) is None:
                self.unexplained += 1
            else:
                tally = self.causes.setdefault(kind, CauseTally())
                tally.primary += 1
                tally.example = tally.example or row
        if row.standing in ("contrasted", "spoilt"):
            for cause in row.secondary:
                tally = self.causes.setdefault(cause.cause, CauseTally())
                tally.secondary += row.outcome == "failed"
                tally.passed += row.outcome == "passed"

    def shortage(self, agents: int) -> str:
        """Return why nothing can be concluded from these rollouts of `agents` agents; "" if they are enough."""
        counts = f"{self.passed} passed and {counted(self.failed, 'failed rollout')}"
        if not self.passed or not self.failed:
            return f"{counts}; captrain compares failed with passed rollouts and needs at least {FEW} of each"
        if agents > 1:
            return f"the logs have {agents} agents; for a ranking, diagnose the rollouts of one agent at a time"
        if min(self.passed, self.failed) < FEW:
            return f"{counts}; at least {FEW} of each are needed to conclude anything"
        if len(self.tasks) < FEW:
            reason = "trials of the same task are too much alike"
            return f"{counted(len(self.tasks), 'task')}; at least {FEW} are needed to conclude anything: {reason}"
        return ""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of a diagnosis.

    logs: the logs that were read. diagnosed: every rollout with its causes. findings: what correlates with failure, and
    what to fix. account: counts over all rollouts. agents: the same counts by agent. labels: labels of all runs; None
    if nothing could be compared. report: the account of the selection; None if nothing could be compared. shortage: why
    nothing can be concluded, and so nothing is selected; "" otherwise.
    """

    logs: Logs
    diagnosed: DiagnosedLogs
    findings: Findings
    account: Account
    agents: dict[str, Account]
    labels: StreamedLabels | None
    report: SelectionAccount | None
    shortage: str


def diagnose(
    logs: Logs,
    selection: SelectionSettings,
    *,
    runs: int,
    count: int,
    seed: int,
    worlds: Worlds | None = None,
    kinds: Mapping[str, ToolKind] | None = None,
    clauses: Sequence[Clauses] = (),
) -> Diagnosis:
    """Explain the failed rollouts of logs, and rank the causes by comparison with passed rollouts.

    Args:
        logs: from `captrain.interop.read_logs`.
        selection: thresholds, as in the pipeline.
        runs: labelling runs, each on a resample of the rollouts.
        count: most capabilities selected.
        seed: of the resamples.
        worlds: replay rollouts, so that causes are proven.
        kinds: what tools do, for tools with misleading names.
        clauses: clauses of policies, in addition to those of captrain's benchmarks.
    """
    logs = with_references(logs, worlds) if worlds is not None else logs
    diagnosed = diagnose_rollouts(logs, worlds, kinds, clauses)
    account, agents, collection = Account(), dict[str, Account](), Collection(diagnosed.toolbox, diagnosed.needs)
    for row, rollout in zip(diagnosed.rollouts, logs.rollouts, strict=True):
        account.add(row, rollout)
        agents.setdefault(row.agent, Account()).add(row, rollout)
        if row.standing in ("contrasted", "suspect"):
            collection.add(row, rollout)
    shortage, findings = account.shortage(len(agents)), collection.findings()
    if not account.passed or not account.failed:
        return Diagnosis(logs, diagnosed, findings, account, agents, None, None, shortage)
    labels = label_causes(diagnosed.rollouts, logs.rollouts, account.shown, runs, seed, diagnosed.toolbox)
    report = select_by_verdicts(labels.verdicts, labels.candidates, selection, count, seed).report
    if shortage:
        reason = "several agents" if len(agents) > 1 else "too few rollouts"
        report["candidates"] = [
            {**entry, "selected": False, "reason": f"{reason} ({entry['reason']})"} for entry in report["candidates"]
        ]
    return Diagnosis(logs, diagnosed, findings, account, agents, labels, report, shortage)
