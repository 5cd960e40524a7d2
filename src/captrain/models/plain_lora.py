"""Plain LoRA adapters, W' = W + (alpha / r) B A: the one place where a saved adapter is read, or refused.

Policies merge adapters into weights, and compositions add them up, by that formula. PEFT knows many variations of it
(another scale, a magnitude, ranks that differ by module, biases, whole modules beside it) that are set in the
configuration, and an adapter of these would be another function without any error. So every setting that is not known
to be harmless is refused by its name, those of later versions of PEFT among them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from captrain.errors import UserError
from captrain.records import JsonObject, read_json, require_regular

if TYPE_CHECKING:
    import torch

HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "target_modules",
        "task_type",
    }
)
"""Settings that change nothing of what a saved adapter adds, whatever their values: they say how it was trained, or
which modules it has, which its tensors say as well."""
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings that have several values, with those that are plain. Other ways to begin change the base's weights."""


REMEDY = "the adapter is not whole or was altered: delete its folder and run `dvc repro adapters`"


@dataclass(frozen=True)
class PlainLora:
    """The content of a plain adapter: `tensors` by their PEFT names, a lora_A (rank, in) and a lora_B (out, rank) of
    each of the `modules`, and `scale`, alpha / r."""

    config: JsonObject
    tensors: "dict[str, torch.Tensor]"
    modules: list[str]
    scale: float


class _Config(BaseModel):
    model_config = ConfigDict(extra="allow")

    r: Annotated[int, Field(ge=1)]
    lora_alpha: int | float


def adapter_config(folder: Path) -> JsonObject:
    """Read the configuration of an adapter in PEFT format, its `r` and `lora_alpha` among it.

    Raises:
        UserError: it is missing, or none.
    """
    return read_json(folder / "adapter_config.json", _Config, REMEDY).model_dump(exclude_unset=True)


def read_plain_lora(folder: Path) -> PlainLora:
    """Read an adapter in PEFT format.

    Raises:
        UserError: it is missing, damaged, or no plain LoRA adapter; what makes it none is named.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = adapter_config(folder)
    try:
        require_regular(folder / "adapter_model.safetensors", REMEDY)
        tensors = load_file(folder / "adapter_model.safetensors")
    except (SafetensorError, OSError) as error:
        raise UserError(f"adapter {folder} does not load ({error})", REMEDY) from error
    rank, scale = config["r"], config["lora_alpha"] / config["r"]
    modules = [name.removesuffix(".lora_A.weight") for name in sorted(tensors) if name.endswith(".lora_A.weight")]
    pairs = {f"{name}.lora_{side}.weight" for name in modules for side in "AB"}
    if obstacles := special_settings(config) or sorted(set(tensors) ^ pairs)[:1]:
        raise UserError(
            f"adapter {folder} is not a plain LoRA adapter ({', '.join(obstacles)})",
            "use adapters of r, lora_alpha and target_modules alone, or merge this one into its base with PEFT",
        )
    ranks = {len(tensors[f"{name}.lora_A.weight"]) for name in modules}
    if ranks - {rank}:
        raise UserError(
            f"adapter {folder} says r = {rank}, and its tensors are of rank {', '.join(map(str, sorted(ranks)))}",
            REMEDY,
        )
    if fault := _tensor_fault(tensors, modules, scale):
        raise UserError(f"adapter {folder} {fault}", "use one that was trained to its end, as PEFT saves it")
    return PlainLora(config, tensors, modules, scale)


def _tensor_fault(tensors: "dict[str, torch.Tensor]", modules: Sequence[str], scale: float) -> str:
    """Say why tensors cannot be added to weights; "" if they can."""
    if not modules:
        return "has no weights"
    if not math.isfinite(scale):
        return "has a scale that is not finite"
    for name in modules:
        down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
            return f"has matrices that do not fit each other in {name}: {tuple(down.shape)}, {tuple(up.shape)}"
        for tensor in (down, up):
            if not tensor.is_floating_point():
                return f"has weights of type {tensor.dtype} in {name}"
            if not bool(tensor.isfinite().all()):
                return f"has weights that are not finite in {name}"
    return ""


def special_settings(config: JsonObject) -> list[str]:
    """List the settings of an adapter's configuration that make it another function than plain LoRA."""
    special = [name for name, plain in PLAIN.items() if name in config and config[name] not in plain]
    special += [name for name, value in config.items() if value and name not in HARMLESS and name not in PLAIN]
    return sorted(special)
