"""Fast training on a CPU: log-probabilities of tokens under a dense Qwen3 or Llama, forward and backward.

On a CPU, a small model spends more time on overhead than on matrix products. This module reduces the overhead:

- Each layer is one autograd function with a handwritten derivative.
- Activations have the shape (features, nodes), which multiplies fastest in both directions.
- The nodes (tokens) of all rows are concatenated without padding. Common prefixes of rows are computed once
  (`captrain.models.forest`).
- In the last layer, queries are computed only for nodes that predict a scored token.
- Once per pass, LoRA pairs are added to their weights, and the scale of each norm is multiplied into the next weight.

The weights are read from the model's modules, including PEFT's adapters. Gradients flow back to the parameters of these
modules. All arithmetic has the type of the weights, except for bfloat16: there only the weights and their products are
bfloat16, and the rest is float32.

Behind the barrier (`captrain.models.barrier`) everything must be float64. float64 weights are not enough for that:
transformers computes norms and positions in float32, whose noise between CPUs is as coarse as the barrier's grid.
`to_float64` replaces these modules.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from captrain.errors import UserError
from captrain.models.forest import Forest, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Context: TypeAlias = Any
"""Context of an autograd function, which torch leaves untyped."""
Part: TypeAlias = Any
"""Configuration, module or linear layer of a model; PEFT's linear layers have a `base_layer` and pairs."""


class Scores(NamedTuple):
    """Scores of the scored tokens, (scored,) each: log-probabilities, entropies of their distributions, and whether a
    token is the likeliest. Only log-probabilities have gradients."""

    log_probs: Tensor
    entropies: Tensor
    is_top1: Tensor


class _Block(NamedTuple):
    """A block of attention: queries `first` to `last` attend to the trunk and to nodes `start` to `stop` of one tree.

    hidden: (queries, nodes), true where a query must not attend to a node of the tree.
    """

    first: int
    last: int
    start: int
    stop: int
    hidden: Tensor


class _Shape(NamedTuple):
    """Sizes of attention that all layers share, and the nodes of a pass.

    angles: cosine and sine of the positions of queries, and of keys, (width / 2, nodes) each.
    sources: the nodes with queries, (queries,); None: all.
    blocks: of queries, tree by tree.
    """

    heads: int
    groups: int
    width: int
    eps: float
    angles: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    trunk: int
    sources: Tensor | None
    blocks: Sequence[_Block]


