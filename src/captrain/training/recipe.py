"""Settings of GRPO, each declared once: its type, its default and what it does.

`captrain.training.grpo` is the trainer that they configure. The method in short:

1. A group is `group_size` rollouts of one task. A job draws its groups from its environments in turn, and uses each
   task once before any is used again.
2. The advantage of a rollout is (reward - mean) / (std + 1e-4) within its group. A group of equal rewards gives no
   training signal: its tokens are masked out of the loss, and its rollouts count as discarded.
3. The loss is PPO's clipped ratio per token, over the tokens that the model wrote, without a KL term. The old policy's
   log-probabilities are those of the sampler.
4. The rollout budget is exact. The last step and its last group may be smaller.

An environment may define `hint(task) -> str`. A share of the rollouts then reads the hint at the end of the system
prompt, so that a group that would always fail gets a training signal. The prompt in training has no hint, so the old
log-probabilities of hinted rollouts are computed again without it. The ratio does not correct for the hint. Hinted and
unhinted rollouts of a group share one mean, as in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from captrain.models import LoraShape
from captrain.run import Component, Count, Interval, Level, Rate, Share, Spec, takes
from captrain.training.jobs import Job, training_environments

Size = Annotated[int, Field(ge=2)]

Layers = Annotated[Sequence[Annotated[str, Field(min_length=1)]], Field(min_length=1)]

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NO_INFLUENCE = ("checkpoint_every", "max_error_share")
"""Settings that do not change the result."""


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """The trainer: a component whose settings are the section `trainer`."""

    group_size: Size
    """Rollouts of one task."""
    groups_per_step: Count
    """Groups sampled before an update."""
    epochs: Count
    """Passes over the rollouts of a step."""
    rank: Count
    """LoRA rank."""
    alpha: Count
    """LoRA alpha; updates are scaled by alpha / rank."""
    learning_rate: Rate
    """AdamW's rate at the first update."""
    clip: Level
    """PPO clipping range on both sides of 1."""
    checkpoint_every: Count
    """Steps between full-state checkpoints."""
    schedule: Literal["constant", "linear"] = "constant"
    """Keep the rate constant, or let it fall linearly to zero over all updates."""
    clip_high: Rate | None = None
    """Clipping range above 1, as in DAPO (arXiv 2503.14476, section 3.1); None: `clip`."""
    loss: Literal["dapo", "grpo"] = "dapo"
    """TRL's names. dapo: mean over all tokens of a step; grpo: mean over each rollout's tokens, then over the rollouts
    of informative groups."""
    importance_cap: Rate | None = None
    """Truncated importance sampling between a server's probabilities and the trainer's: each token's weight is the
    ratio of the two, at most this. The old log-probabilities are then the trainer's. None: no correction."""
    hints: Share | Interval = 0.0
    """Share of rollouts that read the environment's hint. Each rollout draws by its own key. If this is a range, each
    task draws its share from it uniformly."""
    targets: Layers = LINEAR
    """Linear layers to adapt, by the ends of their names. In a mixture of experts, these are in the attention."""
    experts: bool = False
    """Adapt the experts of a mixture, too."""
    max_error_share: Level = 0.2
    """Largest share of rollouts that may fail for infrastructure or length and be drawn again; above it the training
    ends."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """Steps by which the acting adapter may lag behind the trained one, so that servers play while others train. The
    ratio to the sampler's log-probabilities corrects for the lag. 0: each step waits for its own rollouts."""

    @property
    def shape(self) -> LoraShape:
        """Rank, alpha and adapted layers."""
        return LoraShape(self.rank, self.alpha, list(self.targets), self.experts)

    @property
    def hint_range(self) -> tuple[float, float]:
        """The least and the greatest share of a task's rollouts that read a hint."""
        low, high = self.hints if isinstance(self.hints, Sequence) else (self.hints, self.hints)
        return low, high

    @property
    def step_rollouts(self) -> int:
        """Rollouts sampled for one update."""
        return self.group_size * self.groups_per_step

    def identity(self) -> dict[str, object]:
        """Return the settings that decide the result."""
        return {name: value for name, value in vars(self).items() if name not in NO_INFLUENCE}


def derived_trainer(trainer: Component, **changes: object) -> Component:
    """Derive a GRPO component from another trainer: the settings that both have, then the changes."""
    derived = Component.model_validate({"_target_": "captrain.training.recipe.GRPO"})
    shared = {name: value for name, value in trainer.settings().items() if takes(derived, name)}
    return derived.model_copy(update={**shared, **changes})


def capability_jobs(spec: Spec, base: Path, environments: Path) -> list[Job]:
    """Make one job for each environment with a passport, in the order of their names."""
    return [
        Job(
            name=environment.name,
            base=base,
            policy=spec.exploring(),
            trainer=spec.trainer,
            environments=(environment,),
            rollouts=spec.adapters.rollouts,
            seed=spec.seed,
            machine=spec.machine,
            points=spec.curve.points,
        )
        for environment in training_environments(environments)
    ]
