"""TRACE from solutions: what captrain recommends, beside the paper's own method, which learns from rewards.

`captrain.comparison.rounds` teaches an adapter over all environments and one for each, diagnoses what they have made of
the agent, and teaches what is still lacking. The row is the adapter over all environments; its routes among base,
specialists and that adapter are the row `solutions_routed` (`captrain.comparison.rows`).

Beside methods that learn from rewards this has a supervision that they have not: every table says so. How good it is
rests on who wrote the environments. The embedded templates' solutions are without a fault; `faults` says what others
would be worth.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, Baseline
from captrain.comparison.rounds.rediscovery import REDISCOVERY_COLUMNS
from captrain.comparison.rounds.teaching import publish_teaching, teach_in_rounds
from captrain.config import Spec
from captrain.records import publish, publish_json, publish_text
from captrain.training import SFT_COLUMNS, publish_adapters


@dataclass(frozen=True, kw_only=True)
class SolutionsBaseline(Baseline):
    """The row that is taught in rounds."""

    @property
    def learns_from(self) -> Literal["demonstrations"]:
        """See `Baseline.learns_from`."""
        return "demonstrations"

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """See `Baseline.demonstrations`."""
        section = spec.baselines.solutions
        specialists = section.specialist * spec.capabilities.count
        return (section.demonstrations + specialists, section.epochs) if section.run else (0, 0)

    def diagnosing_rollouts(self, spec: Spec, attempts: float) -> float:
        """See `Baseline.diagnosing_rollouts`: of one diagnosis that finds nothing new or, where environments take all
        attempts there are, of all, each with a new environment."""
        rounds, environments = spec.baselines.solutions.rounds, spec.environments
        if not rounds.count or not spec.baselines.solutions.run:
            return 0
        if attempts < environments.rounds:
            return rounds.tasks_before(2)
        return rounds.tasks + rounds.count * attempts * environments.groups * environments.group_size

    def arms(self, capabilities: int) -> int:
        """See `Baseline.arms`: the adapter over all environments, and one for each."""
        return 1 + capabilities

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        self.publish_nothing()
        teaching = teach_in_rounds(spec, Path())
        if teaching is None:
            return "no environment has a passport"
        publish_teaching(spec, Path(), teaching)
        adapters = [teaching.generalist, *teaching.specialists]
        count, discarded = teaching.generalist.demonstrations, sum(sum(item.left_out.values()) for item in adapters)
        return (
            f"{count} demonstrations, {len(teaching.specialists)} specialists, left out {discarded}, "
            f"{len(teaching.diagnoses)} further diagnoses"
        )

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        publish_adapters([], self.name, self.name, columns=SFT_COLUMNS)
        publish_json(Path("results/solutions/rounds.json"), [])
        publish_text(Path("results/solutions/rediscovery.csv"), ",".join(REDISCOVERY_COLUMNS) + "\n")
        publish_text(Path("results/solutions/routes.csv"), "task\n")
        publish(Path("artifacts/solutions/discovery.jsonl"), [])


BASELINE = SolutionsBaseline(
    name="solutions",
    label="TRACE, solutions",
    order=8,
    rests_on=(DIAGNOSIS, CALIBRATION),
    unequal="is taught the environments' own solutions, for which it plays no rollout of training",
    compared_with=("grpo_target", "rejection_sft", "adp"),
)
