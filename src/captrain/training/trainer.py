"""TRL's GRPOTrainer for rollouts that a policy has played.

Imported only where training happens: it needs torch and TRL. What the policy says of its tokens is what is trained on;
its log-probabilities are the old policy's.
"""

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.grpo_trainer import GRPOTrainer

from captrain.models import prepare_trainer
from captrain.records import JsonObject
from captrain.training import collectives, mismatch
from captrain.training.jobs import Job
from captrain.training.model_card import grpo_model_card


class PolicyTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts come from a policy, token-exact and with the sampler's log-probabilities.

    `history` holds one row a step: step, rollouts, reward, success, informative, discarded, prompt_tokens,
    completion_tokens, errors (rollouts that came to nothing and were played again, beyond the others), places (groups
    of each environment) and what the recipe adds at the end of a step; where hints are given also unhinted, the
    rollouts without one, and unhinted_passed. It is all that later steps depend on besides weights and optimizer.
    """

    history: list[JsonObject]
    """Rows of finished steps; where a server samples they also have the columns of `captrain.training.mismatch`."""
    sampled: torch.Tensor | None = None
    advantages: torch.Tensor
    hinted: torch.Tensor
    stripped = False
    """True if any rollout of the step had a hint, in whatever process."""
    served = False
    """True if the sampler is a server, whose log-probabilities are not those of this process."""
    model_tokens: torch.Tensor
    """The tokens by which the two are compared: the model's own, where no hint was read."""
    signal = True
    informative = 1.0
    """Share of the step's rows that teach something, in all processes."""
    sources: torch.Tensor
    """The number of each row's environment."""

    model_card = staticmethod(grpo_model_card)

    def prepare(self, job: Job, temperature: float) -> None:
        """Set how a step is computed."""
        prepare_trainer(self, temperature, job.machine, job.seed)

    def teaches(self, rewards: Sequence[float]) -> bool:
        """Return whether the rewards of a group differ, so that its advantages are not all zero."""
        return max(rewards) - min(rewards) > 1e-6

    def _generate_and_score_completions(self, inputs: list[JsonObject]) -> JsonObject:
        batch = super()._generate_and_score_completions(inputs)
        # TRL's own are made in float32, by kernels that round differently on different CPUs.
        batch["advantages"] = self.advantages.to(batch["advantages"].device)
        batch["sources"] = self.sources
        if self.served:
            self.history[-1] |= self._mismatch(batch)
        self.sampled = None
        self.signal = bool(batch["num_items_in_batch"] > 0)
        # The parts of a batch, in time or over processes, must have equally many rows.
        if self.args.gradient_accumulation_steps == collectives.size() == 1:
            return without_discarded(batch)
        if self.loss_type == "grpo" and self.signal:
            # TRL's mean is over all rows: the loss is linear in the advantages, and this makes it one over those that
            # teach something, as it is where the others are left out.
            batch["advantages"] = batch["advantages"] / self.informative
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # TRL corrects the sampler's against these itself (`use_vllm`).
        if self.sampled is None or self.use_vllm:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        # While a batch is made, TRL asks for the old policy's log-probabilities: the sampler has them exactly, but
        # for the rows that it sampled under another prompt than the one trained on. The weights are still its own.
        old, hinted = self.sampled.to(input_ids.device), self.hinted.to(input_ids.device)
        if self.stripped:
            rows = hinted.clone()
            rows[0] |= not rows.any()  # a forward pass of a model that is shared is everybody's
            stripped, _, _ = super()._get_per_token_logps_and_entropies(
                model, input_ids[rows], attention_mask[rows], *args, **kwargs
            )
            old[hinted] = stripped[hinted[rows]].to(old)
        return old, None, None

    def _mismatch(self, batch: JsonObject) -> JsonObject:
        """Measure how far the sampler's log-probabilities are from those of the weights that it sampled with, computed
        here."""
        assert self.sampled is not None
        scores = batch.get("old_per_token_logps") if self.use_vllm else None
        if scores is None:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            with torch.no_grad():
                scores, _, _ = super()._get_per_token_logps_and_entropies(
                    self.model, ids, attention, batch["completion_ids"].shape[1], self.args.per_device_train_batch_size
                )
        differences = (scores.cpu().double() - self.sampled)[self.model_tokens]
        return mismatch.summary(collectives.together(lambda: mismatch.moments(differences.tolist())))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Make one update; none when every group of the batch was constant (momentum alone must not move weights)."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.signal:
            for parameter in model.parameters():
                parameter.grad = None
        return loss


def without_discarded(batch: JsonObject) -> JsonObject:
    """Drop the rows of discarded groups, which cost time and change nothing; at least one row stays."""
    informative = batch["tool_mask"].mul(batch["completion_mask"]).any(1)
    informative[0] |= not informative.any()
    size = len(informative)
    return {
        name: value[informative] if isinstance(value, torch.Tensor) and value.ndim and len(value) == size else value
        for name, value in batch.items()
    }


class Synchronised(VLLMGeneration):
    """Stand-in for TRL's vLLM, whose weights it would keep up to date."""

    def __init__(self) -> None:
        """Start nothing."""

    def sync_weights(self) -> None:
        """Do nothing: the sampler has saved the adapter."""
