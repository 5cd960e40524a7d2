"""Log-probabilities of tokens under a dense Qwen3 or Llama, forward and backward, for training on a CPU.

A small model spends its training on a CPU less in products of matrices than around them. So here a layer is one step of
autograd with its derivative written out; activations lie features first, (features, nodes), since products of that
shape are the fastest forward and backward; nodes of all rows lie one behind another without padding, what rows begin
with is computed once (`captrain.models.forest`), and behind the last attention only the nodes that predict a scored
token go on. LoRA pairs are added to their weights once a pass.

Weights are taken from the modules, PEFT's among them, and gradients arrive at their parameters. The arithmetic is in
the type of the weights; of bfloat16 are weights and their products alone, the rest is then in float32.

Behind the barrier (`captrain.models.barrier`) all is in float64, and weights in float64 are not enough for what the
modules compute: transformers takes norms and positions to float32, whatever the weights are in, and in float32 the
noise of different CPUs is as coarse as the barrier's grid (`to_float64`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from captrain.errors import UserError
from captrain.models.forest import Forest, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNSEEN = float("-inf")


class Scores(NamedTuple):
    """Of scored tokens, (scored,) each: log-probabilities, which have gradients; the entropy of the distribution that
    each is from, and whether it is its likeliest token, which have none."""

    log_probs: Tensor
    entropies: Tensor
    is_top1: Tensor


class Context(Protocol):
    """The context of an autograd function (`torch.autograd.Function`), of which torch says no types."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for `backward`."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Say which outputs have no gradient."""


class _Shape(NamedTuple):
    """Sizes of attention that all layers share, and the nodes of a pass."""

    heads: int
    groups: int
    width: int
    eps: float
    cosine: Tensor
    sine: Tensor
    trunk: int
    trees: Sequence[Tree]


def token_scores(model: nn.Module, forest: Forest, temperature: float = 1.0) -> Scores:
    """Score the forest's scored tokens.

    Args:
        model: a Qwen3ForCausalLM or LlamaForCausalLM (`captrain.models.DENSE`), its linear layers PEFT's or plain.
        forest: rows as trees.
        temperature: logits are divided by it.
    """
    body: Any = model.get_submodule("model")
    config: Any = model.config
    embed = body.embed_tokens.weight
    shape = _shape(config, forest, torch.promote_types(embed.dtype, torch.float32))
    x = torch.embedding(embed, forest.ids).to(shape.cosine.dtype).t().contiguous()
    for number, layer in enumerate(body.layers):
        last = number == len(body.layers) - 1
        arguments = (x, shape, forest.sources if last else None, *_layer_weights(layer, config.model_type == "qwen3"))
        if getattr(body, "gradient_checkpointing", False) and torch.is_grad_enabled():
            x = checkpoint(_Layer.apply, *arguments, use_reentrant=False)
        else:
            x = _Layer.apply(*arguments)
    assert isinstance(x, Tensor)
    x = _Norm.apply(x, body.norm.weight, config.rms_norm_eps)
    logits = _times(_weight(model.get_submodule("lm_head")), x).t()
    return score_states(logits, forest.targets, temperature, forest.places)


def score_states(logits: Tensor, targets: Tensor, temperature: float, places: Tensor | None = None) -> Scores:
    """Score tokens under the distributions of logits.

    Args:
        logits: (predictions, vocabulary).
        targets: (scored,), token ids.
        temperature: logits are divided by it.
        places: (scored,), the prediction that each is read from; None: each from its own.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    distribution = (logits / temperature).log_softmax(-1)
    fixed = distribution.detach()
    places = torch.arange(len(targets)) if places is None else places
    return Scores(
        distribution[places, targets],
        -(fixed.exp() * fixed).sum(-1)[places],
        fixed.argmax(-1)[places] == targets,
    )


def _shape(config: Any, forest: Forest, dtype: torch.dtype) -> _Shape:
    width = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(frequency, forest.positions.double())
    return _Shape(
        config.num_attention_heads,
        config.num_key_value_heads,
        width,
        config.rms_norm_eps,
        angle.cos().to(dtype),
        angle.sin().to(dtype),
        forest.trunk,
        forest.trees,
    )


