"""Baseline: one adapter over all of TRACE's environments.

It shows what an adapter for each capability adds to the environments.
"""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.baselines.training import GRPOBaseline, baseline_job, training_budget
from captrain.config import Spec
from captrain.ledger import LedgerEntry
from captrain.training import Job, training_environments


def mixed_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """Make one job over all environments, with what is left after diagnosis and all calibration; none without one.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side.
    """
    environments = training_environments(project / "results/environments")
    return [baseline_job("mixed", spec, project, environments, training_budget(trace))] if environments else []


BASELINE = GRPOBaseline(
    name="mixed", label="mixed environments", order=6, jobs=mixed_jobs, rests_on=(DIAGNOSIS, CALIBRATION)
)
