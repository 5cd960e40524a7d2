"""LoRA adapters by GRPO: TRL's GRPOTrainer and PEFT, rollouts by our own engine or by vLLM.

A job trains one adapter in one environment, or in several: synthesized ones, or the benchmark itself. The trainer
decides from which environment each group is drawn; the tasks of an environment are used in order, and none twice before
all have been used that there are.

A group is K rollouts of one task (one seed). Advantage (r - mean) / (std + 1e-4) within the group; a group of constant
reward carries no signal and is discarded: its tokens are masked out of the loss (and counted). Clipped per-token
ratio, mean over all tokens of the batch (paper section 3.3) or over those of each rollout and then over rollouts (the
reference's draft), no KL term, tokens the model wrote only. The sampler's own log-probabilities are the old policy's; a
server computes them with other kernels, and in another precision, than the trainer: how far the two are apart is
measured in each step, and corrected where `importance_cap` says so.
The rollout budget is exact: where it is no multiple of a step, the last step is smaller, and its last group may be (one
of a single rollout is counted and teaches nothing).

An environment may define `hint(task) -> str`: what a share of the rollouts read at the end of the system prompt, so
that groups which would all fail have something to learn from. Before the update the hint is stripped: the prompt
trained on is the unhinted one, and so is that of the old policy's log-probabilities, which are computed again for
hinted rollouts; the ratio does not correct for the hint. Advantages are over the group as it is, hinted and unhinted
rollouts together (as the paper does): an unhinted one is held against hinted ones, and what these did better is
learnt without the hint. Neither score nor record sees a hint.

A job's workspace is named by the fingerprint of all that decides its result; in it lie full-state checkpoints, and at
the end the adapter, whose name is the hash of its content. A job that was cut off goes on from its last whole
checkpoint and ends in the identical adapter.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from captrain.models import LoraShape
from captrain.records import JsonObject
from captrain.run import Component, Count, Interval, Level, Rate, Share, Spec, takes
from captrain.training.jobs import Job, training_environments

Size = Annotated[int, Field(ge=2)]

Layers = Annotated[Sequence[Annotated[str, Field(min_length=1)]], Field(min_length=1)]

Schedule = Literal["constant", "linear"]
Loss = Literal["dapo", "grpo"]

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class GRPO:
    """The trainer. Of several environments it takes each in turn.

    Args:
        group_size: rollouts of one task, K.
        groups_per_step: groups sampled before an update.
        epochs: passes over each batch of rollouts.
        rank: LoRA rank.
        alpha: LoRA alpha; updates are scaled by alpha / rank.
        learning_rate: AdamW's, at the first update.
        schedule: of the rate: constant, or falling linearly to zero over all updates.
        clip: PPO clipping range, on both sides of 1.
        clip_high: of the upper side alone, as DAPO has it (arXiv 2503.14476, section 3.1); None: `clip`.
        checkpoint_every: steps between full-state checkpoints; no influence on the result.
        loss: what the mean is over, by TRL's names: dapo, all tokens of a step; grpo, those of each rollout, and then
            the rollouts whose groups are informative.
        importance_cap: of truncated importance sampling between the sampler and the trainer: each token counts by the
            ratio of its probabilities under the two at the same weights, at most by so much. The old policy's
            log-probabilities are then the trainer's own. None: the two are taken for one.
        hints: share of rollouts that read the environment's hint, where it offers one; each is drawn by its own key,
            so that a group may hold both kinds. Of a range each task draws its share evenly.
        targets: linear layers that get low-rank weights, by the ends of their names; of a mixture of experts those of
            its attention.
        experts: whether the experts of a mixture get them, too.
        max_error_share: of the rollouts that may come to nothing, by faults of infrastructure or for want of room, and
            are drawn again; a training with more ends. No influence on the result.
        staleness: steps by which the adapter that plays may be behind the one that is trained: so many steps' rollouts
            are played by servers while others train. The ratio to the sampler's log-probabilities corrects for it,
            clipped or capped as for any other difference. 0: each step waits for its own.
    """

    def __init__(
        self,
        *,
        group_size: Size,
        groups_per_step: Count,
        epochs: Count,
        rank: Count,
        alpha: Count,
        learning_rate: Rate,
        clip: Level,
        checkpoint_every: Count,
        schedule: Schedule = "constant",
        clip_high: Rate | None = None,
        loss: Loss = "dapo",
        importance_cap: Rate | None = None,
        hints: Share | Interval = 0.0,
        targets: Layers = LINEAR,
        experts: bool = False,
        max_error_share: Level = 0.2,
        staleness: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self.group_size, self.groups_per_step, self.epochs = group_size, groups_per_step, epochs
        self.rank, self.alpha, self.learning_rate, self.clip = rank, alpha, learning_rate, clip
        self.schedule, self.clip_high = schedule, clip_high
        self.loss, self.importance_cap = loss, importance_cap
        self.checkpoint_every, self.hints = checkpoint_every, hints
        self.targets, self.experts = list(targets), experts
        self.max_error_share, self.staleness = max_error_share, staleness

    @property
    def shape(self) -> LoraShape:
        """Rank, alpha and adapted layers of an adapter."""
        return LoraShape(self.rank, self.alpha, self.targets, self.experts)

    @property
    def hint_range(self) -> tuple[float, float]:
        """The least and the greatest share of a task's rollouts that read a hint."""
        low, high = self.hints if isinstance(self.hints, Sequence) else (self.hints, self.hints)
        return low, high

    @property
    def step_rollouts(self) -> int:
        """Rollouts sampled for one update."""
        return self.group_size * self.groups_per_step

    def identity(self) -> JsonObject:
        """Return the settings that decide the result."""
        without = ("checkpoint_every", "max_error_share")
        return {key: value for key, value in vars(self).items() if key not in without and key[0] != "_"}


def derived_trainer(trainer: Component, **changes: object) -> Component:
    """Derive GRPO with the settings that it shares with a given trainer, but for the changes."""
    derived = Component.model_validate({"_target_": "captrain.training.recipe.GRPO"})
    shared = {name: value for name, value in trainer.settings().items() if takes(derived, name)}
    return derived.model_copy(update={**shared, **changes})


def capability_jobs(spec: Spec, base: Path, environments: Path) -> list[Job]:
    """Make one job for each environment that has a passport, in the order of their names."""
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