def token_scores(
    model: nn.Module,
    forest: Forest,
    temperature: float = 1.0,
    products: torch.dtype | None = None,
    room: int | None = None,
) -> Scores:
    """Score the forest's scored tokens.

    Args:
        model: a Qwen3ForCausalLM or LlamaForCausalLM (`captrain.models.DENSE`), with or without PEFT's LoRA layers.
        forest: rows as trees.
        temperature: logits are divided by it.
        products: type of the matrix products; None: the type of the weights.
        room: bytes for activations. Layers that do not fit are recomputed in the backward pass, with the same result.
            None: keep all activations, unless the model has gradient checkpointing.
    """
    body: Part = model.get_submodule("model")
    config: Part = model.config
    embed, layers, width = body.embed_tokens.weight, body.layers, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    dtype = torch.promote_types(embed.dtype, torch.float32)
    # Positions and attention; in the last layer, only nodes that predict a scored token have queries.
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(frequency, forest.positions.double())
    keys = angle.cos().to(dtype), angle.sin().to(dtype)
    blocks = _blocks(forest, torch.arange(len(forest.ids)))
    whole = _Shape(heads, groups, width, config.rms_norm_eps, (keys, keys), forest.trunk, None, blocks)
    queries = keys[0][..., forest.sources], keys[1][..., forest.sources]
    last = whole._replace(angles=(queries, keys), sources=forest.sources, blocks=_blocks(forest, forest.sources))
    # Recompute as many of the first layers as do not fit into `room`.
    again = 0
    if room is not None:
        features = 3 * config.hidden_size + (3 * heads + 4 * groups) * width + 4 * config.intermediate_size
        pairs = sum((b.last - b.first) * (b.stop - b.start + (forest.trunk if b.start else 0)) for b in blocks)
        size = keys[0].element_size() * (features * len(forest.ids) + heads * pairs)
        again = max(0, len(layers) - room // size)
    if getattr(body, "gradient_checkpointing", False):
        again = len(layers)
    x = torch.embedding(embed, forest.ids).to(dtype).t().contiguous()
    for number, layer in enumerate(layers):
        shape = last if number == len(layers) - 1 else whole
        arguments = (x, shape, *_layer_weights(layer, config.model_type == "qwen3", products))
        if number < again and torch.is_grad_enabled():
            x = checkpoint(_Layer.apply, *arguments, use_reentrant=False)
        else:
            x = _Layer.apply(*arguments)
    assert isinstance(x, Tensor)
    x = _Norm.apply(x, config.rms_norm_eps)
    head = _weight(model.get_submodule("lm_head")) * body.norm.weight
    logits = _times(head.to(products or head.dtype), x).t()
    return score_states(logits, forest.targets, temperature, forest.source_indices)


def score_states(logits: Tensor, targets: Tensor, temperature: float, predicted_at: Tensor | None = None) -> Scores:
    """Score tokens under the distributions of logits.

    Args:
        logits: (predictions, vocabulary).
        targets: (scored,), token ids.
        temperature: logits are divided by it.
        predicted_at: (scored,), index of the prediction of each token; None: prediction i belongs to token i.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    distribution = (logits / temperature).log_softmax(-1)
    fixed = distribution.detach()
    indices = torch.arange(len(targets)) if predicted_at is None else predicted_at
    return Scores(
        distribution[indices, targets],
        -(fixed.exp() * fixed).sum(-1)[indices],
        fixed.argmax(-1)[indices] == targets,
    )


def _blocks(forest: Forest, queries: Tensor) -> list[_Block]:
    """Divide queries, in ascending order, into blocks: one for the trunk and one for each tree."""
    blocks = list[_Block]()
    for tree in [*([Tree(0, forest.trunk, None)] if forest.trunk else []), *forest.trees]:
        size = tree.stop - tree.start
        first, last = torch.searchsorted(queries, torch.tensor([tree.start, tree.stop])).tolist()
        hidden = torch.ones((size, size), dtype=torch.bool).triu_(1) if tree.attention is None else ~tree.attention
        if first < last:
            blocks.append(_Block(first, last, tree.start, tree.stop, hidden[queries[first:last] - tree.start]))
    return blocks


def _layer_weights(layer: Part, normed: bool, products: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """Return the arguments of `_Layer`: the layer's fused weights, then `up` and `down` of each weight's LoRA pair."""
    attention, feedforward = layer.self_attn, layer.mlp
    norms = torch.stack([attention.q_norm.weight, attention.k_norm.weight]) if normed else None
    scale_1, scale_2 = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    parts: list[tuple[list[Part], Tensor | None]] = [
        ([attention.q_proj], scale_1),
        ([attention.k_proj, attention.v_proj], scale_1),
        ([attention.o_proj], None),
        ([feedforward.gate_proj, feedforward.up_proj], scale_2),
        ([feedforward.down_proj], None),
    ]
    pairs = [pair for modules, scale in parts for pair in _pair(modules, scale)]
    weights = list[Tensor]()
    # LoRA pairs do not need the gradient of the whole weight, which would cost as much as another matrix product.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not any(pair is not None for pair in pairs)):
        for modules, scale in parts:
            weight = torch.cat([_weight(module) for module in modules]) if len(modules) > 1 else _weight(modules[0])
            weight = weight if scale is None else weight * scale
            weights.append(weight.to(products or weight.dtype))
    query, key_value, out, gate_up, down = weights
    return (query, key_value, norms, out, gate_up, down, *pairs)


def _pair(modules: Sequence[Part], scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Combine the LoRA pairs of linear layers whose weights are stacked.

    Returns:
        `up` (outputs, sum of ranks) and `down` (sum of ranks, inputs). (None, None) if there are no pairs, or if the
        weights themselves are trained.
    """
    weights = [getattr(module, "base_layer", module).weight for module in modules]
    if any(weight.requires_grad for weight in weights):
        return None, None
    ups, downs = list[Tensor](), list[Tensor]()
    for module, weight in zip(modules, weights, strict=True):
        paired = hasattr(module, "base_layer") and not module.disable_adapters
        names = module.active_adapters if paired else ()
        downs += [module.lora_A[name].weight for name in names]
        parts = [module.scaling[name] * module.lora_B[name].weight for name in names]
        ups.append(torch.cat(parts, 1) if parts else weight.new_zeros((len(weight), 0)))
    if not downs:
        return None, None
    down = torch.cat(downs)
    return torch.block_diag(*ups), down if scale is None else down * scale


def _weight(module: Part) -> Tensor:
    """Return the weight of a linear layer, (outputs, inputs), with PEFT's active adapters added."""
    if not hasattr(module, "base_layer"):
        return module.weight
    weight = module.base_layer.weight
    if module.disable_adapters:
        return weight
    for name in module.active_adapters:
        change = module.lora_B[name].weight @ module.lora_A[name].weight
        weight = weight + (module.scaling[name] * change).to(weight.dtype)
    return weight


def _times(weight: Tensor, x: Tensor) -> Tensor:
    """Multiply in the type of the weight; return the product in the type of x."""
    return (weight @ x.to(weight.dtype)).to(x.dtype)


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Scale x (..., features, nodes) to a mean square of 1 over the features.

    Returns:
        The scaled x, and the scale factors (..., 1, nodes).
    """
    factor = torch.linalg.vecdot(x, x, dim=-2).div_(x.shape[-2]).add_(eps).rsqrt_().unsqueeze(-2)
    return x * factor, factor


def _norm_back(gradient: Tensor, normed: Tensor, factor: Tensor) -> Tensor:
    """Backpropagate through `_normed`; the gradient keeps its shape."""
    along = torch.linalg.vecdot(gradient, normed, dim=-2).div_(normed.shape[-2]).unsqueeze(-2)
    return gradient.addcmul_(normed, along, value=-1).mul_(factor)


class _Norm(torch.autograd.Function):
    """RMSNorm without a scale, over the features of x (features, nodes)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, eps: float) -> Tensor:
        normed, factor = _normed(x, eps)
        ctx.save_for_backward(normed, factor)
        return normed

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        return _norm_back(gradient.clone(), *ctx.saved_tensors), None


