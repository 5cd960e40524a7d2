"""What an agent's own logs say it lacks: label and select. No model, no network, no torch.

The analyst, the labelling runs and the selection are those of the pipeline; only the rollouts come from elsewhere.
What infrastructure or the simulated user brought about is listed and not contrasted: it says nothing of the agent. A
ranking of few rollouts is luck, so where fewer than `FEW` passed or failed the report says so before anything else,
and calls nothing a finding.

Logs may hold more rollouts than memory: they are read one by one, a few times over, and what stays of each is counted.
"""

from dataclasses import dataclass

from captrain.capabilities import SelectionAccount, StreamedLabels, fault_of, label_streamed, select_by_verdicts
from captrain.config import Selection
from captrain.diagnosis.outcomes import OutcomeTally
from captrain.interop import Logs
from captrain.records import Rollout, Spool

FEW = 10
"""Fewer passed or fewer failed rollouts than this conclude nothing: with 9 on a side, the 95% interval of a rate of one
half is wider than 0.6."""
LIST_LENGTH = 200
"""Faults that are listed one by one; of more there is the number alone."""


@dataclass(frozen=True)
class Fault:
    """A rollout that is left out of the contrast, and what shows that it is a fault."""

    task: str
    trial: int
    outcome: str
    evidence: str


@dataclass(frozen=True)
class Contrasted:
    """The rollouts of a log that say something of the agent.

    rollouts: these. passed, failed: how many of them. unreferenced: how many have neither reference nor milestones.
    faults: how many others there are. examples: the first of those. outcomes: of every rollout that has a verdict.
    """

    rollouts: Spool[Rollout]
    passed: int
    failed: int
    unreferenced: int
    faults: int
    examples: list[Fault]
    outcomes: OutcomeTally


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of a diagnosis.

    logs: what was read. contrasted: the rollouts that say something of the agent. labels: of every run, with the
    candidates, which are capabilities that some rollout lacks; None where nothing could be contrasted, and so is
    report, the account of the selection. shortage: why nothing can be concluded, "" where enough was read.
    """

    logs: Logs
    contrasted: Contrasted
    labels: StreamedLabels | None
    report: SelectionAccount | None
    shortage: str


def diagnose(logs: Logs, selection: Selection, *, runs: int, count: int, seed: int) -> Diagnosis:
    """Label the rollouts of other people's logs and rank the capabilities that failed ones lack and passed ones show.

    Args:
        logs: from `captrain.interop.read_logs`.
        selection: thresholds, as in the pipeline.
        runs: labelling runs, each on a resample of the rollouts.
        count: capabilities selected at most.
        seed: of the resamples.
    """
    contrasted = _contrasted(logs)
    passed, failed = contrasted.passed, contrasted.failed
    if not passed or not failed:
        shortage = f"{passed} passed and {failed} failed rollouts: there is nothing to contrast"
        return Diagnosis(logs, contrasted, None, None, shortage)
    labels = label_streamed(contrasted.rollouts, logs.tools, runs, seed)
    report = select_by_verdicts(labels.verdicts, labels.candidates, selection, count, seed).report
    shortage = ""
    if min(passed, failed) < FEW:
        shortage = (
            f"{passed} passed and {failed} failed rollouts; at least {FEW} of each are needed to conclude anything"
        )
    return Diagnosis(logs, contrasted, labels, report, shortage)


def _contrasted(logs: Logs) -> Contrasted:
    rollouts, outcomes = Spool(Rollout), OutcomeTally()
    counts = {"passed": 0, "failed": 0, "unreferenced": 0}
    errors: list[Fault] = []
    slips: list[Fault] = []
    for rollout in logs.rollouts:
        outcomes.add(rollout)
        if evidence := _fault(rollout):
            faults = errors if rollout.outcome == "error" else slips
            if len(faults) < LIST_LENGTH:
                faults.append(Fault(rollout.task.id, rollout.trial, rollout.outcome, evidence))
            continue
        rollouts.add(rollout)
        counts[rollout.outcome] += 1
        counts["unreferenced"] += not rollout.reference and not _has_milestones(rollout)
    faults = len(logs.rollouts) - len(rollouts)
    return Contrasted(rollouts, **counts, faults=faults, examples=[*errors, *slips][:LIST_LENGTH], outcomes=outcomes)


def _fault(rollout: Rollout) -> str | None:
    if rollout.outcome == "error":
        return rollout.error or "an infrastructure error"
    return fault_of(rollout)


def _has_milestones(rollout: Rollout) -> bool:
    return rollout.score is not None and any(name.startswith("milestone") for name in rollout.score.parts)
