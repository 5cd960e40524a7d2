"""What TRACE is compared with: one adapter by GRPO in several environments, or in one with all of the budget.

`single` shows what the first capability is worth, `mixed` what an adapter for each capability adds to the environments,
and `untargeted` what the diagnosis adds to training in synthetic environments. All train like TRACE's adapters, with
the same trainer; only where, and how long, differs.
"""

from collections.abc import Sequence
from pathlib import Path

from captrain.config import Spec
from captrain.errors import UserError
from captrain.ledger import LedgerEntry, budget
from captrain.records import Capability
from captrain.training import Job, Place, places_of
from captrain.training.recipe import recipe


def single(
    spec: Spec, base: Path, environments: Path, ranked: Sequence[Capability], trace: Sequence[LedgerEntry]
) -> list[Job]:  # fmt: skip
    """All of TRACE's budget on the first capability that has an environment.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        environments: folder of TRACE's environments.
        ranked: the selected capabilities, best first.
        trace: every ledger entry on TRACE's side. Its diagnosis and the environment's own calibration are spent;
            training gets the rest.

    Returns:
        One job; none where no capability has an environment.
    """
    earned = {place.name: place for place in places_of(environments)}
    first = next((earned[one.id] for one in ranked if one.id in earned), None)
    if first is None:
        return []
    spent = [entry for entry in trace if entry.stage == "rollouts" or _calibrates(entry, [first])]
    return [_job("single", spec, base, (first,), budget(trace) - budget(spent))]


def mixed(spec: Spec, base: Path, environments: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """One adapter over all of TRACE's environments, with what is left after diagnosis and all calibration.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        environments: folder of TRACE's environments.
        trace: every ledger entry on TRACE's side.

    Returns:
        One job; none where there is no environment.
    """
    places = places_of(environments)
    return [_job("mixed", spec, base, places, remaining(trace))] if places else []


def untargeted(spec: Spec, base: Path, places: Sequence[Place], total: int) -> Job:
    """One adapter over environments that no diagnosis asked for: nothing is diagnosed or calibrated, and all of the
    `total` is training."""
    return _job("awm", spec, base, tuple(places), total)


def remaining(trace: Sequence[LedgerEntry]) -> int:
    """What TRACE has spent on neither diagnosis nor calibration."""
    return budget(trace) - budget([entry for entry in trace if entry.stage in ("rollouts", "environments")])


def _calibrates(entry: LedgerEntry, places: Sequence[Place]) -> bool:
    return entry.stage == "environments" and entry.item in [place.name for place in places]


def _job(name: str, spec: Spec, base: Path, places: tuple[Place, ...], rollouts: int) -> Job:
    if rollouts < 1:
        raise UserError(
            f"baselines.{name}: after diagnosis and calibration {rollouts} rollouts are left to train with",
            "raise adapters.rollouts",
        )
    return Job(
        name=name, base=base, policy=spec.exploring(), trainer=recipe(spec.trainer), places=places, rollouts=rollouts,
        seed=spec.seed, machine=spec.machine,
    )  # fmt: skip
