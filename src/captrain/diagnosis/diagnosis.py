"""Diagnosis of an agent's own logs: explain each failure, contrast, select. No model, no network, no torch.

Each failed rollout gets the causes that the log proves (`captrain.diagnosis.explanation`); the contrast between failed
and passed rollouts and the selection are those of the pipeline, with causes for capabilities. What infrastructure or
the simulated user brought about is listed and not contrasted, and so is what a suspect reference judged: neither says
anything of the agent. A ranking of few rollouts is luck, so where fewer than `FEW` passed or failed the report says so
before anything else, and selects nothing.

Logs may hold more rollouts than memory: they are read one by one, a few times over, and what stays of each is counted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from captrain.benchmarks import Kind, Worlds
from captrain.capabilities import (
    EXAMPLES,
    KINDS,
    SUSPECT,
    SelectionAccount,
    Toolbox,
    Verdicts,
    code_of,
    has_solution,
    select_by_verdicts,
)
from captrain.config import Selection
from captrain.diagnosis.clauses import Clauses
from captrain.diagnosis.explained import Explained, Explanations, Standing, explain_logs, refer
from captrain.diagnosis.findings import Collection, Findings
from captrain.diagnosis.streaming import DiagnosedLabels, LabelRows, StreamedLabels, resample_counts
from captrain.interop import Logs
from captrain.records import Capability, JsonObject, Label, Rollout, Spool

AGENTS_KINDS = tuple(kind for kind, entry in KINDS.items() if entry.of_agent)


def label_of(row: Explained, kind: str) -> Label:
    """The label of a kind of cause on a rollout."""
    cause = row.cause(kind)
    if cause is not None:
        return Label(verdict="LACKING", evidence=cause.evidence, message=cause.message)
    return Label(verdict="PRESENT") if kind in row.occasions else Label(verdict="NA")


def label_causes(
    rows: Spool[Explained], rollouts: Iterable[Rollout], runs: int, seed: int, toolbox: Toolbox, *, keep: bool
) -> StreamedLabels:
    """Label contrasted rollouts with every kind of cause that some failed one shows, in `runs` resamples of the tasks.

    Args:
        rows: all rollouts, explained.
        rollouts: the same, in the same order.
        runs: resamples of the tasks of contrasted rollouts.
        seed: of the resamples.
        toolbox: of the logs.
        keep: rollouts of suspect references count, too.
    """
    is_counted = np.array([_counts(row, keep) for row in rows], bool)
    labelled = np.array(
        [counts or row.standing == "suspect" for counts, row in zip(is_counted, rows, strict=True)], bool
    )
    rows_failed = (row for row in rows if row.outcome == "failed" and row.standing != "spoilt")
    failures_kinds = {cause.cause for row in rows_failed for cause in row.causes}
    kinds = [kind for kind in AGENTS_KINDS if kind in failures_kinds]
    numbers: dict[str, int] = {}
    tasks = np.array([numbers.setdefault(row.task, len(numbers)) for row in rows if _counts(row, keep)], np.intp)
    draws = resample_counts(len(numbers), runs, seed)[:, tasks]
    counts = np.zeros((runs, len(is_counted)), draws.dtype)
    counts[:, is_counted] = draws
    spool, codes = Spool(DiagnosedLabels), np.zeros((len(kinds), 1, len(is_counted)), np.uint8)
    failed, could = np.zeros(len(is_counted), bool), np.zeros((len(kinds), len(is_counted)), bool)
    examples: dict[str, list[tuple[Rollout, Label]]] = {kind: [] for kind in kinds}
    tools: dict[str, set[str]] = {kind: set() for kind in kinds}
    for place, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        failed[place] = row.outcome == "failed"
        if not labelled[place] or row.outcome == "error":
            continue
        labels = {kind: label_of(row, kind) for kind in kinds}
        label_row = DiagnosedLabels(
            run=0,
            rollout=row.rollout,
            task=row.task,
            outcome=row.outcome,
            count=0,
            labels=labels,
            suspect=not is_counted[place],
        )
        spool.add(label_row)
        codes[:, 0, place] = [code_of(label) for label in labels.values()]
        # Without a solution most kinds cannot show: such a rollout must not speak against them.
        could[:, place] = [has_solution(rollout) or label.verdict != "NA" for label in labels.values()]
        for kind, label in labels.items() if failed[place] and is_counted[place] else ():
            if label.verdict == "LACKING":
                tools[kind].update(row.tools)
                if len(examples[kind]) < EXAMPLES:
                    examples[kind].append((rollout, label))
    # What is looked for does not depend on the resample, as what an analyst proposes would.
    is_candidate = np.ones((len(kinds), runs), bool)
    verdicts = Verdicts(codes[:, :, is_counted], draws, is_candidate, failed[is_counted], tasks, could[:, is_counted])
    proposals = [kinds for _ in range(runs)]
    unnamed = {"kinds": toolbox.unnamed} if toolbox.unnamed else {}
    details = {kind: {"tools": sorted(tools[kind]), **unnamed} for kind in kinds}
    candidates = [_capability(kind, details[kind], examples[kind]) for kind in kinds]
    return StreamedLabels(candidates, LabelRows(spool, counts[:, labelled], proposals), verdicts, examples)


def _counts(row: Explained, keep: bool) -> bool:
    return row.standing == "contrasted" or (keep and row.standing == "suspect")


def _capability(kind: str, details: JsonObject, examples: list[tuple[Rollout, Label]]) -> Capability:
    return Capability(
        id=kind,
        name=KINDS[kind].name,
        description=KINDS[kind].description,
        details=details,
        examples=[rollout.id for rollout, _ in examples],
    )


FEW = 10
"""Fewer passed or fewer failed rollouts than this conclude nothing: with 9 on a side, the 95% interval of a rate of one
half is wider than 0.6."""
LIST_LENGTH = 200
"""Rollouts that are listed one by one; of more there is the number alone."""


@dataclass
class CauseTally:
    """Numbers of failures that a cause was primary and secondary to, and of rollouts that passed in spite of it; and
    the first failure that it is primary to."""

    primary: int = 0
    secondary: int = 0
    passed: int = 0
    example: Explained | None = None


def counted_cause(row: Explained, *, keep: bool) -> str | None:
    """The cause that a failure counts under, None where nothing explains it: of a suspect reference it is the
    reference, whatever the agent did, unless such rollouts are kept."""
    if row.standing == "suspect" and not keep:
        return SUSPECT
    return row.primary.cause if row.primary else None


@dataclass
class Account:
    """Counts over explained rollouts.

    standings: rollouts by what they are to the contrast. passed, failed: of the contrasted ones, tasks: the first
    `FEW` that these are of. failures: failed
    rollouts in all, unexplained those without any cause. causes: by kind. unreferenced: rollouts with neither reference
    nor milestones. unproven: rollouts whose world failed to play them, and unplayed the first of these. left_out: the
    first that are, by standing.
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
    unplayed: Explained | None = None
    left_out: dict[Standing, list[Explained]] = field(default_factory=dict[Standing, list[Explained]])

    @property
    def unproven_note(self) -> str:
        """A sentence on the rollouts whose world failed; "" where there are none."""
        if self.unplayed is None:
            return ""
        return (
            f"{self.unproven} rollouts could not be played again, so that their causes are not proven; of "
            f"{self.unplayed.place}: {self.unplayed.unproven}"
        )

    def add(self, row: Explained, *, keep: bool) -> None:
        """Count a rollout in; `keep`: those of suspect references are contrasted, too."""
        self.standings[row.standing] += 1
        if row.unproven:
            self.unproven, self.unplayed = self.unproven + 1, self.unplayed or row
        if row.standing == "contrasted" or (keep and row.standing == "suspect"):
            self.tasks |= {row.task} if len(self.tasks) < FEW else set()
            self.passed += row.outcome == "passed"
            self.failed += row.outcome == "failed"
        if row.standing != "contrasted":
            entries = self.left_out.setdefault(row.standing, [])
            entries += [row] if len(entries) < LIST_LENGTH else []
        if row.outcome == "failed":
            self.failures += 1
            kind = counted_cause(row, keep=keep)
            self.unexplained += kind is None
            if kind is not None:
                tally = self.causes.setdefault(kind, CauseTally())
                tally.primary += 1
                tally.example = tally.example or row
        is_counted = row.outcome != "error" and (keep or row.standing != "suspect")
        for cause in row.secondary if is_counted else ():
            tally = self.causes.setdefault(cause.cause, CauseTally())
            tally.secondary += row.outcome == "failed"
            tally.passed += row.outcome == "passed"


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of a diagnosis.

    logs: what was read. explanations: of every rollout. findings: what goes with failing, and what to fix. account:
    counts over all rollouts, and agents those of each agent by its name. labels: of every run, with the candidates,
    which are causes that some failed rollout shows; None where nothing could be contrasted, and so is report, the
    account of the selection. shortage: why nothing can be concluded, "" where enough was read; then nothing is selected
    either. keeps_suspects: whether rollouts of suspect references count.
    """

    logs: Logs
    explanations: Explanations
    findings: Findings
    account: Account
    agents: dict[str, Account]
    labels: StreamedLabels | None
    report: SelectionAccount | None
    shortage: str
    keeps_suspects: bool


def diagnose(
    logs: Logs,
    selection: Selection,
    *,
    runs: int,
    count: int,
    seed: int,
    keep_suspects: bool = False,
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
        keep_suspects: contrast rollouts whose reference is suspect, too.
        worlds: in which rollouts are replayed, so that causes are proven.
        kinds: what tools do, where their names mislead.
        clauses: of policies, beside those of captrain's benchmarks.
    """
    logs = refer(logs, worlds) if worlds is not None else logs
    explanations = explain_logs(logs, worlds, kinds, clauses)
    account, agents, collection = Account(), dict[str, Account](), Collection(explanations.toolbox, explanations.needs)
    for row, rollout in zip(explanations.rollouts, logs.rollouts, strict=True):
        for tally in (account, agents.setdefault(row.agent, Account())):
            tally.add(row, keep=keep_suspects)
            tally.unreferenced += not has_solution(rollout)
        if row.standing in ("contrasted", "suspect"):
            collection.add(row, rollout, counts=keep_suspects or row.standing == "contrasted")
    shortage, findings = _shortage(account, len(agents)), collection.findings()
    if not account.passed or not account.failed:
        return Diagnosis(logs, explanations, findings, account, agents, None, None, shortage, keep_suspects)
    labels = label_causes(explanations.rollouts, logs.rollouts, runs, seed, explanations.toolbox, keep=keep_suspects)
    report = select_by_verdicts(labels.verdicts, labels.candidates, selection, count, seed).report
    if shortage:
        reason = "several agents" if len(agents) > 1 else "too few rollouts"
        report["candidates"] = [
            {**entry, "selected": False, "reason": f"{reason} ({entry['reason']})"} for entry in report["candidates"]
        ]
    return Diagnosis(logs, explanations, findings, account, agents, labels, report, shortage, keep_suspects)


def _shortage(account: Account, agents: int) -> str:
    passed, failed, tasks = account.passed, account.failed, len(account.tasks)
    if not passed or not failed:
        return f"{passed} passed and {failed} failed rollouts: there is nothing to contrast"
    if agents > 1:
        return f"a contrast would pool {agents} agents; diagnose the rollouts of each by themselves for a ranking"
    if min(passed, failed) < FEW:
        return f"{passed} passed and {failed} failed rollouts; at least {FEW} of each are needed to conclude anything"
    if tasks < FEW:
        return (
            f"{tasks} tasks; at least {FEW} are needed to conclude anything: trials of one task are nearly the same one"
        )
    return ""


def shares(account: Account) -> Iterable[tuple[str, CauseTally]]:
    """The causes by how many failures they are primary to, the most first."""
    return sorted(account.causes.items(), key=lambda item: (-item[1].primary, -item[1].secondary, item[0]))
