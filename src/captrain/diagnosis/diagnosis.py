"""Diagnosis of an agent's own logs: explain each failure, contrast, select. No model, no network, no torch.

Each failed rollout gets the causes that the log proves (`captrain.diagnosis.explanation`); the contrast between failed
and passed rollouts and the selection are those of the pipeline, with causes for capabilities. What infrastructure or
the simulated user brought about is listed and not contrasted, and so is what a suspect reference judged: neither says
anything of the agent. A ranking of few rollouts is luck, so where fewer than `FEW` passed or failed the report says so
before anything else, and selects nothing.

Logs may hold more rollouts than memory: they are read one by one, a few times over, and what stays of each is counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from captrain.benchmarks import Kind, Worlds
from captrain.capabilities import (
    EXAMPLES,
    KINDS,
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
from captrain.diagnosis.rollouts import DiagnosedLogs, DiagnosedRollout, Standing, diagnose_rollouts, refer
from captrain.interop import Logs
from captrain.records import Capability, JsonObject, Label, Rollout, RolloutLabels, Spool
from captrain.run import SelectionSettings

FEW = 10
"""Fewer passed or fewer failed rollouts than this conclude nothing: with 9 on a side, the 95% interval of a rate of one
half is wider than 0.6."""
LIST_LENGTH = 200
"""Rollouts that are listed one by one; of more there is the number alone."""


class DiagnosedLabels(RolloutLabels):
    """Labels of a rollout of logs. `suspect`: its reference is suspect, so that it counts nowhere."""

    suspect: bool = False


@dataclass(frozen=True)
class StreamedLabels:
    """Candidates, as of `captrain.capabilities.label_runs`; the verdicts on contrasted rollouts as arrays, for
    `select_by_verdicts`; the first failed rollouts that lack each candidate; and all rollouts, explained."""

    candidates: list[Capability]
    verdicts: Verdicts
    examples: dict[str, list[Rollout]]
    explained: Spool[DiagnosedRollout]

    @property
    def rows(self) -> Iterator[DiagnosedLabels]:
        """One row for every run and rollout, run by run: a program's labels are the same in each."""
        kinds = [candidate.id for candidate in self.candidates]
        for run, counts in enumerate(self.verdicts.counts):
            draws = iter(counts)
            for row in self.explained:
                if row.outcome != "error" and row.standing in ("contrasted", "suspect"):
                    is_suspect = row.standing == "suspect"
                    yield DiagnosedLabels(
                        run=run,
                        rollout=row.rollout,
                        task=row.task,
                        outcome=row.outcome,
                        count=0 if is_suspect else int(next(draws)),
                        labels={kind: label_of(row, kind) for kind in kinds},
                        suspect=is_suspect,
                    )


def label_of(row: DiagnosedRollout, kind: str) -> Label:
    """The label of a kind of cause on a rollout."""
    cause = row.lack(kind)
    if cause is not None:
        return Label(verdict="LACKING", evidence=cause.evidence, message=cause.message)
    return Label(verdict="PRESENT") if kind in row.occasions else Label(verdict="NA")


def label_causes(
    rows: Spool[DiagnosedRollout], rollouts: Iterable[Rollout], runs: int, seed: int, toolbox: Toolbox
) -> StreamedLabels:
    """Label contrasted rollouts with every kind of cause that some failed one shows, in `runs` resamples of the tasks.

    Args:
        rows: all rollouts, explained.
        rollouts: the same, in the same order.
        runs: resamples of the tasks of contrasted rollouts.
        seed: of the resamples.
        toolbox: of the logs.
    """
    failures = (row for row in rows if row.outcome == "failed" and row.standing != "spoilt")
    failures_kinds = {cause.cause for row in failures for cause in row.lacking}
    kinds = [kind for kind, entry in KINDS.items() if entry.of_agent and kind in failures_kinds]
    examples: dict[str, list[Rollout]] = {kind: [] for kind in kinds}
    tools: dict[str, set[str]] = {kind: set() for kind in kinds}
    # A byte for each candidate and rollout is all that stays in memory.
    codes, could, failed, tasks, numbers = bytearray(), bytearray(), bytearray(), list[int](), dict[str, int]()
    for row, rollout in zip(rows, rollouts, strict=True):
        if row.standing != "contrasted":
            continue
        labels = {kind: label_of(row, kind) for kind in kinds}
        codes.extend(code_of(label) for label in labels.values())
        # Without a solution most kinds cannot show: such a rollout must not speak against them.
        could.extend(has_solution(rollout) or label.verdict != "NA" for label in labels.values())
        failed.append(row.outcome == "failed")
        tasks.append(numbers.setdefault(row.task, len(numbers)))
        for kind, label in labels.items():
            if row.outcome == "failed" and label.verdict == "LACKING":
                tools[kind].update(row.tools)
                if len(examples[kind]) < EXAMPLES:
                    examples[kind].append(rollout)
    draws = [np.random.default_rng([seed, run]).integers(len(numbers), size=len(numbers)) for run in range(runs)]
    counts = np.array([np.bincount(draw, minlength=len(numbers)) for draw in draws], np.uint16)[:, tasks]
    shape = len(tasks), len(kinds)
    verdicts = Verdicts(
        np.ascontiguousarray(np.frombuffer(codes, np.uint8).reshape(shape).T)[:, None],
        counts,
        # What is looked for does not depend on the resample, as what an analyst proposes would.
        np.ones((len(kinds), runs), bool),
        np.frombuffer(failed, bool),
        np.array(tasks, np.intp),
        np.ascontiguousarray(np.frombuffer(could, bool).reshape(shape).T),
    )
    unnamed: JsonObject = {"kinds": toolbox.unnamed} if toolbox.unnamed else {}
    candidates = [
        Capability(
            id=kind,
            name=KINDS[kind].name,
            description=KINDS[kind].description,
            details={"tools": sorted(tools[kind]), **unnamed},
            examples=[rollout.id for rollout in examples[kind]],
        )
        for kind in kinds
    ]
    return StreamedLabels(candidates, verdicts, examples, rows)


