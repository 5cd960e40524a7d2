"""Models that compute in float64 wholly, for training behind the barrier (`captrain.models.barrier`).

Weights in float64 are not enough: transformers takes norms and positions to float32, and TRL the logarithms of
probabilities, whatever the weights are in. In float32 the noise of different CPUs is as coarse as the barrier's grid.
"""

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captrain.models.barrier import AdamW, draw_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


class _Rotary(nn.Module):
    """Rotary positions of the default kind in the type of the model; those of transformers are in float32."""

    def __init__(self, theta: float, width: int) -> None:
        super().__init__()
        self.register_buffer(
            "frequency", theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), persistent=False
        )

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].to(torch.float64) * self.frequency
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def to_float64(model: "PreTrainedModel") -> None:
    """Make a model compute in float64 wholly, in place: transformers takes norms and positions to float32, whatever
    the weights are in. Dense Qwen3 is known, the embedded base's architecture; other models keep those two."""
    model.double()
    if model.config.model_type != "qwen3" or model.config.rope_parameters["rope_type"] != "default":
        return
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child).__name__ == "Qwen3RMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
            elif type(child).__name__ == "Qwen3RotaryEmbedding":
                setattr(module, name, _Rotary(model.config.rope_parameters["rope_theta"], model.config.head_dim))


def _exact_head(model: "PreTrainedModel", temperature: float) -> None:
    """Replace the head that TRL adds to a causal LM (`trl.trainer.utils.add_fused_lm_head`) by one in the type of the
    model, in place. What TRL asks of it is the same: log-probabilities and entropies of labels, and their loss."""
    from trl.trainer.utils import FusedCausalLMOutput

    def forward(
        self: "PreTrainedModel", input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **options: Any
    ) -> FusedCausalLMOutput:
        options = {name: options[name] for name in ("attention_mask", "position_ids") if name in options}
        hidden = self.base_model(input_ids=input_ids, use_cache=False, **options).last_hidden_state[:, :-1]
        labels = labels[:, 1:]
        mask = labels != -100
        logits = self.get_output_embeddings()(hidden[mask])
        distribution = (logits / temperature).log_softmax(-1)
        scores = distribution.gather(-1, labels[mask][:, None])[:, 0]
        entropy = -(distribution.detach().exp() * distribution.detach()).sum(-1)
        best = distribution.detach().argmax(-1) == labels[mask]

        def whole(values: Tensor) -> Tensor:
            return values.new_zeros(mask.shape).masked_scatter(mask, values)

        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-scores.sum() / count,
            log_probs=whole(scores),
            entropy=whole(entropy),
            is_top1=whole(best),
            label_mask=mask,
        )

    model.forward = types.MethodType(forward, model)


def make_exact(trainer: "Trainer", seed: int, temperature: float = 1.0) -> None:
    """Give one of TRL's trainers of an adapter, whose model is in float64, what it needs for the same bytes on every
    CPU: AdamW behind the barrier, log-probabilities in float64, and initial weights that are drawn alike.

    Args:
        trainer: before it trains.
        seed: of the adapter's initial weights.
        temperature: that logits are divided by.
    """
    options, model = trainer.args, trainer.model
    assert isinstance(model, nn.Module)
    betas = (options.adam_beta1, options.adam_beta2)
    settings = {"lr": options.learning_rate, "betas": betas, "eps": options.adam_epsilon}
    trainer.optimizer_cls_and_kwargs = (AdamW, settings)
    peft_model: Any = model
    _exact_head(peft_model.get_base_model(), temperature)
    draw_adapter(model, seed)
