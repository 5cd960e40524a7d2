"""Models that compute in float64 wholly, for training behind the barrier (`captrain.models.barrier`).

Weights in float64 are not enough: transformers takes norms and positions to float32, and TRL the logarithms of
probabilities, whatever the weights are in. In float32 the noise of different CPUs is as coarse as the barrier's grid.
"""

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captrain.errors import UserError
from captrain.models.barrier import AdamW, draw_adapter
from captrain.models.forest import IGNORED, make_forest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


class _Rotary(nn.Module):
    """Rotary positions of the default kind in the type of the model; those of transformers are in float32."""

    def __init__(self, theta: float, width: int) -> None:
        super().__init__()
        self.frequency = nn.Buffer(theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].to(torch.float64) * self.frequency
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def to_float64(model: "PreTrainedModel") -> None:
    """Make a model compute in float64 wholly, in place.

    Raises:
        UserError: it is no dense Qwen3, the architecture of the embedded base: what others do in float32 is not known.
    """
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

    config: Any = model.config
    if config.model_type != "qwen3" or config.rope_parameters["rope_type"] != "default" or config.use_sliding_window:
        raise UserError(
            f"training in float64 knows dense Qwen3 models alone, and this one is {config.model_type}",
            "set machine.accelerate.precision=float32, or bfloat16",
        )
    model.double()
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, Qwen3RMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
            elif isinstance(child, Qwen3RotaryEmbedding):
                setattr(module, name, _Rotary(config.rope_parameters["rope_theta"], config.head_dim))


def share_beginnings(model: "PreTrainedModel", temperature: float) -> None:
    """Replace the head that TRL adds to a causal LM (`trl.trainer.utils.add_fused_lm_head`) by one in the type of the
    model, in place. What TRL asks of it is the same: log-probabilities and entropies of labels, and their loss. Rows
    that begin alike are computed together (`captrain.models.forest`)."""
    from trl.trainer.utils import FusedCausalLMOutput

    def forward(
        self: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **_: object,
    ) -> FusedCausalLMOutput:
        forest = make_forest(input_ids, attention_mask, labels)
        mask = labels[:, 1:] != IGNORED
        nodes, places = forest.nodes[:, :-1][mask].unique(return_inverse=True)
        targets = labels[:, 1:][mask]
        states = self.base_model(
            input_ids=forest.ids, position_ids=forest.positions, attention_mask=forest.attention, use_cache=False
        ).last_hidden_state
        head: Any = self.get_output_embeddings()
        logits: Tensor = head(states.flatten(0, 1)[nodes])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        distribution = (logits / temperature).log_softmax(-1)
        scores = distribution[places, targets]
        fixed = distribution.detach()

        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(mask.shape).masked_scatter(mask, values)

        return FusedCausalLMOutput(
            loss=-scores.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch),
            log_probs=padded(scores),
            entropy=padded(-(fixed.exp() * fixed).sum(-1)[places]),
            is_top1=padded(fixed.argmax(-1)[places] == targets),
            label_mask=mask,
        )

    model.forward = types.MethodType(forward, model)


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