class _Layer(torch.autograd.Function):
    """A decoder layer: from x (hidden, nodes) to (hidden, nodes), or to the nodes at `sources` alone.

    Weights: `query` (heads x width, hidden), `key_value` (2 x groups x width, hidden), `scales` of queries and keys
    (2, width) or None, `out`, `gate_up` (2 x inner, hidden), `down` (hidden, inner). Pairs: `up` and `down` of each
    weight, or None (see `_pair`).
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        shape: _Shape,
        query: Tensor,
        key_value: Tensor,
        scales: Tensor | None,
        out: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *pairs: Tensor | None,
    ) -> Tensor:
        normed_1, factor_1 = _normed(x, shape.eps)
        query_inputs = normed_1
        if shape.sources is not None:
            x, query_inputs = x[..., shape.sources], normed_1[..., shape.sources]
        keys, values = _times(key_value, normed_1).view(2, shape.groups, shape.width, -1)
        queries = _times(query, query_inputs).view(shape.heads, shape.width, -1)
        queries, *kept_queries = _placed(queries, scales, 0, shape)
        keys, *kept_keys = _placed(keys, scales, 1, shape)
        mixed, shares = _attend(queries, keys, values, shape)
        x = x + _times(out, mixed)
        normed_2, factor_2 = _normed(x, shape.eps)
        gate, up = _times(gate_up, normed_2).chunk(2)
        open_ = gate.sigmoid()
        gated = gate.mul_(open_)
        active = gated * up
        ctx.shape = shape
        # Save the attention shares as well: checkpointing drops only saved tensors.
        ctx.save_for_backward(
            *(normed_1, factor_1, query_inputs, queries, keys, values, mixed, normed_2, factor_2),
            *(open_, gated, up, active, query, key_value, scales, out, gate_up, down),
            *(*kept_queries, *kept_keys),
            *pairs,
            *shares,
        )
        return x.add_(_times(down, active))

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Read only once: with gradient checkpointing, each read recomputes the tensors.
        saved = ctx.saved_tensors
        normed_1, factor_1, query_inputs, queries, keys, values, mixed, normed_2, factor_2 = saved[:9]
        open_, gated, up, active, query, key_value, scales, out, gate_up, down = saved[9:19]
        shape, sources = ctx.shape, ctx.shape.sources
        names: list[str] = ["query", "key_value", "scales", "out", "gate_up", "down"]
        needs = dict(zip(names, ctx.needs_input_grad[2:8], strict=True))
        pairs = dict(
            zip((n for n in names if n != "scales"), zip(saved[23:33:2], saved[24:33:2], strict=True), strict=True)
        )
        [gradient] = gradients
        to: dict[str, Tensor | None] = dict.fromkeys(needs)
        to_pairs: dict[str, tuple[Tensor | None, Tensor | None]] = dict.fromkeys(pairs, (None, None))

        def learn(name: str, behind: Tensor, inputs: Tensor, weight: Tensor) -> None:
            up, lower = pairs[name]
            if needs[name]:
                to[name] = behind.to(weight.dtype) @ inputs.to(weight.dtype).t()
            elif up is not None and lower is not None:
                to_pairs[name] = behind @ (lower @ inputs).t(), (up.t() @ behind) @ inputs.t()

        learn("down", gradient, active, down)
        to_active = _times(down.t(), gradient)
        to_gate_up = torch.empty((2 * len(active), active.shape[1]), dtype=active.dtype)
        to_gate, to_up = to_gate_up.chunk(2)
        torch.mul(to_active, gated, out=to_up)
        # Derivative of silu: open + gated * (1 - open).
        torch.mul(to_active.mul_(up), (open_ + gated).addcmul_(gated, open_, value=-1), out=to_gate)
        learn("gate_up", to_gate_up, normed_2, gate_up)
        gradient = gradient + _norm_back(_times(gate_up.t(), to_gate_up), normed_2, factor_2)
        learn("out", gradient, mixed, out)
        to_queries, to_keys, to_values = _attend_back(
            _times(out.t(), gradient), saved[33:], queries, keys, values, shape
        )
        to_queries, to_first = _placed_back(to_queries, scales, 0, shape, *saved[19:21])
        to_keys, to_second = _placed_back(to_keys, scales, 1, shape, *saved[21:23])
        if needs["scales"] and to_first is not None and to_second is not None:
            to["scales"] = torch.stack([to_first, to_second])
        to_queries, to_key_value = to_queries.flatten(0, 1), torch.cat([to_keys, to_values]).flatten(0, 1)
        learn("query", to_queries, query_inputs, query)
        learn("key_value", to_key_value, normed_1, key_value)
        to_normed, to_asking = _times(key_value.t(), to_key_value), _times(query.t(), to_queries)
        pair_gradients = [part for pair in to_pairs.values() for part in pair]
        if sources is None:
            to_normed += to_asking
            return (_norm_back(to_normed, normed_1, factor_1).add_(gradient), None, *to.values(), *pair_gradients)
        to_x = _norm_back(to_normed.index_add_(1, sources, to_asking), normed_1, factor_1)
        return (to_x.index_add_(1, sources, gradient), None, *to.values(), *pair_gradients)


def _placed(
    heads: Tensor, scales: Tensor | None, kind: int, shape: _Shape
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Apply the model's norm, if it has one, and the rotary positions to queries (kind 0) or keys (kind 1).

    Returns:
        The result (heads, width, nodes); the normed heads and the scale factors for the backward pass, or None.
    """
    normed, factor = None, None
    if scales is not None:
        normed, factor = _normed(heads, shape.eps)
        heads = normed * scales[kind][:, None]
    return _rotate(heads, *shape.angles[kind]), normed, factor


