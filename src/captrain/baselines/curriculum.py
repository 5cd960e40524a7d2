"""What TRACE is compared with: one adapter on a curriculum from targeted environments to the target itself."""

from collections.abc import Sequence
from pathlib import Path

from captrain.baselines.mixtures import remaining
from captrain.config import Spec
from captrain.ledger import LedgerEntry
from captrain.training import Job, curriculum, places_of
from captrain.training.recipe import recipe


def ramped(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """The job of the row `ramp`: what TRACE has spent on training, in one adapter; none without an environment.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side.
    """
    if not places_of(project / "results/environments"):
        return []
    settings = spec.baselines.ramp.model_dump(exclude={"run"})
    return [
        curriculum.job(
            spec, project, recipe(spec.trainer, "captrain.training.curriculum.Ramp", **settings), remaining(trace)
        )
    ]
