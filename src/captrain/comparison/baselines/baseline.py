"""Entry of a row of the main table, as the modules beside this one declare it.

All that is asked about a row anywhere is in this entry: how it is called and where it stands, which rollouts it is
charged for, with what it is compared, how it trains and what its stage does. `captrain.comparison.baselines.registry`
collects the entries; evaluation, figures and plans ask it and know no row by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from captrain.ledger import LedgerEntry
from captrain.records import load
from captrain.run import Spec

DIAGNOSIS, CALIBRATION = "rollouts", "environments"
"""Stages of TRACE that a baseline may rest on."""
TRACE_STAGES = (DIAGNOSIS, CALIBRATION, "adapters")
"""Stages that spend TRACE's budget, which each baseline is given as a whole."""
SOLUTIONS_ADAPTER = "solutions"
"""The arm of the adapter over all environments, which is the row's, and the stage that leaves all that are taught in
rounds."""
ROUTED = "solutions_routed"
"""The column of routes among base, specialists and generalist."""

Supervision = Literal["rewards", "reflection", "demonstrations", "demonstrations and rewards"]
"""Supervision that a row learns from. Rows of rewards alone do not have demonstrations."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A row of the main table. Subclasses say how its stage computes.

    Args:
        name: of the row, its stage, its section in `baselines` and its folders in artifacts/ and results/.
        label: how it is called in tables and figures.
        order: its place among the rows, from small to large.
        rests_on: stages of TRACE, or of other rows, that it is charged for beside its own.
        first_capability: whether it is charged for the calibration of the first capability's environment alone.
        unequal: why it may spend another total than TRACE; "" where it may not.
        compared_with: further rows that it is compared with, beside the base and TRACE.
        on_target: whether it plays its rollouts on the target itself, and not in synthesized environments.
        learns_from: the supervision that it has; with demonstrations alone it spends no rollout.
        trains_by_grpo: whether its history is one of GRPO.
    """

    name: str
    label: str
    order: int
    rests_on: tuple[str, ...] = ()
    first_capability: bool = False
    unequal: str = ""
    compared_with: tuple[str, ...] = ()
    on_target: bool = False
    learns_from: Supervision = "rewards"
    trains_by_grpo: bool = False

    def section(self, spec: Spec) -> Any:
        """Return the row's settings: the section of `baselines` in the configuration that has its name."""
        return getattr(spec.baselines, self.name)

    def target_share(self, spec: Spec) -> float:
        """Return the share of its rollouts that it plays on the target itself, in [0, 1]."""
        return float(self.on_target)

    def charged(self, entry: LedgerEntry, ranked: Sequence[str]) -> bool:
        """Return whether a ledger entry is on this row's account.

        Args:
            entry: of any stage.
            ranked: capabilities with an environment, best first.
        """
        if entry.stage == CALIBRATION and self.first_capability:
            return CALIBRATION in self.rests_on and entry.item in ranked[:1]
        return entry.stage in (*self.rests_on, self.name)

    def planned_rollouts(self, diagnosis: float, calibration: float, training: float, capabilities: int) -> float:
        """Estimate the rollouts that its own stage plays when TRACE spends as given: what makes their totals equal.

        Args:
            diagnosis: of TRACE.
            calibration: of all of TRACE's environments.
            training: of all of TRACE's adapters.
            capabilities: that TRACE trains.
        """
        if self.learns_from == "demonstrations":
            return 0
        shared = calibration / capabilities if self.first_capability else calibration
        costs = {DIAGNOSIS: diagnosis, CALIBRATION: shared}
        return diagnosis + calibration + training - sum(costs.get(stage, 0) for stage in self.rests_on)

    def diagnosing_rollouts(self, spec: Spec, attempts: float) -> float:
        """Estimate the rollouts of further diagnoses that its stage plays, where each environment takes so many
        attempts."""
        return 0

    def arms(self, capabilities: int) -> int:
        """Count the arms that the row leaves to be evaluated, where TRACE trains so many capabilities."""
        return 1

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """Count the demonstrations that the row is trained on, and the passes over each; (0, 0) where there is none."""
        return 0, 0

    def run(self, spec: Spec) -> str:
        """Compute the row and publish it, or publish that there is nothing; return which, in a line."""
        if self.section(spec).run:
            return self.compute(spec)
        self.publish_nothing()
        return f"not run: baselines.{self.name}.run is false"

    def compute(self, spec: Spec) -> str:
        """Compute the row and publish what it acts with; says in a line what came of it."""
        raise NotImplementedError

    def publish_nothing(self) -> None:
        """Write the files of a row that is not run."""
        raise NotImplementedError


def trace_ledger(results: Path = Path("results")) -> list[LedgerEntry]:
    """Read every ledger entry on TRACE's side: diagnosis and calibration count as much as training."""
    paths = [results / stage / "ledger.jsonl" for stage in TRACE_STAGES]
    return [entry for path in paths for entry in load(path, LedgerEntry)]


def specialist_name(capability: str) -> str:
    """Name the arm of a capability's specialist, as rows, routes and tables use it."""
    return f"{SOLUTIONS_ADAPTER}:{capability}"
