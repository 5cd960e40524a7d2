"""Baseline: all of TRACE's budget on the first capability, which shows what that alone is worth."""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.baselines.training import GRPOBaseline, baseline_job
from captrain.config import Spec
from captrain.ledger import LedgerEntry, budget
from captrain.records import Capability, load
from captrain.training import Job, training_environments


def single_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """Make one job in the environment of the first capability that has one; none where no capability has.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side. Its diagnosis and the environment's own calibration are spent;
            training gets what is left.
    """
    environments = {
        environment.name: environment for environment in training_environments(project / "results/environments")
    }
    ranked = load(project / "results/capabilities/capabilities.jsonl", Capability)
    first = next((capability.id for capability in ranked if capability.id in environments), None)
    if first is None:
        return []
    charged = [
        entry for entry in trace if entry.stage == DIAGNOSIS or (entry.stage == CALIBRATION and entry.item == first)
    ]
    return [baseline_job("single", spec, project, [environments[first]], budget(trace) - budget(charged))]


BASELINE = GRPOBaseline(
    name="single",
    label="single capability",
    order=5,
    jobs=single_jobs,
    rests_on=(DIAGNOSIS, CALIBRATION),
    first_capability=True,
)
