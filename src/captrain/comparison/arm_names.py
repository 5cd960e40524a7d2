"""Names of arms: which one each rollout of the evaluation is of.

Rollouts record what acted, as digests of policy and adapter; what an arm is called stands in the index of the stage
that left it. Whoever reads the rollouts of the evaluation again, as a report or the test of a capability, asks here.
"""

from pathlib import Path

from captrain.comparison.baselines.registry import acting_stages
from captrain.comparison.rows import BASE
from captrain.config import repro
from captrain.records import IndexEntry, Rollout, read_index

ADAPTERS = "adapters"
"""The stage of TRACE's own adapters."""


def arm_indices(root: Path) -> dict[str, list[tuple[str, IndexEntry]]]:
    """Read the indices of the stages: stage -> what it has left to act with, by name, in the order of the stages.

    Raises:
        UserError: TRACE's adapters have no index, or an index is not whole.
    """
    paths = {stage: root / "results" / stage / "index.json" for stage in acting_stages()}
    return {
        stage: [*read_index(path, f"run `{repro(stage, root)}` to make it").items()]
        for stage, path in paths.items()
        if stage == ADAPTERS or path.exists()
    }


class Arms:
    """Names of arms, for the rollouts of the evaluation in the order in which they were played.

    Args:
        root: of the project.

    `stages` is the stage of each arm that is an adapter, by name.
    """

    def __init__(self, root: Path) -> None:
        indices = arm_indices(root)
        entries = [(name, row) for index in indices.values() for name, row in index]
        self._adapters = {row.digest: name for name, row in reversed(entries) if row.path}
        self.stages = {name: stage for stage, index in indices.items() for name, row in index if row.path}
        # The base is played first, then the prompts in the order of their stages.
        self._guided = [BASE, *(name for name, row in entries if row.guidance)]
        self._policies: dict[str, str] = {}

    def of(self, rollout: Rollout) -> str:
        """Return the arm of the next rollout."""
        policies = self._policies
        if rollout.policy not in policies:
            more = len(policies) < len(self._guided)
            policies[rollout.policy] = self._guided[len(policies)] if more else rollout.policy
        adapter = rollout.adapter
        return self._adapters.get(adapter, adapter) if adapter else policies[rollout.policy]
