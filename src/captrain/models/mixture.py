"""A mixture of LoRA adapters: base and adapters stay frozen, and small trained gates weigh the adapters.

A gate is a linear map from a hidden state to the weights g of the adapters. An adapted linear layer then computes
y = base(x) + sum_i g_i LoRA_i(x). A new gate is zero, so all weights are equal.

- `activation: softmax`: the weights of the adapters and of a slot for the base sum to 1. `sigmoid`: each weight is
  between 0 and 1 by itself, so a task can use several adapters fully, or none.
- `scope: layer`: each transformer block has a gate, which reads the block's input. `global`: one gate for all blocks
  reads the last hidden state of the base alone.
- `decide` says which token's state a gate reads. `prompt`: the prompt's last token, once for the whole rollout. `turn`:
  the last token before each turn, for the turn and for the tokens read since the previous turn. `token`: each token
  itself.

All tokens from one decision to the next are computed with that decision, so the content of a KV cache stays valid. A
state is detached and has a mean square of 1 before a gate reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from captrain.errors import UserError
from captrain.models.lora import MIXTURE_FILES, Adapter
from captrain.records import Record, read_json

Scope = Literal["layer", "global"]
Decide = Literal["prompt", "turn", "token"]
Activation = Literal["softmax", "sigmoid"]
BASE_SLOT = "base"
"""Name of the base's slot in a softmax. Prompts that need no adapter have this name as label."""
MEMBERS = "adapters"
"""Folder with the adapters of a saved mixture, each named by its digest."""
REMEDY = "make the mixture again: `dvc repro -f mixture`"


class MixtureConfig(Record):
    """Content of mixture.json. `adapters` maps names to digests, in the order of the gates' slots."""

    adapters: dict[str, str]
    scope: Scope = "layer"
    decide: Decide = "prompt"
    activation: Activation = "softmax"


@dataclass(frozen=True)
class MixtureParts:
    """The fixed parts of a mixture: its adapters by name, and the scope, timing and activation of its gates.

    Raises:
        UserError: `scope` is global and `decide` is token, which is not supported.
    """

    adapters: dict[str, Adapter]
    scope: Scope = "layer"
    decide: Decide = "prompt"
    activation: Activation = "softmax"

    def __post_init__(self) -> None:
        if self.scope == "global" and self.decide == "token":
            raise UserError(
                "a mixture of scope global would read the whole dialogue again for each token",
                "set decide to prompt or turn, or scope to layer",
            )

    @property
    def slots(self) -> list[str]:
        """Names of a gate's outputs: the adapters and, in a softmax, the base."""
        return [*self.adapters, BASE_SLOT] if self.activation == "softmax" else [*self.adapters]

    def config(self) -> MixtureConfig:
        """Return the content of mixture.json."""
        digests = {name: adapter.digest for name, adapter in self.adapters.items()}
        return MixtureConfig(adapters=digests, scope=self.scope, decide=self.decide, activation=self.activation)


def deciding_tokens(written: Sequence[int], decide: Decide) -> list[int]:
    """Return, for each token, the index of the token whose state decides its gate weights.

    Args:
        written: for each token, 1 if the agent wrote it.
        decide: when the gates decide.
    """
    size = len(written)
    if decide == "token":
        return list(range(size))
    starts = [index for index in range(size - 1) if written[index + 1] and not written[index]] or [size - 1]
    if decide == "prompt":
        return [starts[0]] * size
    deciding = [starts[0]] * size
    for start in starts[1:]:
        # The previous turn's last token is read together with the tokens that follow it.
        first = max(index for index in range(start) if written[index])
        deciding[first:] = [start] * (size - first)
    return deciding


def begins_decision(written: Sequence[int], position: int, decide: Decide) -> bool:
    """Return whether a new decision is needed for the known tokens from `position` on."""
    if position == 0 or decide != "turn":
        return position == 0 and decide != "token"
    return bool(written[position]) and position + 1 < len(written) and not written[position + 1]


def mixture_use(parts: MixtureParts) -> str:
    """Return the part of a model card that lists a mixture's adapters and shows how to load it."""
    rows = "".join(f"| {name} | {adapter.digest} |\n" for name, adapter in parts.adapters.items())
    return f"""The gates weigh these adapters ({parts.activation}; scope: {parts.scope}, decide: {parts.decide}):

| adapter | content hash |
|---|---|
{rows}
Use it with the base that the adapters were trained on only:

```python
from captrain.models import load_mixture
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("artifacts/base")
load_mixture(model, "FOLDER")  # this folder; then model.generate decides at the prompt's last token
```"""


def mixture_parts(folder: Path) -> MixtureParts:
    """Read the frozen parts of a saved mixture.

    Raises:
        UserError: mixture.json is damaged.
    """
    config = read_json(folder / MIXTURE_FILES[0], MixtureConfig, REMEDY)
    adapters = {name: Adapter(str(folder / MEMBERS / content), content) for name, content in config.adapters.items()}
    return MixtureParts(adapters, config.scope, config.decide, config.activation)
