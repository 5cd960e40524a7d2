"""`Baseline`: the entry of one row of the main table.

The entry holds everything about a row: label and order, the rollouts it is charged for, its comparisons, how it trains
and what its stage does. Each module beside this one declares its rows. `captrain.comparison.baselines.registry`
collects them. Evaluation, figures and plans use the entries and know no row by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from captrain.ledger import LedgerEntry
from captrain.records import load
from captrain.run import Spec

DIAGNOSIS, CALIBRATION = "rollouts", "environments"
"""Stages of TRACE whose rollouts a baseline may be charged for."""
TRACE_STAGES = (DIAGNOSIS, CALIBRATION, "adapters")
"""Stages that spend TRACE's budget. Each baseline gets the same total."""
SOLUTIONS_ADAPTER = "solutions"
"""Name of the generalist adapter (trained on the solutions of all environments), of its row and of its stage."""
TRACE_ROUTES = "trace"
"""Folder in the results of the controls: a copy of TRACE's routes, and of the index of its adapters."""
ROUTED = "solutions_routed"
"""Column of the routes that choose between the base, the specialists and the generalist adapter."""

Supervision = Literal["rewards", "reflection", "demonstrations", "demonstrations and rewards"]
"""What a row learns from."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A row of the main table. Subclasses implement `compute` and `publish_nothing`.

    Args:
        name: name of the row, its stage, its section in `baselines` and its folders in artifacts/ and results/.
        label: name in tables and figures.
        order: place among the rows, smallest first.
        rests_on: stages of TRACE or of other rows that it is charged for, beside its own.
        first_capability: charge only the calibration of the first capability's environment.
        unequal: why its total may differ from TRACE's; "" if it may not.
        compared_with: rows to compare it with, beside the base and TRACE.
        on_target: it plays its rollouts on the target itself, not in synthesized environments.
        learns_from: its supervision. With demonstrations alone it spends no rollouts.
        trains_by_grpo: its history is a history of GRPO.
        variants: further arms "name:variant" of its stage, which are methods of the table. A ledger item of such a name
            is charged to that method alone.
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
    variants: tuple[str, ...] = ()

    def section(self, spec: Spec) -> Any:
        """Return the row's section of `baselines` in the configuration."""
        return getattr(spec.baselines, self.name)

    def target_share(self, spec: Spec) -> float:
        """Return the share of its rollouts played on the target itself, in [0, 1]."""
        return float(self.on_target)

    def charged(self, entry: LedgerEntry, ranked: Sequence[str]) -> bool:
        """Return whether this row is charged for a ledger entry of any stage.

        `ranked` lists the capabilities with an environment, best first.
        """
        if entry.stage == CALIBRATION and self.first_capability:
            return CALIBRATION in self.rests_on and entry.item in ranked[:1]
        return entry.stage in (*self.rests_on, self.name)

    def planned_rollouts(self, diagnosis: float, calibration: float, training: float, capabilities: int) -> float:
        """Estimate the rollouts of its own stage that make its total equal to TRACE's.

        Args:
            diagnosis: rollouts of TRACE's diagnosis.
            calibration: rollouts in all of TRACE's environments.
            training: rollouts of all of TRACE's adapters.
            capabilities: number of capabilities that TRACE trains.
        """
        if self.learns_from == "demonstrations":
            return 0
        shared = calibration / capabilities if self.first_capability else calibration
        costs = {DIAGNOSIS: diagnosis, CALIBRATION: shared}
        return diagnosis + calibration + training - sum(costs.get(stage, 0) for stage in self.rests_on)

    def diagnosing_rollouts(self, spec: Spec, attempts: float) -> float:
        """Estimate the rollouts of its further diagnoses, if each environment takes `attempts` attempts."""
        return 0

    def arms(self, spec: Spec, capabilities: int) -> int:
        """Count its arms in the evaluation, if TRACE trains `capabilities` capabilities."""
        return 1

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """Return the number of demonstrations and of epochs over them; (0, 0) without demonstrations."""
        return 0, 0

    def run(self, spec: Spec) -> str:
        """Compute and publish the row if its section says `run`; return a line for the terminal."""
        if self.section(spec).run:
            return self.compute(spec)
        self.publish_nothing()
        return f"not run: baselines.{self.name}.run is false"

    def compute(self, spec: Spec) -> str:
        """Compute and publish the row; return a line for the terminal."""
        raise NotImplementedError

    def publish_nothing(self) -> None:
        """Write the files of a row that does not run."""
        raise NotImplementedError


def trace_ledger(results: Path = Path("results")) -> list[LedgerEntry]:
    """Read TRACE's ledger entries: diagnosis, calibration and training."""
    paths = [results / stage / "ledger.jsonl" for stage in TRACE_STAGES]
    return [entry for path in paths for entry in load(path, LedgerEntry)]


def specialist_name(capability: str) -> str:
    """Return the arm name of a capability's specialist in rows, routes and tables."""
    return f"{SOLUTIONS_ADAPTER}:{capability}"
