"""The modules of a mixture of adapters (`captrain.models.mixture`): gates and adapted layers on a base. Needs torch."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captrain.errors import UserError
from captrain.models.lora import MIXTURE_FILES, PlainLora, read_plain_lora, require_trained
from captrain.models.mixture import MEMBERS, REMEDY, Decide, MixtureParts, deciding_tokens, mixture_parts
from captrain.records import publish_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."
EPSILON = 1e-6


class _Open:
    """Holds the current gate weights, (rows, tokens or 1, slots). All adapted layers read them from here."""

    weights: Tensor


class _MixedLinear(nn.Module):
    """A linear layer with the LoRA pairs of its adapters, concatenated.

    Args:
        linear: the linear layer of the base.
        pairs: slot of each adapter, with its B (outputs, rank), scale included, and A (rank, inputs).
        opened: the current gate weights.
    """

    def __init__(self, linear: nn.Linear, pairs: Sequence[tuple[int, Tensor, Tensor]], opened: _Open) -> None:
        super().__init__()
        self.linear, self.opened = linear, opened
        like = linear.weight
        owners = [slot for slot, _, down in pairs for _ in range(len(down))]
        self.owners = nn.Buffer(torch.tensor(owners, device=like.device), persistent=False)
        self.down = nn.Buffer(torch.cat([down for _, _, down in pairs]).t().contiguous().to(like), persistent=False)
        self.up = nn.Buffer(torch.cat([up for _, up, _ in pairs], 1).t().contiguous().to(like), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + ((x @ self.down) * self.opened.weights[..., self.owners]) @ self.up


class Mixture(nn.Module):
    """Gates over the adapters of a base. The base is changed in place and is called as before.

    By default, gates decide at the last token of a forward pass over several tokens, and keep the decision for passes
    over a single token. `at` and `fixed` override this.

    Args:
        base: a causal LM of transformers.
        parts: the adapters, where gates are, and when they decide.

    Raises:
        UserError: an adapter was altered, is not plain LoRA, or belongs to another base.
    """

    def __init__(self, base: "PreTrainedModel", parts: MixtureParts) -> None:
        super().__init__()
        self.parts, self.opened, self.slots = parts, _Open(), len(parts.slots)
        body: Any = base.base_model
        self.blocks = len(body.layers)
        weight: Tensor = body.get_input_embeddings().weight
        base.requires_grad_(False)
        width: int = base.config.get_text_config().hidden_size
        count = 1 if parts.scope == "global" else self.blocks
        self.gates = nn.ModuleList(nn.Linear(width, self.slots).to(weight) for _ in range(count))
        for gate in self.gates.parameters():
            nn.init.zeros_(gate)
        self._deciding: Tensor | None = None
        self._fixed: Tensor | None = None
        self._kept: list[Tensor] = [weight.new_empty(0)] * count
        self._states: list[Tensor] = [weight.new_empty(0)] * count
        _wrap(base, {name: read_plain_lora(Path(a.folder)) for name, a in parts.adapters.items()}, self.opened)
        if parts.scope == "global":
            body.register_forward_pre_hook(self._open_all, with_kwargs=True)
        else:
            for index, block in enumerate(body.layers):
                block.register_forward_pre_hook(lambda _, args, index=index: self._open(index, args[0]))
        base.add_module("mixture", self)
        assert {name for name, p in base.named_parameters() if p.requires_grad} == {
            f"mixture.{name}" for name, _ in self.named_parameters()
        }, "only gates are trained"

    @contextmanager
    def at(self, deciding: Tensor) -> Iterator[None]:
        """Inside the block, read whole dialogues. `deciding` (rows, tokens): index of the token that decides."""
        self._deciding = deciding
        try:
            yield
        finally:
            self._deciding = None

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers of the gates."""
        return [gate for gate in self.gates if isinstance(gate, nn.Linear)]

    @contextmanager
    def fixed(self, decisions: Tensor) -> Iterator[None]:
        """Inside the block, use these gate weights, (rows, gates, slots), for all tokens."""
        self._fixed = decisions
        try:
            yield
        finally:
            self._fixed = None

    @property
    def decisions(self) -> Tensor:
        """The gate weights of the last decision that the gates made, (rows, gates, slots)."""
        return torch.stack(self._kept, 1)

    @property
    def states(self) -> Tensor:
        """The hidden states that the gates read for this decision, (rows, gates, hidden)."""
        return torch.stack(self._states, 1)

    def _weights(self, index: int, states: Tensor) -> Tensor:
        """Return the weights of a gate for states (..., hidden)."""
        states = states.detach()
        self._states[index] = states * (states.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        logits = self.linears[index](self._states[index])
        return F.softmax(logits, -1) if self.parts.activation == "softmax" else logits.sigmoid()

    def _weights_of_deciding(self, index: int, states: Tensor) -> Tensor:
        """Return the weights of each token, decided at its place (see `at`)."""
        assert self._deciding is not None
        weights = self._weights(index, states)
        return weights.gather(1, self._deciding[..., None].expand(-1, -1, self.slots))

    def _open(self, index: int, states: Tensor) -> None:
        """Set the gate weights of a transformer block, from the states that it receives."""
        if self._fixed is not None:
            self.opened.weights = self._fixed[:, index, None]
        elif self._deciding is not None:
            self.opened.weights = self._weights_of_deciding(index, states)
        elif self.parts.decide == "token":
            self.opened.weights = self._weights(index, states)
        else:
            if states.shape[1] > 1 or len(self._kept[index]) != len(states):
                self._kept[index] = self._weights(index, states[:, -1])
            self.opened.weights = self._kept[index][:, None]

    def _open_all(self, body: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Set the weights of the global gate, from the last hidden states of the base without adapters."""
        if self._fixed is not None:
            self.opened.weights = self._fixed[:, 0, None]
            return
        ids = kwargs["input_ids"]
        deciding = self._deciding
        if deciding is None and ids.shape[1] == 1 and len(self._kept[0]) == len(ids):
            self.opened.weights = self._kept[0][:, None]
            return
        named = {name: kwargs[name] for name in ("attention_mask", "position_ids") if kwargs.get(name) is not None}
        alone = self.linears[0].weight.new_zeros((len(ids), 1, self.slots))
        with torch.no_grad(), self.fixed(alone):
            states = body(input_ids=ids, use_cache=False, **named).last_hidden_state
        if deciding is None:
            self._kept[0] = self._weights(0, states[:, -1])
            self.opened.weights = self._kept[0][:, None]
        else:
            self.opened.weights = self._weights_of_deciding(0, states)


def _wrap(base: nn.Module, adapters: Mapping[str, PlainLora], opened: _Open) -> None:
    """Replace each adapted linear layer of the base by a layer with the LoRA pairs of all adapters."""
    pairs: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for slot, lora in enumerate(adapters.values()):
        for name, (up, down) in lora.factors.items():
            pairs.setdefault(name.removeprefix(PREFIX), []).append((slot, lora.scale * up.double(), down.double()))
    linear = {name: part for name, part in base.named_modules() if isinstance(part, nn.Linear)}
    for name, parts in pairs.items():
        layer = linear.get(name)
        shapes = {(len(up), down.shape[1]) for _, up, down in parts}
        if layer is None or shapes != {(layer.out_features, layer.in_features)}:
            raise UserError(f"an adapter of the mixture changes {name}, which the base lacks", "use it with its base")
        parent, _, attribute = name.rpartition(".")
        setattr(base.get_submodule(parent), attribute, _MixedLinear(layer, parts, opened))


def padded_deciding_tokens(written: Tensor, attention: Tensor, decide: Decide) -> Tensor:
    """Return `deciding_tokens` of a padded batch, (rows, tokens). `attention` is 0 at padding."""
    tokens = torch.zeros_like(attention, dtype=torch.long)
    for row, (mine, real) in enumerate(zip(written, attention.bool(), strict=True)):
        indices = real.nonzero()[:, 0]
        tokens[row, indices] = indices[deciding_tokens(mine[indices].int().tolist(), decide)]
    return tokens


def save_mixture(mixture: Mixture, folder: Path) -> None:
    """Save the gates and adapters of a mixture. Equal gates give equal files.

    Args:
        mixture: the mixture. float64 gates are multiples of the barrier's grid, so float32 stores them exactly.
        folder: folder to create. An existing folder is replaced.
    """
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    publish_json(folder / MIXTURE_FILES[0], mixture.parts.config().model_dump())
    gates = {name: p.detach().float().cpu().contiguous() for name, p in mixture.gates.named_parameters()}
    save_file(gates, folder / MIXTURE_FILES[1], metadata={"format": "pt"})
    for adapter in mixture.parts.adapters.values():
        if not (folder / MEMBERS / adapter.digest).exists():
            shutil.copytree(adapter.folder, folder / MEMBERS / adapter.digest)


def load_mixture(base: "PreTrainedModel", folder: Path | str) -> Mixture:
    """Add the gates and adapters of a saved mixture to their base, in place.

    Raises:
        UserError: a file is missing or altered, or the mixture belongs to another base.
    """
    parts = mixture_parts(Path(folder))
    for adapter in parts.adapters.values():
        require_trained(adapter, "mixture")
    mixture = Mixture(base, parts)
    load_gates(mixture, Path(folder))
    return mixture


def load_gates(mixture: Mixture, folder: Path) -> None:
    """Load the gates of a saved mixture into a mixture of the same adapters.

    Raises:
        UserError: the gates are missing, damaged, or belong to another mixture.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / MIXTURE_FILES[1]
    try:
        gates = load_file(path)
        mixture.gates.load_state_dict(gates)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"{path} does not hold the gates of this mixture ({error})", REMEDY) from error
