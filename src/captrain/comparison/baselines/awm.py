"""Baseline: GRPO in synthetic environments that no diagnosis asked for, at equal rollouts."""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.training import GRPOBaseline, baseline_job
from captrain.comparison.baselines.untargeted import untargeted_environments
from captrain.config import Spec
from captrain.ledger import LedgerEntry, budget
from captrain.training import Job


def untargeted_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """Make one job over environments that no diagnosis asked for: nothing is diagnosed or calibrated, and all of
    TRACE's total is training.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side.
    """
    environments = untargeted_environments(spec, spec.baselines.awm, project / "results/awm")
    return [baseline_job("awm", spec, project, environments, budget(trace))]


BASELINE = GRPOBaseline(name="awm", label="AWM", order=4, jobs=untargeted_jobs)