def _layer_weights(layer: Any, normed: bool) -> tuple[Tensor | None, ...]:
    attention, feedforward = layer.self_attn, layer.mlp
    norms = torch.stack([attention.q_norm.weight, attention.k_norm.weight]) if normed else None
    return (
        layer.input_layernorm.weight,
        torch.cat([_weight(attention.q_proj), _weight(attention.k_proj), _weight(attention.v_proj)]),
        norms,
        _weight(attention.o_proj),
        layer.post_attention_layernorm.weight,
        torch.cat([_weight(feedforward.gate_proj), _weight(feedforward.up_proj)]),
        _weight(feedforward.down_proj),
    )


def _weight(module: Any) -> Tensor:
    """The weight of a linear layer, (outputs, inputs), with the active adapter of PEFT added."""
    if not hasattr(module, "base_layer"):
        return module.weight
    weight = module.base_layer.weight
    for name in () if module.disable_adapters else module.active_adapters:
        change = module.lora_B[name].weight @ module.lora_A[name].weight
        weight = weight + (module.scaling[name] * change).to(weight.dtype)
    return weight


def _times(weight: Tensor, x: Tensor) -> Tensor:
    """Their product in the type of the weight, returned in that of x."""
    return weight @ x if weight.dtype == x.dtype else (weight @ x.to(weight.dtype)).to(x.dtype)


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., features, nodes) with a mean square of 1 over its features, and the factors (..., 1, nodes)."""
    factor = torch.linalg.vecdot(x, x, dim=-2).div_(x.shape[-2]).add_(eps).rsqrt_().unsqueeze(-2)
    return x * factor, factor


def _norm_back(gradient: Tensor, normed: Tensor, factor: Tensor) -> Tensor:
    """The gradient before `_normed`, in the place of that behind it."""
    along = torch.linalg.vecdot(gradient, normed, dim=-2).div_(normed.shape[-2]).unsqueeze(-2)
    return gradient.addcmul_(normed, along, value=-1).mul_(factor)


class _Norm(torch.autograd.Function):
    """RMSNorm over the features of x (features, nodes)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        normed, factor = _normed(x, eps)
        ctx.save_for_backward(normed, factor, scale)
        return normed * scale[:, None]

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normed, factor, scale = ctx.saved_tensors
        [gradient] = gradients
        to_scale = torch.linalg.vecdot(gradient, normed).to(scale.dtype) if ctx.needs_input_grad[1] else None
        return _norm_back(gradient * scale[:, None], normed, factor), to_scale, None


class _LayerContext(Context, Protocol):
    """The same, with what `_Layer` keeps beside tensors."""

    shape: _Shape
    shares: list[Tensor]
    sources: Tensor | None


