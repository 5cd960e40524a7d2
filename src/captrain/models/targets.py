"""Layers of a base that get low-rank weights: linear layers by their names, and the experts of a mixture.

The experts of a mixture are no layers of their own in transformers: all up projections of a layer are one tensor,
(experts, 2 x inner, hidden), with the gates above them, and all down projections another, (experts, hidden, inner).
PEFT adapts such tensors (`target_parameters`) by a pair of factors for each expert, stacked in an order of its own. An
adapter is saved expert by expert, as plain LoRA of layers `experts.<number>.gate_proj`, `up_proj` and `down_proj`: what
reads, digests, adds up or merges adapters then knows of no experts, and neither servers nor PEFT want another form.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from captrain.config import REMEDY, alternatives
from captrain.errors import UserError
from captrain.records import JsonObject

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor, nn

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors of experts, and the layers that each holds, one above the other."""
EXPERT = re.compile(r"(?P<tensors>.+\.experts)\.(?P<number>\d+)\.(?P<layer>gate_proj|up_proj|down_proj)")


@dataclass(frozen=True)
class LoraShape:
    """Shape of an adapter: its rank, the alpha that its updates are scaled by (alpha / rank), the linear layers that it
    changes, by the ends of their names, and whether it changes the experts of a mixture."""

    rank: int
    alpha: int
    targets: Sequence[str]
    experts: bool = False


def lora_config(base: "nn.Module", shape: LoraShape) -> "LoraConfig":
    """Make PEFT's configuration of a new adapter.

    Args:
        base: the model that it is of; it may be without weights.
        shape: of the adapter.

    Raises:
        UserError: the base has no linear layer of one of the names, or no experts that are known here.
    """
    import torch
    from peft import LoraConfig

    linear = {name.rpartition(".")[2] for name, part in base.named_modules() if isinstance(part, torch.nn.Linear)}
    # Tensors that hold one matrix for each expert, by the ends of their names.
    stacked = [name for name, weight in base.named_parameters() if ".experts." in name and weight.ndim == 3]
    tensors = sorted({".".join(name.split(".")[-2:]) for name in stacked})
    if unknown := [name for name in shape.targets if name.rpartition(".")[2] not in linear]:
        experts = ": the experts of a mixture are one tensor, which trainer.experts=true adapts" if tensors else ""
        raise UserError(
            f"trainer.targets: the base has no linear layer {unknown[0]}{experts}",
            f"{REMEDY}; {alternatives(unknown[0], sorted(linear))}",
        )
    transposed = any(getattr(part, "is_transposed", False) for part in base.modules())
    if shape.experts and (tensors != sorted(f"experts.{name}" for name in FUSED) or transposed):
        raise UserError(
            "trainer.experts = true, and the base "
            + (f"has those of {', '.join(tensors)}" if tensors else "is not a mixture of experts"),
            f"set trainer.experts=false; experts are known where they are {' and '.join(FUSED)}",
        )
    return LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        target_modules=list(shape.targets),
        target_parameters=tensors if shape.experts else None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def plain_experts(model: "nn.Module", tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Take the tensors of an adapter apart, with its experts one by one, as plain LoRA; others are passed through.

    Args:
        model: PEFT's, that they are the adapter of.
        tensors: by their names in a saved adapter.
    """
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = {name: part for name, part in model.named_modules() if isinstance(part, ParamWrapper)}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, side = name.rsplit(".lora_", 1)
        if (wrapper := wrappers.get(module)) is None:
            plain[name] = tensor
            continue
        # Wrappers of several tensors of one module lie in each other.
        folder, layers = module.replace(".base_layer", ""), FUSED[wrapper.parameter_name]
        # What PEFT stacks, as factors (experts, rank, in) or (experts, out, rank), in the order in which it reads them.
        if side.startswith("A"):
            factors = tensor.reshape(wrapper.num_experts, -1, tensor.shape[-1])
        else:
            factors = tensor.reshape(tensor.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
        for number, factor in enumerate(factors):
            parts = [factor] * len(layers) if side.startswith("A") else factor.chunk(len(layers))
            for layer, part in zip(layers, parts, strict=True):
                plain[f"{folder}.{number}.{layer}.lora_{side}"] = part.clone()
    return plain


def peft_experts(model: "nn.Module", tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Stack an adapter that `plain_experts` has taken apart, as PEFT has it.

    Raises:
        UserError: gates and up projections of an expert read different directions, as those of merged adapters may.
    """
    import torch
    from peft.tuners.lora.layer import ParamWrapper

    stacked = dict(tensors)
    for module, wrapper in model.named_modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        folder, layers = module.replace(".base_layer", ""), FUSED[wrapper.parameter_name]
        experts = [[f"{folder}.{number}.{layer}" for layer in layers] for number in range(wrapper.num_experts)]
        downs = [[stacked.pop(f"{layer}.lora_A.weight") for layer in expert] for expert in experts]
        ups = [torch.cat([stacked.pop(f"{layer}.lora_B.weight") for layer in expert]) for expert in experts]
        if any(not torch.equal(down[0], down[-1]) for down in downs):
            raise UserError(
                f"the gates and up projections in {folder} have low-rank weights that read different directions",
                "use an adapter that was trained here, and not one that was merged",
            )
        stacked[f"{module}.lora_A.weight"] = torch.cat([down[0] for down in downs])
        stacked[f"{module}.lora_B.weight"] = torch.stack(ups, -1).flatten(1)
    return stacked


def plain_targets(config: JsonObject) -> list[str]:
    """List the layers that an adapter changes, sorted: those of its configuration, and those of experts.

    Args:
        config: PEFT's, as JSON.
    """
    tensors = [name.rpartition(".")[2] for name in config.get("target_parameters") or ()]
    return sorted({*config["target_modules"], *(layer for name in tensors for layer in FUSED[name])})


def expert_place(module: str, state: "Mapping[str, Tensor]") -> "tuple[str, tuple[int, slice]] | None":
    """Locate the weight of an expert's layer in a model's state: the tensor, and the part of it; None for a module that
    is no expert's, or of another model."""
    match = EXPERT.fullmatch(module)
    if match is None:
        return None
    for tensor, layers in FUSED.items():
        name = f"{match['tensors']}.{tensor}"
        if match["layer"] in layers and name in state and int(match["number"]) < len(state[name]):
            height = state[name].shape[1] // len(layers)
            start = layers.index(match["layer"]) * height
            return name, (int(match["number"]), slice(start, start + height))
    return None
