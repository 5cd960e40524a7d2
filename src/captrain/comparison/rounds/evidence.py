"""Evidence on the agent so far: rollouts, labels, candidates, capabilities and their environments.

It begins with what the stages before have left of the base, and grows by a round at a time. Nothing in it is of the
test split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from captrain.capabilities import fault_of
from captrain.records import Capability, Rollout, RolloutLabels, load
from captrain.training import TrainingEnvironment, training_environments


@dataclass(frozen=True)
class Evidence:
    """Findings of all diagnoses so far.

    Args:
        rollouts: of the discovery split, by every agent that was diagnosed.
        labels: of these, in every labelling run.
        candidates: what labels were asked for, by id.
        capabilities: what has been selected, in the order of its selection.
        environments: single and pair, with a passport.
        failing: share of the base's rollouts that failed, of those that count.
        lacking: capability -> in how many diagnoses of an agent that was taught it, it was selected again.
    """

    rollouts: Sequence[Rollout]
    labels: Sequence[RolloutLabels]
    candidates: Mapping[str, Capability]
    capabilities: Sequence[Capability]
    environments: tuple[TrainingEnvironment, ...]
    failing: float = 1.0
    lacking: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_project(cls, project: Path) -> "Evidence":
        """Load what the stages from `rollouts` to `pairs` left of the base.

        Raises:
            UserError: a file is missing or corrupt.
        """
        results, artifacts = project / "results", project / "artifacts"
        candidates = load(results / "labels/candidates.jsonl", Capability)
        rollouts = load(artifacts / "rollouts/discovery.jsonl", Rollout)
        scored = [rollout.outcome for rollout in rollouts if fault_of(rollout) is None]
        return cls(
            rollouts,
            load(artifacts / "labels/labels.jsonl", RolloutLabels),
            {candidate.id: candidate for candidate in candidates},
            load(results / "capabilities/capabilities.jsonl", Capability),
            (*training_environments(results / "environments"), *training_environments(results / "pairs")),
            scored.count("failed") / len(scored),
        )

    @property
    def specialised(self) -> list[TrainingEnvironment]:
        """The environments of one capability each."""
        return [environment for environment in self.environments if "+" not in environment.name]

    @property
    def trained(self) -> list[str]:
        """The capabilities that have an environment."""
        return [environment.name for environment in self.specialised]

    def doses(self, demonstrations: int) -> tuple[tuple[TrainingEnvironment, int], ...]:
        """Share so many demonstrations among all environments: evenly, but for those of a capability that was found
        lacking again, which count once more each time."""
        weights = [
            1 + max(self.lacking.get(name, 0) for name in environment.name.split("+"))
            for environment in self.environments
        ]
        total, before, doses = sum(weights), 0, list[int]()
        for weight in weights:
            # Rounded up, so that what does not divide goes to the first.
            doses.append(-(-demonstrations * (before + weight) // total) - -(-demonstrations * before // total))
            before += weight
        return tuple(zip(self.environments, doses, strict=True))
