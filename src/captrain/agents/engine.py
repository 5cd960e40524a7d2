"""Batched multi-turn sampling in this process, for any Hugging Face causal LM.

All live rows (dialogues) advance in lockstep, at the same position. Each step feeds every row its known tokens (prompt,
tool result, or its own last sample). A row without further known tokens samples one. There is no padding, no attention
mask and no second prefill. Rows with equal tokens so far form one branch, which is computed and cached once and splits
where its rows differ. So the common prefix of a group's rollouts costs as much as for a single rollout.

Each row has its own random stream, seeded by its key. Arithmetic is in float64, where differences between batch shapes
or CPUs are near 1e-15. That is too small to change a sampled token, so a rollout does not depend on the rest of the
batch. float32 is faster, without this guarantee.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from captrain.models import Mixture, begins_decision

State = dict[str, torch.Tensor]
BLOCK = 64
"""Number of positions that the KV cache grows by."""
LOGPROB_DIGITS = 6
"""Decimals of recorded log-probabilities. CPUs differ by about 1e-15, so one token in a billion is rounded
differently."""
COMPACT = 0.8
"""The KV cache is compacted when at most this share of its rows is still live."""


class Decoder(Protocol):
    """A causal LM with a KV cache over a batch of rows at equal positions."""

    looks_ahead: bool
    """Whether rows may share a branch only if all their known further tokens are equal. `decide` reads these tokens."""

    def decide(self, row: int, ids: Sequence[int], written: Sequence[int], position: int) -> None:
        """Prepare a row of the cache for the next tokens of its dialogue.

        Called before each forward pass if `looks_ahead`.

        Args:
            row: row of the cache.
            ids: all known tokens of the dialogue.
            written: for each of them, 1 if the model wrote it.
            position: number of tokens that the cache holds.
        """
        ...

    def reset(self) -> None:
        """Empty the cache, with one row."""
        ...

    def forward(self, ids: torch.Tensor, due: Sequence[int]) -> torch.Tensor:
        """Append ids (rows, tokens) to the cache.

        Returns:
            For each row in `due`, the logits after its last token: (due, vocabulary), in float64.
        """
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Make these rows the new rows of the cache, in this order. An index may repeat, which copies the row."""
        ...


