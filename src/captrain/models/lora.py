"""LoRA adapters as files: plain PEFT folders that equal weights make equal, known by the hash of their content.

Plain is W' = W + (alpha / r) B A. Policies merge adapters into weights, and compositions add them up, by that formula.
PEFT knows many variations of it (another scale, a magnitude, ranks that differ by module, biases, whole modules beside
it) that are set in the configuration, and an adapter of these would be another function without any error. So every
setting that is not known to be harmless is refused by its name, those of later versions of PEFT among them.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from captrain.config import repro
from captrain.errors import UserError
from captrain.models.targets import peft_experts, plain_experts, plain_targets
from captrain.models.weights import model_source
from captrain.records import JsonObject, file_digest, read_json, require_regular

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

CHECKPOINTS = "checkpoints"
"""Folder below an adapter of what it was at points of its training, each named by the rollouts played; and
their hashes in an index."""
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
class Adapter:
    """An adapter to act with: the folder it lies in, and the digest that rollouts record."""

    folder: str
    digest: str


def adapter_digest(folder: Path, stage: str = "adapters") -> str:
    """Hash the content of an adapter in plain PEFT format: its configuration and its weights, and no other file.

    Args:
        folder: of the adapter.
        stage: which has published it, for messages.

    Raises:
        UserError: one of the two files is missing.
    """
    paths = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    for path in paths:
        require_regular(path, f"run `{repro(stage)}` to make it again")
    return file_digest(*paths)


def require_trained(adapter: Adapter, stage: str = "adapters") -> Adapter:
    """Return the adapter, if what lies in its folder is what was trained.

    Args:
        adapter: as an index names it.
        stage: which has published it, for messages.

    Raises:
        UserError: it is another one, or a file of it is missing.
    """
    if (content := adapter_digest(Path(adapter.folder), stage)) != adapter.digest:
        raise UserError(
            f"the adapter in {adapter.folder} is {content}, but {adapter.digest} was trained",
            f"it was altered: run `dvc repro -f {stage}`",
        )
    return adapter


def checkpoint_marks(rollouts: int, points: int) -> list[int]:
    """List the rollouts at which a training is at its points before the end, evenly: an adapter is kept as it is after
    the first step that has played so many.

    Args:
        rollouts: of the whole training.
        points: their number, the end among them.
    """
    return [math.ceil(rollouts * point / points) for point in range(1, points)]


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


@dataclass(frozen=True)
class PlainLora:
    """The content of a plain adapter: `scale`, alpha / r, and `factors` of each module by its PEFT name, B (out, rank)
    and A (rank, in)."""

    scale: float
    factors: "dict[str, tuple[Tensor, Tensor]]"


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
    # Nothing beside plain pairs, in settings and in tensors.
    special = [name for name, plain in PLAIN.items() if name in config and config[name] not in plain]
    special += [name for name, value in config.items() if value and name not in HARMLESS and name not in PLAIN]
    modules = [name.removesuffix(".lora_A.weight") for name in sorted(tensors) if name.endswith(".lora_A.weight")]
    pairs = {f"{name}.lora_{side}.weight" for name in modules for side in "AB"}
    if obstacles := sorted(special) or sorted(set(tensors) ^ pairs)[:1]:
        raise UserError(
            f"adapter {folder} is not a plain LoRA adapter ({', '.join(obstacles)})",
            "use adapters of r, lora_alpha and target_modules alone, or merge this one into its base with PEFT",
        )
    factors = {name: (tensors[f"{name}.lora_B.weight"], tensors[f"{name}.lora_A.weight"]) for name in modules}
    rank, scale = config["r"], config["lora_alpha"] / config["r"]
    if ranks := {len(down) for _, down in factors.values()} - {rank}:
        raise UserError(
            f"adapter {folder} says r = {rank}, and its tensors are of rank {', '.join(map(str, sorted(ranks)))}",
            REMEDY,
        )
    # Weights that can be added to others.
    fault = "" if modules else "has no weights"
    if not math.isfinite(scale):
        fault = "has a scale that is not finite"
    for name, (up, down) in factors.items():
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
            fault = f"has matrices that do not fit each other in {name}: {tuple(down.shape)}, {tuple(up.shape)}"
        elif not (down.is_floating_point() and up.is_floating_point()):
            fault = f"has weights of type {up.dtype if down.is_floating_point() else down.dtype} in {name}"
        elif not bool(down.isfinite().all() and up.isfinite().all()):
            fault = f"has weights that are not finite in {name}"
    if fault:
        raise UserError(f"adapter {folder} {fault}", "use one that was trained to its end, as PEFT saves it")
    return PlainLora(scale, factors)


def save_adapter(
    model: "PeftModel", folder: Path, base: Path, policy: str, state: "Mapping[str, Tensor] | None" = None
) -> None:
    """Leave the adapter "default" of a PEFT model in a folder, in plain PEFT format. Equal weights always give equal
    files: the path of the base on this machine is no part of it, and key order and unset fields do not vary. Weights
    in float64 are on the barrier's grid and are saved as float32, which is exact. Experts are saved one by one
    (see `captrain.models.targets`).

    Args:
        model: as it is trained.
        folder: of the adapter; replaced.
        base: a base that has a name is called by it in the adapter's configuration,
        policy: another by this digest.
        state: the model's weights by name, where some of them lie in other processes.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = model.state_dict() if state is None else state
    plain = {
        name: tensor.float() if tensor.dtype == torch.float64 else tensor
        for name, tensor in weights.items()
        if ".lora_" in name
    }
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(str(folder), state_dict=plain, selected_adapters=["default"])
    config, path = adapter_config(folder), folder / "adapter_model.safetensors"
    if config.get("target_parameters"):
        save_file(plain_experts(model, load_file(path)), path, metadata={"format": "pt"})
    source = model_source(base)
    config["base_model_name_or_path"] = source.source if source.in_hub else f"captrain-base-{policy}"
    config |= {"target_modules": plain_targets(config), "target_parameters": None}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def copy_adapter(model: "PeftModel", start: Adapter) -> None:
    """Give the adapter "default" of a PEFT model the weights of another one of its shape, in place: what is trained
    then is that adapter further, and no second one on top of it.

    Args:
        model: before it trains.
        start: whose weights it gets.

    Raises:
        UserError: the adapter is not the one of that digest, or of another shape than the model's.
    """
    folder = Path(require_trained(start).folder)
    saved, expected = adapter_config(folder), model.peft_config["default"].to_dict()
    for name, before, after in (
        ("r", saved["r"], expected["r"]),
        ("lora_alpha", saved["lora_alpha"], expected["lora_alpha"]),
        ("target_modules", plain_targets(saved), plain_targets(expected)),
    ):
        if before != after:
            raise UserError(
                f"the adapter in {folder} has {name} = {before}, and the trainer {after}",
                "train both with the same rank, alpha and targets",
            )
    load_weights(model, folder)


def load_weights(model: "PeftModel", folder: Path) -> None:
    """Give the adapter "default" of a PEFT model the weights of a saved one of its shape, in place."""
    from peft import load_peft_weights, set_peft_model_state_dict

    tensors = peft_experts(model, load_peft_weights(str(folder), device="cpu"))
    set_peft_model_state_dict(model, tensors)
