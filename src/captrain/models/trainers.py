"""Parts that TRL's trainers leave to captrain: scores of tokens, and steps that give the same bytes on every CPU."""

import types
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from captrain.config import Machine
from captrain.execution import launch
from captrain.models.barrier import AdamW, draw_adapter
from captrain.models.dense import Scores, score_states
from captrain.models.passes import SharedPasses
from captrain.models.weights import DENSE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


IGNORED = -100
"""The label of a token that is not scored."""


def share_beginnings(model: "PreTrainedModel", temperature: float, machine: Machine) -> SharedPasses | None:
    """Replace the head that TRL adds to a causal LM (`trl.trainer.utils.add_fused_lm_head`) by `SharedPasses`, in
    place, where the model is dense and computes on a CPU: TRL computes every row by itself, prompt and all, which is
    most of the time there. What TRL asks of it is the same: log-probabilities and entropies of labels, and their loss.
    Layers that several processes share (FSDP) stay modules, and only the head computes in the type of the model then.

    Args:
        model: the base of a PEFT model, before it trains.
        temperature: logits are divided by it.
        machine: by how many processes, and in which arithmetic.

    Returns:
        What the new head computes with, to be closed after training; None where modules compute.
    """
    accelerate = machine.accelerate
    dense = model.config.model_type in DENSE and not torch.cuda.is_available()
    sharded = accelerate.strategy == "fsdp"
    if accelerate.precision != "float64" and (sharded or not dense):
        return None
    from trl.trainer.utils import FusedCausalLMOutput

    passes = None if sharded else SharedPasses(model, launch.cores(machine), room=launch.room(machine))

    def forward(
        self: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **_: object,
    ) -> FusedCausalLMOutput:
        mask = labels[:, 1:] != IGNORED
        if passes is None:
            scores = _module_scores(self, input_ids, attention_mask, mask, temperature)
        else:
            columns = (input_ids.tolist(), (labels != IGNORED).tolist(), attention_mask.bool().tolist())
            rows = [
                ([*compress(ids, real)], [*compress(scored, real)]) for ids, scored, real in zip(*columns, strict=True)
            ]
            scores = passes.scores(rows, temperature)

        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(mask.shape).masked_scatter(mask, values)

        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-scores.log_probs.sum() / count,
            log_probs=padded(scores.log_probs),
            entropy=padded(scores.entropies),
            is_top1=padded(scores.is_top1),
            label_mask=mask,
        )

    model.forward = types.MethodType(forward, model)
    return passes


def _module_scores(
    model: "PreTrainedModel", input_ids: Tensor, attention_mask: Tensor, mask: Tensor, temperature: float
) -> Scores:
    """Score the tokens of a mask (rows, tokens - 1) by the modules of a model, row by row."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    states = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
    ).last_hidden_state
    head = model.get_output_embeddings()
    assert head is not None
    return score_states(head(states[:, :-1][mask]), input_ids[:, 1:][mask], temperature)


def make_exact(trainer: "Trainer", seed: int) -> None:
    """Give one of TRL's trainers of an adapter, whose model is in float64, what it needs for the same bytes on every
    CPU: AdamW behind the barrier, and initial weights that are drawn alike. Log-probabilities in float64 are a matter
    of `share_beginnings`.

    Args:
        trainer: before it trains.
        seed: of the adapter's initial weights.
    """
    options, model = trainer.args, trainer.model
    assert isinstance(model, nn.Module)
    betas = (options.adam_beta1, options.adam_beta2)
    settings = {"lr": options.learning_rate, "betas": betas, "eps": options.adam_epsilon}
    trainer.optimizer_cls_and_kwargs = (AdamW, settings)
    draw_adapter(model, seed)


def prepare_trainer(trainer: "Trainer", temperature: float, machine: Machine, seed: int) -> None:
    """Give one of TRL's trainers of an adapter the head of `share_beginnings`, and in float64 the steps of
    `make_exact`.

    Args:
        trainer: before it trains.
        temperature: of the policy that sampled.
        machine: by how many processes, and in which arithmetic.
        seed: of the adapter's initial weights.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainerCallback

    assert isinstance(trainer.model, PeftModel)
    base = trainer.model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    passes = share_beginnings(base, temperature, machine)
    if machine.accelerate.precision == "float64":
        make_exact(trainer, seed)
    if passes is not None:

        class Closing(TrainerCallback):
            """Callback that ends the processes that share the passes."""

            def on_train_end(self, *_: object, **__: object) -> None:
                """Close them."""
                passes.close()

        trainer.add_callback(Closing())
