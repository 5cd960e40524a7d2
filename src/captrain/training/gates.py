"""Trains the gates of a mixture by GRPO (`captrain.models.mixture`). Base and adapters stay frozen.

Imported only where training happens: it needs torch and TRL.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from captrain.errors import UserError
from captrain.models import (
    Mixture,
    load_gates,
    mixture_use,
    padded_deciding_tokens,
    prepare_trainer,
    require_trained,
    save_mixture,
)
from captrain.training import collectives
from captrain.training.grpo import PolicyTrainer
from captrain.training.jobs import GateJob, Job, StepResult
from captrain.training.trl_trainer import Columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GateTrainer(PolicyTrainer):
    """The trainer of gates, in place of an adapter."""

    mixture: Mixture

    def adapt(self, base: "PreTrainedModel") -> None:
        """Add the frozen adapters and the gates to the base.

        Raises:
            UserError: the base is sharded, the policy is served, or an adapter was altered.
        """
        assert isinstance(self.job, GateJob)
        if self.job.machine.accelerate.strategy == "fsdp" or self.is_served:
            raise UserError(
                "training gates needs the whole base in the training process",
                "set policy=local and machine.accelerate.strategy=none or ddp, or baselines.mixture.run=false",
            )
        for adapter in self.job.parts.adapters.values():
            require_trained(adapter)
        self.mixture = Mixture(base, self.job.parts)

    def prepare(self, job: Job, temperature: float) -> None:
        """Set how a step is computed, and load the gates that training starts from."""
        prepare_trainer(self, temperature, job.machine, job.seed)
        if job.start is not None:
            load_gates(self.mixture, Path(require_trained(job.start, "mixture").folder))

    def save_acting(self, folder: Path) -> None:
        """See `PolicyTrainer.save_acting`."""
        collectives.once(lambda: save_mixture(self.mixture, folder))

    def loss(self, model: nn.Module, columns: Columns) -> Tensor:
        """Return TRL's loss. Gates decide at the same tokens as when the policy sampled."""
        prompt, completion = columns["prompt_mask"], columns["completion_mask"]
        written = torch.cat([torch.zeros_like(prompt), completion * columns["tool_mask"]], 1)
        deciding = padded_deciding_tokens(written, torch.cat([prompt, completion], 1), self.mixture.parts.decide)
        with self.mixture.at(deciding):
            return super().loss(model, columns)

    def model_card(self, result: StepResult) -> str:
        """Write the model card of a mixture in Markdown, from results only."""
        job, recipe, first, last = self.job, self.recipe, result.history[0], result.history[-1]
        assert isinstance(job, GateJob)
        discarded = sum(step.discarded for step in result.history)
        start = f"| gates trained on from | {job.start.digest} |\n" if job.start else ""
        return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, grpo, mixture]
---
# {job.name}

Mixture of LoRA adapters; the gates were trained with GRPO in \
{", ".join(f"`{target.name}`" for target in self.groups.targets)}.

| | |
|---|---|
| content hash | {result.digest} |
| rollouts (of which in discarded constant groups) | {last.rollouts} ({discarded}) |
{start}| group size, groups per step, epochs | {recipe.group_size}, {recipe.groups_per_step}, {recipe.epochs} |
| learning rate, clip | {recipe.learning_rate} {recipe.schedule}, {recipe.clip} |
| mean reward, first and last step | {first.reward:.3f}, {last.reward:.3f} |
| seed | {job.seed} |

{mixture_use(job.parts)}
"""