class HuggingFaceDecoder:
    """Decoder of any `AutoModelForCausalLM` with its own forward and cache."""

    looks_ahead = False

    def __init__(self, model: Any, dtype: torch.dtype = torch.float64) -> None:
        self.model = model.to(dtype).eval()

    def reset(self) -> None:
        """See `Decoder`."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)

    def forward(self, ids: torch.Tensor, due: Sequence[int]) -> torch.Tensor:
        """See `Decoder`."""
        output = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[list(due), -1].double()

    def keep(self, rows: Sequence[int]) -> None:
        """See `Decoder`."""
        self.cache.batch_select_indices(torch.tensor(rows))

    def decide(self, row: int, ids: Sequence[int], written: Sequence[int], position: int) -> None:
        """See `Decoder`."""


class MixtureDecoder(HuggingFaceDecoder):
    """Decoder of a base with a mixture of adapters (`captrain.models.Mixture`).

    If gates decide once per prompt or turn, a row's decision is made when all its tokens up to the next sampled one are
    known, before the first of these is computed. It is kept until the next decision.
    """

    def __init__(self, model: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(model, dtype)
        self.mixture: Mixture = model.mixture
        self.looks_ahead = self.mixture.parts.decide != "token"

    def reset(self) -> None:
        """See `Decoder`."""
        super().reset()
        self.decisions = torch.zeros(1, len(self.mixture.gates), self.mixture.slots).to(self.model.dtype)

    def decide(self, row: int, ids: Sequence[int], written: Sequence[int], position: int) -> None:
        """See `Decoder`."""
        from transformers.cache_utils import CacheLayerMixin

        parts, cache = self.mixture.parts, None
        if not begins_decision(written, position, parts.decide):
            return
        # A global gate reads the states of the base without adapters. The cache has other states, so start over.
        start = 0 if parts.scope == "global" else position
        if start:
            cache = type(self.cache)(config=self.model.config)
            for index, layer in enumerate(self.cache.layers):
                assert isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None
                cache.update(layer.keys[[row]], layer.values[[row]], index)
        # The dialogue of a request has earlier turns already; its first one decides for the whole dialogue.
        known = written.index(1) if not position and 1 in written else len(ids)
        tokens = torch.tensor([ids[start:known]])
        self.model.base_model(input_ids=tokens, past_key_values=cache, use_cache=cache is not None)
        self.decisions[row] = self.mixture.decisions[0]

    def forward(self, ids: torch.Tensor, due: Sequence[int]) -> torch.Tensor:
        """See `Decoder`."""
        if not self.looks_ahead:
            return super().forward(ids, due)
        with self.mixture.fixed(self.decisions):
            return super().forward(ids, due)

    def keep(self, rows: Sequence[int]) -> None:
        """See `Decoder`."""
        super().keep(rows)
        self.decisions = self.decisions[list(rows)]


class DenseDecoder:
    """Decoder of dense Qwen3 or Llama with fused projections, several times faster than the module on a CPU. Only Qwen3
    normalizes queries and keys.

    Args:
        config: a Qwen3Config or a LlamaConfig.
        state: weights under their Hugging Face names, adapters already merged.
        max_length: longest dialogue in tokens.
        dtype: type of the arithmetic. With bfloat16, only weights and their products are bfloat16, the rest is float32.
    """

    looks_ahead = False

    def __init__(self, config: Any, state: State, max_length: int, dtype: torch.dtype = torch.float64) -> None:
        self.config, self.max_length = config, max_length
        self.heads, self.groups, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.products = dtype
        dtype = torch.promote_types(dtype, torch.float32)
        weights = {name: tensor.detach().to(dtype) for name, tensor in state.items()}
        self.embed = weights["model.embed_tokens.weight"]
        self.head = self._ready(weights.get("lm_head.weight", self.embed) * weights["model.norm.weight"])
        self.layers = [self._fuse(weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        theta = config.rope_parameters["rope_theta"]
        frequency = theta ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        angle = torch.outer(torch.arange(max_length, dtype=torch.float64), frequency)
        self.cos = torch.cat([angle, angle], -1).cos().to(dtype)
        self.sin = torch.cat([-angle, angle], -1).sin().to(dtype)

    @staticmethod
    def names(config: Any) -> list[str]:
        """List the names of the weights that the decoder needs."""
        norms = ("q_norm", "k_norm") if config.model_type == "qwen3" else ()
        attention = (f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", *norms))
        feedforward = (f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        layer = [*attention, *feedforward, "input_layernorm", "post_attention_layernorm"]
        layers = [f"layers.{index}.{name}" for index in range(config.num_hidden_layers) for name in layer]
        head = [] if config.tie_word_embeddings else ["lm_head.weight"]
        return [*(f"model.{name}.weight" for name in ("embed_tokens", "norm", *layers)), *head]

    def _fuse(self, weights: State, prefix: str) -> State:
        """Fold the scale of each norm of a layer into the following projection."""

        def columns(scale: str, *names: str) -> torch.Tensor:
            rows = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
            return self._ready(rows * weights[f"{prefix}{scale}.weight"] if scale else rows)

        norms = {}
        if self.config.model_type == "qwen3":
            scales = [weights[f"{prefix}self_attn.q_norm.weight"]] * self.heads
            scales += [weights[f"{prefix}self_attn.k_norm.weight"]] * self.groups
            norms = {"scale": torch.stack(scales)}
        return norms | {
            "qkv": columns("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": columns("", "self_attn.o_proj"),
            "gate_up": columns("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"),
            "down": columns("", "mlp.down_proj"),
        }

    def _ready(self, weights: torch.Tensor) -> torch.Tensor:
        """Transpose weights and cast them to the type of products."""
        return weights.t().contiguous().to(self.products)

    def _times(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (x.to(self.products) @ weights).to(x.dtype)

    def reset(self) -> None:
        """See `Decoder`."""
        self.cache = self.embed.new_empty((len(self.layers), 2, 1, self.groups, BLOCK, self.width))
        self.rows, self.position = 1, 0

    def keep(self, rows: Sequence[int]) -> None:
        """See `Decoder`."""
        if len(rows) < self.rows:
            self.cache = self.cache[:, :, list(rows)]
        else:
            # Copy only the forks: most rows keep their places.
            places = [place for place, row in enumerate(rows) if place != row]
            copies = self.cache[:, :, [rows[place] for place in places], :, : self.position]
            while self.cache.shape[2] < len(rows):
                self.cache = torch.cat([self.cache, torch.empty_like(self.cache)], 2)
            self.cache[:, :, places, :, : self.position] = copies
        self.rows = len(rows)

    def decide(self, row: int, ids: Sequence[int], written: Sequence[int], position: int) -> None:
        """See `Decoder`."""

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (norm.square() / x.shape[-1] + self.config.rms_norm_eps).rsqrt()

    def forward(self, ids: torch.Tensor, due: Sequence[int]) -> torch.Tensor:
        """See `Decoder`."""
        start, stop = self.position, self.position + ids.shape[1]
        if stop > self.cache.shape[4]:
            grown = -(-stop // BLOCK) * BLOCK - self.cache.shape[4]
            self.cache = torch.cat([self.cache, self.cache.new_empty((*self.cache.shape[:4], grown, self.width))], 4)
        x = self.embed[ids]
        for index, layer in enumerate(self.layers):
            x = x + self._times(self._attention(x, layer, self.cache[index, :, : self.rows], start, stop), layer["out"])
            gate, up = self._times(self._normed(x), layer["gate_up"]).chunk(2, -1)
            x = x + self._times(F.silu(gate) * up, layer["down"])
        self.position = stop
        return self._times(self._normed(x[list(due), -1]), self.head).double()

    def _attention(self, x: torch.Tensor, layer: State, cache: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows, count, _ = x.shape
        rotated, half = self.heads + self.groups, self.width // 2
        projected = self._times(self._normed(x), layer["qkv"]).view(rows, count, rotated + self.groups, self.width)
        position = projected[:, :, :rotated]
        if "scale" in layer:
            position = self._normed(position) * layer["scale"]
        position = position.transpose(1, 2)
        position = position * self.cos[start:stop] + position.roll(half, -1) * self.sin[start:stop]
        cache[0, :, :, start:stop] = position[:, self.heads :]
        cache[1, :, :, start:stop] = projected[:, :, rotated:].transpose(1, 2)
        keys, values = cache[0, :, :, :stop], cache[1, :, :, :stop]
        query = position[:, : self.heads].reshape(rows, self.groups, -1, self.width)
        scores = query @ keys.transpose(-1, -2) * self.width**-0.5
        if count > 1:
            hidden = torch.ones(count, stop, dtype=torch.bool).triu(start + 1)
            scores = scores.masked_fill(hidden.repeat(self.heads // self.groups, 1), float("-inf"))
        mixed = (scores.softmax(-1) @ values).view(rows, self.heads, count, self.width)
        return mixed.transpose(1, 2).reshape(rows, count, self.heads * self.width)


class EngineRow:
    """One dialogue in the engine: its ids so far, which of them the model wrote, and its stream of uniforms.

    Args:
        key: seeds the row's randomness.
        prompt: first ids.
        answer: called with the ids of a turn when it ends. It returns the ids that follow (with the next turn's header,
            and the end token of a turn that was cut off), or [] if the dialogue is over.
        opening: number of first ids before the model's first turn. What follows counts as written by the model. None:
            it has not had a turn.
    """

    def __init__(
        self, key: str, prompt: list[int], answer: Callable[[list[int]], list[int]], opening: int | None = None
    ) -> None:
        before = len(prompt) if opening is None else opening
        self.ids, self.mask = list(prompt), [0] * before + [1] * (len(prompt) - before)
        self.logprobs = [0.0] * len(prompt)
        self.answer = answer
        self.turn: list[int] = []
        self.over = False
        self.abandoned: Callable[[], bool] = lambda: False
        """Returns whether the row is no longer needed. Its sampling then stops at the next token."""
        self.truncated = False
        """Whether the row ended because it reached the longest length."""
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
        self.random = np.random.Generator(np.random.Philox(key=seed))

    @property
    def live(self) -> bool:
        """Whether the row is to be sampled further."""
        return not (self.over or self.abandoned())

    def take(self, token: int, logprob: float, ends: Collection[int], max_tokens: int, max_length: int) -> None:
        """Append a sampled token. If it ends the turn, also append the ids that follow the turn."""
        self.ids.append(token)
        self.mask.append(1)
        self.logprobs.append(logprob)
        self.turn.append(token)
        if token not in ends and len(self.turn) < max_tokens:
            self.over = self.truncated = len(self.ids) >= max_length
            return
        follows = self.answer(self.turn)
        self.turn = []
        self.truncated = bool(follows) and len(self.ids) + len(follows) >= max_length
        self.over = not follows or self.truncated
        if not self.over:
            self.ids += follows
            self.mask += [0] * len(follows)
            self.logprobs += [0.0] * len(follows)


@torch.inference_mode()
def sample_rows(
    decoder: Decoder,
    rows: Sequence[EngineRow],
    *,
    ends: Collection[int],
    temperature: float,
    max_tokens: int,
    max_length: int,
    top_p: float | None = None,
    top_k: int | None = None,
) -> None:
    """Sample all rows until their dialogues end.

    Args:
        decoder: the model. Its cache is reset.
        rows: dialogues. They are changed in place.
        ends: ids of the tokens that end a turn.
        temperature: 0 is greedy.
        max_tokens: longest turn.
        max_length: longest dialogue.
        top_p: sample from the likeliest tokens with this total probability; None: all tokens.
        top_k: sample from this many of the likeliest tokens; None: all tokens.
    """
    decoder.reset()
    # Row i of the cache is branch i: all live rows with the same tokens up to `position`. An empty branch is finished.
    branches, position = [[row for row in rows if row.live]], 0
    while any(branches):
        reach = min(len(row.ids) for branch in branches for row in branch)
        branches = _forked(decoder, branches, position, None if decoder.looks_ahead else reach)
        if decoder.looks_ahead:
            for index, branch in enumerate(branches):
                if branch:
                    decoder.decide(index, branch[0].ids, branch[0].mask, position)
        # A finished branch is fed zeros until enough are finished to compact the cache.
        idle = [0] * (reach - position)
        fed = [branch[0].ids[position:reach] if branch else idle for branch in branches]
        position = reach
        due = [(index, row) for index, branch in enumerate(branches) for row in branch if len(row.ids) == position]
        numbers = {index: number for number, index in enumerate(dict.fromkeys(index for index, _ in due))}
        logits = decoder.forward(torch.tensor(fed), [*numbers])
        uniforms = torch.tensor([[row.random.random()] for _, row in due], dtype=torch.float64)
        tokens, logprobs = sample(logits, uniforms, temperature, [numbers[index] for index, _ in due], top_p, top_k)
        for (_, row), token, logprob in zip(due, tokens, logprobs, strict=True):
            row.take(token, logprob, ends, max_tokens, max_length)
        branches = [[row for row in branch if row.live] for branch in branches]
        alive = [index for index, branch in enumerate(branches) if branch]
        if alive and len(alive) <= COMPACT * len(branches):
            branches = [branches[index] for index in alive]
            decoder.keep(alive)


def _forked(
    decoder: Decoder, branches: list[list[EngineRow]], position: int, reach: int | None
) -> list[list[EngineRow]]:
    """Split each branch whose rows differ between `position` and `reach` (None: up to their ends).

    New branches take the places of finished branches, or are appended.
    """
    forked: list[list[EngineRow]] = [[] for _ in branches]
    places = iter([index for index, branch in enumerate(branches) if not branch])
    origins = list(range(len(branches)))
    for index, branch in enumerate(branches):
        parts: dict[tuple[int, ...], list[EngineRow]] = {}
        for row in branch:
            parts.setdefault(tuple(row.ids[position:reach]), []).append(row)
        for number, part in enumerate(parts.values()):
            place = index if number == 0 else next(places, len(forked))
            if place == len(forked):
                forked.append([])
                origins.append(index)
            forked[place], origins[place] = part, index
    if origins != list(range(len(branches))):
        decoder.keep(origins)
    return forked


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float,
    sources: Sequence[int],
    top_p: float | None = None,
    top_k: int | None = None,
) -> tuple[list[int], list[float]]:
    """Draw one token per row by inversion of the distribution function, from the `top_k` likeliest tokens, and of these
    from the fewest with total probability `top_p`.

    Args:
        logits: (branches, vocabulary), float64.
        uniforms: (rows, 1) in [0, 1).
        temperature: 0 is greedy.
        sources: the branch of each row.
        top_p: see `sample_rows`.
        top_k: see `sample_rows`.

    Returns:
        Tokens, and their log-probabilities under the sampled distribution (at temperature 0: under the softmax of the
        logits).
    """
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:], -torch.inf)
    if top_p is not None and temperature > 0:
        shares, order = F.softmax(logits / temperature, -1).sort(dim=-1, descending=True, stable=True)
        beyond = shares.cumsum(-1) - shares >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    logprobs = F.log_softmax(logits / temperature if temperature > 0 else logits, -1)
    if temperature > 0:
        totals = logprobs.exp().cumsum(-1)[sources]
        tokens = torch.searchsorted(totals, uniforms * totals[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    else:
        tokens = logprobs.argmax(-1, keepdim=True)[sources]
    scores = logprobs[sources, tokens[:, 0]].tolist()
    return tokens[:, 0].tolist(), [round(value, LOGPROB_DIGITS) for value in scores]
