"""TRL's GRPOTrainer, with rollouts, advantages and losses of captrain. Everything that captrain overrides in TRL is
here. The remarks are about TRL 1.16.0; check them when TRL's version changes. Imported only where training happens.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from torch import Tensor, nn
from trl.trainer.grpo_trainer import GRPOTrainer

Columns: TypeAlias = "dict[str, Tensor]"
"""TRL's batch: `prompt_ids`, `completion_ids`, `advantages`, and others, a row for each rollout."""


class Sampled(TypedDict):
    """The rollouts of a step as TRL's `rollout_func` returns them, a row for each prompt."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    """1 for tokens that are trained on."""
    environment_reward: list[float | None]


@dataclass(frozen=True)
class StepBatch:
    """Fields of this process's rollouts of one step that TRL's batch does not have.

    Attributes:
        sampled: (rows, completion) float64, the sampler's log-probabilities, 0 beyond the end of a row; `completion` is
            the longest dialogue's number of tokens after its opening.
        advantages: (rows,) float64.
        hinted: (rows,) bool, rollouts that read a hint that the trained prompt does not have.
        environments: (rows,) int, the number of each row's environment.
        compared: (rows, completion) bool, tokens that the model wrote without a hint: those whose log-probabilities by
            the sampler are compared with the trainer's.
        any_hinted: whether a row of any process is hinted.
        informative: share of the rows of all processes with a training signal.
    """

    sampled: Tensor
    advantages: Tensor
    hinted: Tensor
    environments: Tensor
    compared: Tensor
    any_hinted: bool
    informative: float


class TrlTrainer(GRPOTrainer):
    """GRPOTrainer with rollouts of our own. TRL calls the methods of each step in this order:

    1. `play`: the step's rollouts. They and their advantages are kept in `batch`.
    2. `prepare_batch`: TRL has padded the rollouts to tensors.
    3. `loss`, for each pass over the batch.
    4. `training_step`: backpropagation. transformers then makes the update.
    """

    batch: StepBatch | None = None
    """Fields of the current step."""
    is_sampling = False
    has_signal = True
    """Whether any group of the batch has a training signal."""

    @abstractmethod
    def play(self, prompts: list[str]) -> Sampled:
        """Play a step and set `batch`."""

    def prepare_batch(self, columns: Columns, batch: StepBatch) -> Columns:
        """Return the columns that the loss takes."""
        return columns

    def loss(self, model: nn.Module, columns: Columns) -> Tensor:
        """Return the loss of some rows of the batch: TRL's clipped ratio."""
        return super()._compute_loss(model, columns)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Backpropagate. If all groups are constant, leave no gradient, so that momentum does not move the weights."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.has_signal:
            for parameter in model.parameters():
                parameter.grad = None
        return loss

    # Private methods of TRL

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Columns:
        """Overridden because TRL's advantages are float32, from kernels that round differently on different CPUs."""
        if self.use_vllm:
            # TRL would load the weights into a vLLM of its own. The policy's servers already have `play`'s adapter.
            self._last_loaded_step = self.state.global_step
        self.is_sampling = True
        columns = super()._generate_and_score_completions(inputs)  # calls `play`
        self.is_sampling = False
        assert self.batch is not None
        device = columns["advantages"].device
        columns["advantages"] = self.batch.advantages.to(device)
        columns["sources"] = self.batch.environments.to(device)
        self.has_signal = bool(columns["num_items_in_batch"] > 0)
        return self.prepare_batch(columns, self.batch)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Overridden because the sampler knows the old policy's log-probabilities exactly. TRL need not compute them.

        TRL still computes those of hinted rows, which were sampled under another prompt, and all of them if it corrects
        for the sampler (`use_vllm`).
        """
        score = super()._get_per_token_logps_and_entropies
        if not self.is_sampling or self.batch is None or self.use_vllm:
            return score(model, input_ids, attention_mask, *args, **kwargs)
        old, hinted = self.batch.sampled.to(input_ids.device), self.batch.hinted.to(input_ids.device)
        if self.batch.any_hinted:
            rows = hinted.clone()
            rows[0] |= not rows.any()  # all processes of a sharded model must take part in a forward pass
            stripped, _, _ = score(model, input_ids[rows], attention_mask[rows], *args, **kwargs)
            old[hinted] = stripped[hinted[rows]].to(old)
        return old, None, None

    def _compute_loss(self, model: nn.Module, inputs: Columns) -> Tensor:
        """Overridden so that a subclass can have another loss."""
        return self.loss(model, inputs)


def without_discarded(columns: Columns) -> Columns:
    """Drop the rows of discarded groups, which cost time and change nothing. At least one row is kept."""
    informative = columns["tool_mask"].mul(columns["completion_mask"]).any(1)
    informative[0] |= not informative.any()
    size = len(informative)
    return {
        name: value[informative] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for name, value in columns.items()
    }