class _Layer(torch.autograd.Function):
    """A decoder layer: x (hidden, nodes) to (hidden, nodes), or to the nodes at `sources` alone.

    Weights: `scale_1` (hidden,), `qkv` (heads + 2 groups, each of width, hidden), `scales` of queries and keys
    (2, width) or None, `out`, `scale_2`, `gate_up` (2 x inner, hidden), `down` (hidden, inner).
    """

    @staticmethod
    def forward(
        ctx: _LayerContext,
        x: Tensor,
        shape: _Shape,
        sources: Tensor | None,
        scale_1: Tensor,
        qkv: Tensor,
        scales: Tensor | None,
        out: Tensor,
        scale_2: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        rotated = (shape.heads + shape.groups) * shape.width
        normed_1, factor_1 = _normed(x, shape.eps)
        projected = _times(qkv, normed_1 * scale_1[:, None])
        heads = projected[:rotated].view(-1, shape.width, x.shape[1])
        normed_heads, factor_heads = None, None
        if scales is not None:
            normed_heads, factor_heads = _normed(heads, shape.eps)
            heads = normed_heads * _per_head(scales, shape)
        heads = _rotate(heads, shape.cosine, shape.sine)
        values = projected[rotated:].view(shape.groups, shape.width, -1)
        mixed, shares = _attend(heads[: shape.heads], heads[shape.heads :], values, shape)
        behind, x = (mixed, x) if sources is None else (mixed[:, sources], x[:, sources])
        x = x + _times(out, behind)
        normed_2, factor_2 = _normed(x, shape.eps)
        gate, up = _times(gate_up, normed_2 * scale_2[:, None]).chunk(2)
        open_ = gate.sigmoid()
        gated = gate.mul_(open_)
        active = gated * up
        ctx.shape, ctx.shares, ctx.sources = shape, shares, sources
        ctx.save_for_backward(
            *(normed_1, factor_1, normed_heads, factor_heads, heads, values, behind, normed_2, factor_2),
            *(open_, gated, up, active, scale_1, qkv, scales, out, scale_2, gate_up, down),
        )
        return x.add_(_times(down, active))

    @staticmethod
    def backward(ctx: _LayerContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = (
            ctx.saved_tensors
        )  # once: gradient checkpointing computes them anew for each time that they are asked for
        normed_1, factor_1, normed_heads, factor_heads, heads, values, behind, normed_2, factor_2 = saved[:9]
        open_, gated, up, active, scale_1, qkv, scales, out, scale_2, gate_up, down = saved[9:]
        shape, sources = ctx.shape, ctx.sources
        names = ("scale_1", "qkv", "scales", "out", "scale_2", "gate_up", "down")
        needs = dict(zip(names, ctx.needs_input_grad[3:], strict=True))
        [gradient] = gradients
        to: dict[str, Tensor | None] = dict.fromkeys(needs)
        if needs["down"]:
            to["down"] = _outer(gradient, active, down)
        to_active = _times(down.t(), gradient)
        to_gate_up = torch.empty((2 * len(active), active.shape[1]), dtype=active.dtype)
        to_gate, to_up = to_gate_up.chunk(2)
        torch.mul(to_active, gated, out=to_up)
        # Of silu: open + gated * (1 - open).
        torch.mul(to_active.mul_(up), (open_ + gated).addcmul_(gated, open_, value=-1), out=to_gate)
        if needs["gate_up"]:
            to["gate_up"] = _outer(to_gate_up, normed_2 * scale_2[:, None], gate_up)
        to_normed = _times(gate_up.t(), to_gate_up)
        if needs["scale_2"]:
            to["scale_2"] = torch.linalg.vecdot(to_normed, normed_2).to(scale_2.dtype)
        gradient = gradient + _norm_back(to_normed.mul_(scale_2[:, None]), normed_2, factor_2)
        if needs["out"]:
            to["out"] = _outer(gradient, behind, out)
        to_mixed = _times(out.t(), gradient)
        if sources is not None:
            size = heads.shape[-1]
            to_mixed = to_mixed.new_zeros((len(to_mixed), size)).index_copy_(1, sources, to_mixed)
            gradient = gradient.new_zeros((len(gradient), size)).index_copy_(1, sources, gradient)
        to_heads, to_values = _attend_back(to_mixed, ctx.shares, heads, values, shape)
        to_heads = _rotate(to_heads, shape.cosine, -shape.sine)
        if scales is not None:
            if needs["scales"]:
                dots = torch.linalg.vecdot(to_heads, normed_heads)
                to["scales"] = torch.stack([dots[: shape.heads].sum(0), dots[shape.heads :].sum(0)]).to(scales.dtype)
            to_heads = _norm_back(to_heads.mul_(_per_head(scales, shape)), normed_heads, factor_heads)
        to_projected = torch.cat([to_heads.flatten(0, 1), to_values.flatten(0, 1)])
        if needs["qkv"]:
            to["qkv"] = _outer(to_projected, normed_1 * scale_1[:, None], qkv)
        to_normed = _times(qkv.t(), to_projected)
        if needs["scale_1"]:
            to["scale_1"] = torch.linalg.vecdot(to_normed, normed_1).to(scale_1.dtype)
        gradient = gradient + _norm_back(to_normed.mul_(scale_1[:, None]), normed_1, factor_1)
        return (gradient, None, None, *to.values())


def _outer(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a weight, in its type."""
    return (gradient.to(weight.dtype) @ x.to(weight.dtype).t()) if weight.dtype != x.dtype else gradient @ x.t()


def _per_head(scales: Tensor, shape: _Shape) -> Tensor:
    """(heads + groups, width, 1)."""
    return scales.repeat_interleave(torch.tensor([shape.heads, shape.groups]), 0)[:, :, None]


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions of heads (heads, width, nodes)."""
    first, second = x.chunk(2, 1)
    rotated = torch.empty_like(x)
    upper, lower = rotated.chunk(2, 1)
    torch.mul(first, cosine, out=upper).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=lower).addcmul_(first, sine)
    return rotated


def _parts(shape: _Shape) -> list[Tree]:
    """The trunk, if there is one, and the trees."""
    return [*([Tree(0, shape.trunk, None)] if shape.trunk else []), *shape.trees]


def _seen(x: Tensor, tree: Tree, trunk: int) -> Tensor:
    """What the nodes of a tree may attend to, of x (..., nodes): the trunk and the tree."""
    nodes = x[..., tree.start : tree.stop]
    return torch.cat([x[..., :trunk], nodes], -1) if tree.start and trunk else nodes


def _rows(x: Tensor, tree: Tree, groups: int) -> Tensor:
    """The nodes of a tree, of x (heads, width, nodes), as rows (groups, heads of a group x own, width)."""
    nodes = x[..., tree.start : tree.stop]
    return nodes.unflatten(0, (groups, -1)).transpose(2, 3).flatten(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, shape: _Shape) -> tuple[Tensor, list[Tensor]]:
    """Let each tree attend to the trunk and itself.

    Returns:
        Mixed values (heads x width, nodes), and of each part the shares (groups, heads of a group x own, seen).
    """
    mixed, shares = torch.empty_like(queries), []
    for tree in _parts(shape):
        size = tree.stop - tree.start
        scores = torch.bmm(_rows(queries, tree, shape.groups), _seen(keys, tree, shape.trunk))
        hidden = torch.ones((size, size), dtype=torch.bool).triu_(1) if tree.attention is None else ~tree.attention
        scores.unflatten(1, (-1, size))[..., -size:].masked_fill_(hidden, UNSEEN)
        share = scores.mul_(shape.width**-0.5).softmax(-1)
        result = torch.bmm(_seen(values, tree, shape.trunk), share.transpose(1, 2))
        mixed[..., tree.start : tree.stop] = result.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
        shares.append(share)
    return mixed.flatten(0, 1), shares


def _attend_back(
    gradient: Tensor, shares: Sequence[Tensor], heads: Tensor, values: Tensor, shape: _Shape
) -> tuple[Tensor, Tensor]:
    """The gradients of heads (queries and keys) and of values, from that of what `_attend` mixes."""
    gradient = gradient.unflatten(0, (shape.heads, shape.width))
    queries, keys = heads[: shape.heads], heads[shape.heads :]
    to_heads, to_values = torch.empty_like(heads), torch.empty_like(values)
    to_queries, to_keys = to_heads[: shape.heads], to_heads[shape.heads :]
    for target in (to_keys, to_values):
        target[..., : shape.trunk] = 0
    for tree, share in zip(_parts(shape), shares, strict=True):
        size = tree.stop - tree.start
        behind = _rows(gradient, tree, shape.groups)
        to_share = torch.bmm(behind, _seen(values, tree, shape.trunk))
        to_scores = torch.ops.aten._softmax_backward_data(to_share, share, -1, share.dtype).mul_(shape.width**-0.5)
        result = torch.bmm(_seen(keys, tree, shape.trunk), to_scores.transpose(1, 2))
        to_queries[..., tree.start : tree.stop] = result.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
        for target, part in (
            (to_keys, torch.bmm(_rows(queries, tree, shape.groups).transpose(1, 2), to_scores)),
            (to_values, torch.bmm(behind.transpose(1, 2), share)),
        ):
            if tree.start < shape.trunk:
                target[..., : shape.trunk] += part
            else:
                target[..., tree.start : tree.stop] = part[..., -size:]
                target[..., : shape.trunk] += part[..., :-size]
    return to_heads, to_values


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
