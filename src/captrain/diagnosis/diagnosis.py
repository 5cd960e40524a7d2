"""What an agent's own logs say it lacks: label and select. No model, no network, no torch.

The analyst, the labelling runs and the selection are those of the pipeline; only the rollouts come from elsewhere.
What infrastructure or the simulated user brought about is listed and not contrasted: it says nothing of the agent. A
ranking of few rollouts is luck, so where fewer than `FEW` passed or failed the report says so before anything else,
and calls nothing a finding.
"""

from dataclasses import dataclass

from captrain.capabilities import ProgrammaticAnalyst, SelectionAccount, fault_of, label_runs, select
from captrain.config import Selection
from captrain.interop import Logs
from captrain.records import Capability, Rollout, RolloutLabels

FEW = 10
"""Fewer passed or fewer failed rollouts than this conclude nothing: with 9 on a side, the 95% interval of a rate of one
half is wider than 0.6."""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of a diagnosis.

    logs: what was read. faults: rollout id -> evidence, of rollouts left out of the contrast. contrasted: the others.
    candidates: capabilities that some rollout lacks. labels: of every run. report: the account of the selection, None
    where nothing could be contrasted. shortage: why nothing can be concluded, "" where enough was read.
    """

    logs: Logs
    faults: dict[str, str]
    contrasted: list[Rollout]
    candidates: list[Capability]
    labels: list[RolloutLabels]
    report: SelectionAccount | None
    shortage: str

    def count(self, outcome: str) -> int:
        """Contrasted rollouts with this outcome."""
        return sum(rollout.outcome == outcome for rollout in self.contrasted)


def diagnose(logs: Logs, selection: Selection, *, runs: int, count: int, seed: int) -> Diagnosis:
    """Label the rollouts of other people's logs and rank the capabilities that failed ones lack and passed ones show.

    Args:
        logs: from `captrain.interop.read_logs`.
        selection: thresholds, as in the pipeline.
        runs: labelling runs, each on a resample of the rollouts.
        count: capabilities selected at most.
        seed: of the resamples.
    """
    errors = {
        rollout.id: rollout.error or "an infrastructure error"
        for rollout in logs.rollouts
        if rollout.outcome == "error"
    }
    slips = {
        rollout.id: fault
        for rollout in logs.rollouts
        if rollout.id not in errors and (fault := fault_of(rollout)) is not None
    }
    faults = errors | slips
    contrasted = [rollout for rollout in logs.rollouts if rollout.id not in faults]
    passed = sum(rollout.outcome == "passed" for rollout in contrasted)
    failed = len(contrasted) - passed
    if not passed or not failed:
        shortage = f"{passed} passed and {failed} failed rollouts: there is nothing to contrast"
        return Diagnosis(logs, faults, contrasted, [], [], None, shortage)
    candidates, labels = label_runs(ProgrammaticAnalyst(), contrasted, logs.tools, runs, seed)
    report = select(labels, candidates, selection, count, seed).report
    shortage = ""
    if min(passed, failed) < FEW:
        shortage = (
            f"{passed} passed and {failed} failed rollouts; at least {FEW} of each are needed to conclude anything"
        )
    return Diagnosis(logs, faults, contrasted, candidates, labels, report, shortage)