@dataclass
class CauseTally:
    """Numbers of failures that a cause was primary and secondary to, and of rollouts that passed in spite of it; and
    the first failure that it is primary to."""

    primary: int = 0
    secondary: int = 0
    passed: int = 0
    example: DiagnosedRollout | None = None


def counted_cause(row: DiagnosedRollout) -> str | None:
    """The cause that a failure counts under, None where nothing explains it: of a suspect reference it is the
    reference, whatever the agent did."""
    if row.standing == "suspect":
        return SUSPECT
    return row.primary.cause if row.primary else None


@dataclass
class Account:
    """Counts over explained rollouts.

    standings: rollouts by what they are to the contrast. passed, failed: of the contrasted ones, tasks: the first
    `FEW` that these are of. failures: failed rollouts in all, unexplained those without any cause. causes: by kind.
    unreferenced: rollouts with neither reference nor milestones. unproven: rollouts whose world failed to play them,
    and unplayed the first of these. left_out: the first that are, by standing.
    """

    standings: Counter[Standing] = field(default_factory=Counter[Standing])
    passed: int = 0
    failed: int = 0
    tasks: set[str] = field(default_factory=set[str])
    failures: int = 0
    unexplained: int = 0
    causes: dict[str, CauseTally] = field(default_factory=dict[str, CauseTally])
    unreferenced: int = 0
    unproven: int = 0
    unplayed: DiagnosedRollout | None = None
    left_out: dict[Standing, list[DiagnosedRollout]] = field(default_factory=dict[Standing, list[DiagnosedRollout]])

    @property
    def unproven_note(self) -> str:
        """A sentence on the rollouts whose world failed; "" where there are none."""
        if self.unplayed is None:
            return ""
        reason = f"{self.unplayed.place}: {self.unplayed.unproven}"
        return f"{self.unproven} rollouts could not be replayed, so their causes are not proven; the first is {reason}"

    @property
    def shares(self) -> list[tuple[str, CauseTally]]:
        """The causes by how many failures they are primary to, the most first."""
        return sorted(self.causes.items(), key=lambda item: (-item[1].primary, -item[1].secondary, item[0]))

    def add(self, row: DiagnosedRollout, rollout: Rollout) -> None:
        """Count a rollout in."""
        self.standings[row.standing] += 1
        self.unreferenced += not has_solution(rollout)
        if row.unproven:
            self.unproven, self.unplayed = self.unproven + 1, self.unplayed or row
        if row.standing == "contrasted":
            self.tasks |= {row.task} if len(self.tasks) < FEW else set()
            self.passed += row.outcome == "passed"
            self.failed += row.outcome == "failed"
        else:
            entries = self.left_out.setdefault(row.standing, [])
            entries += [row] if len(entries) < LIST_LENGTH else []
        if row.outcome == "failed":
            self.failures += 1
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
        """Say why nothing can be concluded from these rollouts of so many agents; "" where enough were read."""
        counts = f"{self.passed} passed and {self.failed} failed rollouts"
        if not self.passed or not self.failed:
            return f"{counts}: nothing to contrast"
        if agents > 1:
            return f"the logs hold {agents} agents; diagnose the rollouts of one agent at a time to get a ranking"
        if min(self.passed, self.failed) < FEW:
            return f"{counts}; at least {FEW} of each are needed to conclude anything"
        if len(self.tasks) < FEW:
            reason = "trials of the same task are too much alike"
            return f"{len(self.tasks)} tasks; at least {FEW} are needed to conclude anything: {reason}"
        return ""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of a diagnosis.

    logs: what was read. diagnosed: of every rollout. findings: what goes with failing, and what to fix. account:
    counts over all rollouts, and agents those of each agent by its name. labels: of every run, with the candidates,
    which are causes that some failed rollout shows; None where nothing could be contrasted, and so is report, the
    account of the selection. shortage: why nothing can be concluded, "" where enough was read; then nothing is selected
    either.
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
    kinds: Mapping[str, Kind] | None = None,
    clauses: Sequence[Clauses] = (),
) -> Diagnosis:
    """Explain the failed rollouts of other people's logs, and rank the causes by the contrast with passed ones.

    Args:
        logs: from `captrain.interop.read_logs`.
        selection: thresholds, as in the pipeline.
        runs: labelling runs, each on a resample of the rollouts.
        count: capabilities selected at most.
        seed: of the resamples.
        worlds: in which rollouts are replayed, so that causes are proven.
        kinds: what tools do, where their names mislead.
        clauses: of policies, beside those of captrain's benchmarks.
    """
    logs = refer(logs, worlds) if worlds is not None else logs
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
    labels = label_causes(diagnosed.rollouts, logs.rollouts, runs, seed, diagnosed.toolbox)
    report = select_by_verdicts(labels.verdicts, labels.candidates, selection, count, seed).report
    if shortage:
        reason = "several agents" if len(agents) > 1 else "too few rollouts"
        report["candidates"] = [
            {**entry, "selected": False, "reason": f"{reason} ({entry['reason']})"} for entry in report["candidates"]
        ]
    return Diagnosis(logs, diagnosed, findings, account, agents, labels, report, shortage)