def _placed_back(
    gradient: Tensor, scales: Tensor | None, kind: int, shape: _Shape, normed: Tensor | None, factor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Backpropagate through `_placed`. Return the gradients of the heads and of the norm's scale (width,)."""
    cosine, sine = shape.angles[kind]
    gradient = _rotate(gradient, cosine, -sine)
    if scales is None or normed is None or factor is None:
        return gradient, None
    to_scale = torch.linalg.vecdot(gradient, normed).sum(0).to(scales.dtype)
    return _norm_back(gradient.mul_(scales[kind][:, None]), normed, factor), to_scale


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate heads (heads, width, nodes) by their positions."""
    first, second = x.chunk(2, 1)
    rotated = torch.empty_like(x)
    upper, lower = rotated.chunk(2, 1)
    torch.mul(first, cosine, out=upper).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=lower).addcmul_(first, sine)
    return rotated


def _seen(x: Tensor, block: _Block, trunk: int) -> Tensor:
    """Select the nodes of x (..., nodes) that the queries of a block attend to: the trunk and the tree."""
    nodes = x[..., block.start : block.stop]
    return torch.cat([x[..., :trunk], nodes], -1) if block.start and trunk else nodes


def _rows(x: Tensor, block: _Block, groups: int) -> Tensor:
    """Reshape a block's queries in x (heads, width, queries) to rows (groups, heads of a group x queries, width)."""
    return x[..., block.first : block.last].unflatten(0, (groups, -1)).transpose(2, 3).flatten(1, 2)


def _columns(rows: Tensor, block: _Block) -> Tensor:
    """Undo `_rows`: reshape (groups, width, rows) to (heads, width, queries)."""
    return rows.unflatten(2, (-1, block.last - block.first)).transpose(1, 2).flatten(0, 1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, shape: _Shape) -> tuple[Tensor, list[Tensor]]:
    """Let the queries of each block attend to the trunk and their tree.

    Returns:
        Mixed values (heads x width, queries), and each block's shares (groups, heads of a group x queries, seen).
    """
    mixed, shares = torch.empty_like(queries), []
    for block in shape.blocks:
        scores = torch.bmm(_rows(queries, block, shape.groups), _seen(keys, block, shape.trunk))
        own_scores = scores.unflatten(1, (-1, block.last - block.first))[..., block.start - block.stop :]
        own_scores.masked_fill_(block.hidden, float("-inf"))
        share = scores.mul_(shape.width**-0.5).softmax(-1)
        result = torch.bmm(_seen(values, block, shape.trunk), share.transpose(1, 2))
        mixed[..., block.first : block.last] = _columns(result, block)
        shares.append(share)
    return mixed.flatten(0, 1), shares


def _attend_back(
    gradient: Tensor, shares: Sequence[Tensor], queries: Tensor, keys: Tensor, values: Tensor, shape: _Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Backpropagate through `_attend` to queries, keys and values."""
    gradient = gradient.unflatten(0, (shape.heads, shape.width))
    to_queries, to_keys, to_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for block, share in zip(shape.blocks, shares, strict=True):
        behind = _rows(gradient, block, shape.groups)
        to_share = torch.bmm(behind, _seen(values, block, shape.trunk))
        to_scores = torch.ops.aten._softmax_backward_data(to_share, share, -1, share.dtype).mul_(shape.width**-0.5)
        result = torch.bmm(_seen(keys, block, shape.trunk), to_scores.transpose(1, 2))
        to_queries[..., block.first : block.last] = _columns(result, block)
        for target, part in (
            (to_keys, torch.bmm(_rows(queries, block, shape.groups).transpose(1, 2), to_scores)),
            (to_values, torch.bmm(behind.transpose(1, 2), share)),
        ):
            size = block.stop - block.start
            target[..., block.start : block.stop] += part[..., -size:]
            if block.start and shape.trunk:
                target[..., : shape.trunk] += part[..., :-size]
    return to_queries, to_keys, to_values


class _Rotary(nn.Module):
    """Default rotary positions in the type of the model; transformers computes them in float32."""

    def __init__(self, theta: float, width: int) -> None:
        super().__init__()
        self.frequency = nn.Buffer(theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].to(torch.float64) * self.frequency
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def to_float64(model: "PreTrainedModel") -> None:
    """Make a model compute everything in float64, in place.

    Raises:
        UserError: the model is not a dense Qwen3, the architecture of the embedded base. Other architectures may have
            more float32 parts, which this function does not know.
    """
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

    config: Part = model.config
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
