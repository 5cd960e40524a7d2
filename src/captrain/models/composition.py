"""Several LoRA adapters as one, exactly: W' = W + sum_c w_c (alpha_c / r_c) B_c A_c.

Concatenation does it: A stacked, B side by side with weight and scale multiplied in, rank the sum of the ranks, alpha
equal to it. The result is one more plain PEFT folder, so that policies and servers know nothing of composition. Adding
factors, as other combinations of PEFT do, is another function: (B_1 + B_2)(A_1 + A_2) has cross terms.

Vectors of weights are named: "a+b" for weights of 1, "0.6*a+0.4*b" else. Names hold tenths; `normalised_weights` makes
them such, so that few vectors are distinct and each is composed once.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.models.lora import Adapter, adapter_config, adapter_digest, read_plain_lora
from captrain.records import digest, place_aside, publish_folder

if TYPE_CHECKING:
    import torch

Factors: TypeAlias = "dict[str, tuple[torch.Tensor, torch.Tensor]]"
"""Factors of each changed module, by its PEFT name: up (out, rank) with all scales multiplied in, and down (rank, in).
"""
TENTHS = 10


def normalised_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Round weights to shares in tenths that sum to 1, by largest remainders (of equal ones the first name gets more);
    what gets no tenth is left out. For scores such as probabilities; a plain sum has weights of 1 and needs none.

    Raises:
        ValueError: a weight is negative, or none is positive.
    """
    total = sum(weights.values())
    if total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"weights must be positive: {dict(weights)}")
    exact = {name: TENTHS * weights[name] / total for name in sorted(weights)}
    tenths = {name: int(share) for name, share in exact.items()}
    order = sorted(exact, key=lambda name: tenths[name] - exact[name])
    for name in order[: TENTHS - sum(tenths.values())]:
        tenths[name] += 1
    return {name: count / TENTHS for name, count in tenths.items() if count}


def composition_name(weights: Mapping[str, float]) -> str:
    """Name a vector of weights, members in the order of their names; a member alone at 1 has its own.

    Raises:
        ValueError: a weight is not a positive number of tenths: two vectors would have one name.
    """
    for name, weight in weights.items():
        if weight <= 0 or abs(weight * TENTHS - round(weight * TENTHS)) > 1e-9:
            raise ValueError(f"weight {weight} of {name} is not a positive number of tenths")
    rounded = {name: round(weights[name], 1) for name in sorted(weights)}
    return "+".join(name if weight == 1 else f"{weight}*{name}" for name, weight in rounded.items())


def parse_composition(name: str) -> dict[str, float]:
    """Parse the vector of weights that has this name."""
    terms = (term.rpartition("*") for term in name.split("+"))
    return {member: float(weight or 1) for weight, _, member in terms}


def compose(members: Mapping[str, Adapter], weights: Mapping[str, float], folder: Path) -> Adapter:
    """Add up weighted adapters to one adapter; a member alone at weight 1 is returned itself.

    Args:
        members: adapters by name, of one base.
        weights: by the names of members; 0 leaves a member out.
        folder: where compositions are kept: each lies in `folder/<key>/<content hash>`, and is made only once.

    Raises:
        UserError: a member is missing, damaged, or no plain LoRA adapter, or members do not go together.
        ValueError: no member has a weight.
    """
    import torch

    weighted = [(members[name], weight) for name, weight in weights.items() if weight]
    weighted.sort(key=lambda pair: (pair[0].digest, pair[1]))
    if not weighted:
        raise ValueError("a composition needs a member with a weight")
    if len(weighted) == 1 and weighted[0][1] == 1:
        return weighted[0][0]
    composed = folder / digest(code_digest(compose), [(member.digest, weight) for member, weight in weighted])
    # What was made already is taken, unless it was altered.
    for path in composed.glob("*"):
        with suppress(UserError):
            if adapter_digest(path) == path.name:
                return Adapter(str(path), path.name)
    shutil.rmtree(composed, ignore_errors=True)
    parts = [lora_factors(member) for member, _ in weighted]
    shapes = [{name: (len(up), down.shape[1]) for name, (up, down) in part.items()} for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise UserError("adapters change different modules and cannot be added", "use adapters of one base and trainer")
    # Of each module: up (out, sum of ranks), down (sum of ranks, in).
    factors = {
        name: (
            torch.cat([weight * part[name][0] for part, (_, weight) in zip(parts, weighted, strict=True)], 1),
            torch.cat([part[name][1] for part in parts]),
        )
        for name in parts[0]
    }
    with place_aside(composed, f".{os.getpid()}") as aside:
        save_lora_factors(aside / "new", weighted[0][0], factors)
        content = adapter_digest(aside / "new")
        (aside / "new").rename(aside / content)
        publish_folder(aside, composed)
    return Adapter(str(composed / content), content)


def lora_factors(member: Adapter) -> Factors:
    """Read the factors of a plain LoRA adapter, in float32.

    Raises:
        UserError: it is missing, damaged, or scales its modules in another way than by alpha / r.
    """
    lora = read_plain_lora(Path(member.folder))
    return {name: (lora.scale * up.float(), down.float()) for name, (up, down) in lora.factors.items()}


def save_lora_factors(folder: Path, like: Adapter, factors: Factors) -> None:
    """Write factors as a plain PEFT adapter in float32, scaled by 1; equal factors, equal bytes.

    Args:
        folder: to make.
        like: an adapter of the same base and modules, whose configuration is taken over.
        factors: the rank may differ between modules: zeros fill it up, because servers want one rank.
    """
    import torch
    from safetensors.torch import save_file

    rank = max(1, *(len(down) for _, down in factors.values()))
    tensors = {}
    for name, (up, down) in factors.items():
        missing = rank - len(down)
        tensors[f"{name}.lora_A.weight"] = torch.nn.functional.pad(down, (0, 0, 0, missing)).float().contiguous()
        tensors[f"{name}.lora_B.weight"] = torch.nn.functional.pad(up, (0, missing)).float().contiguous()
    config = adapter_config(Path(like.folder))
    config |= {"r": rank, "lora_alpha": rank}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
