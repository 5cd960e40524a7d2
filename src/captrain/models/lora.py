"""LoRA adapters: the layers that they change, their files, and compositions of several adapters.

An adapter is a folder in PEFT's format, named by the hash of its content. Equal weights give equal files. Policies
merge an adapter into the weights, and compositions add adapters up. Both use the formula of plain LoRA:
W' = W + (alpha / r) B A. PEFT's configuration can turn on many variations: another scale, a magnitude, different ranks
by module, biases, whole modules. Reading such an adapter as plain LoRA would silently compute the wrong function. So
every setting that is not known to be harmless is refused by name, including settings of later PEFT versions.

In transformers, the experts of a layer are two tensors, not linear layers. PEFT can adapt, save and merge these tensors
(`target_parameters`). Such an adapter is not plain LoRA and cannot be composed.

A composition is W' = W + sum_c w_c (alpha_c / r_c) B_c A_c. It is exact, because the factors are concatenated: the A
are stacked, and the B are put side by side, multiplied by weight and scale. The rank is the sum of the ranks, and alpha
equals the rank. The result is a plain adapter, so policies and servers need no code for compositions. Adding the
factors, as some of PEFT's combinations do, would give cross terms: (B_1 + B_2)(A_1 + A_2). A vector of weights has a
name: "a+b" if all weights are 1, otherwise for example "0.6*a+0.4*b". Weights are rounded to tenths (see
`normalised_weights`), so there are few different vectors, and each is composed only once.
"""

import copy
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from captrain.errors import UserError
from captrain.models.weights import model_source
from captrain.records import (
    JsonObject,
    digest,
    file_digest,
    place_aside,
    publish_folder,
    publish_text,
    read_json,
    require_regular,
)
from captrain.run import REMEDY, alternatives, code_digest, repro

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

Factors: TypeAlias = "dict[str, tuple[Tensor, Tensor]]"
"""PEFT name of a module -> its factors: `up` (out, rank), already multiplied by the scale, and `down` (rank, in)."""
TENTHS = 10
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Configuration and weights of an adapter."""
MIXTURE_FILES = ("mixture.json", "gates.safetensors")
"""Configuration and gates of a mixture of adapters (`captrain.models.mixture`). It can act wherever an adapter can."""
CHECKPOINTS = "checkpoints"
"""Name of the folder with an adapter's checkpoints, each named by the rollouts played so far.

Also the name of the field in an index that holds their hashes.
"""
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
"""PEFT settings that do not change the function of a saved adapter.

They say how it was trained, or which modules it has. The names of its tensors also show the modules.
"""
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""PEFT settings that are harmless with these values. Other initialisations change the base's weights."""
DAMAGED = "the adapter is not whole or was altered: delete its folder and run `dvc repro adapters`"
EXPERTS = ["experts.down_proj", "experts.gate_up_proj"]
"""Ends of the names of the tensors that hold all experts of a layer, in a mixture-of-experts model."""


@dataclass(frozen=True)
class LoraShape:
    """Shape of an adapter.

    Updates are scaled by alpha / rank. `targets` are the ends of the names of linear layers. With `experts`, the
    adapter also changes the experts.
    """

    rank: int
    alpha: int
    targets: Sequence[str]
    experts: bool = False


def lora_config(base: "nn.Module", shape: LoraShape) -> "LoraConfig":
    """Return PEFT's configuration for a new adapter.

    Args:
        base: the base model. It may be without weights (on the meta device).
        shape: shape of the adapter.

    Raises:
        UserError: a name in `shape.targets` matches no linear layer, or the base has no known experts.
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
    if shape.experts and (tensors != EXPERTS or transposed):
        raise UserError(
            "trainer.experts = true, and the base "
            + (f"has those of {', '.join(tensors)}" if tensors else "is not a mixture of experts"),
            f"set trainer.experts=false; known are bases whose experts are {' and '.join(EXPERTS)}",
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


@dataclass(frozen=True)
class Adapter:
    """An adapter to act with: its folder, and its digest, which rollouts record."""

    folder: str
    digest: str


def is_mixture(folder: Path) -> bool:
    """Tell whether a folder holds a mixture of adapters, not one adapter."""
    return (folder / MIXTURE_FILES[0]).exists()


def adapter_digest(folder: Path, stage: str = "adapters") -> str:
    """Hash the configuration and the weights of an adapter, or of a mixture of adapters.

    A mixture's configuration names its adapters by their digests, so the hash covers them too.

    Args:
        folder: folder of the adapter.
        stage: the stage that published it, for messages.

    Raises:
        UserError: one of the two files is missing.
    """
    paths = [folder / name for name in (MIXTURE_FILES if is_mixture(folder) else ADAPTER_FILES)]
    for path in paths:
        # Check first: the remedy reads dvc.yaml, which takes longer than the digest.
        if not os.path.isfile(path):
            require_regular(path, f"run `{repro(stage)}` to make it again")
    return file_digest(*paths)


def require_trained(adapter: Adapter, stage: str = "adapters") -> Adapter:
    """Return the adapter if the content of its folder matches its digest.

    Args:
        adapter: an adapter as an index names it.
        stage: the stage that published it, for messages.

    Raises:
        UserError: the content has another hash, or a file is missing.
    """
    if (content := adapter_digest(Path(adapter.folder), stage)) != adapter.digest:
        raise UserError(
            f"the adapter in {adapter.folder} is {content}, but {adapter.digest} was trained",
            f"it was altered: run `dvc repro -f {stage}`",
        )
    return adapter


def checkpoint_marks(rollouts: int, points: int) -> list[int]:
    """Return the numbers of rollouts at which a training saves checkpoints, evenly spaced, without the end.

    A checkpoint is saved after the first step that reaches its number.

    Args:
        rollouts: rollouts of the whole training.
        points: number of checkpoints, including the end.
    """
    return [math.ceil(rollouts * point / points) for point in range(1, points)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="allow")

    r: Annotated[int, Field(ge=1)]
    lora_alpha: int | float


def adapter_config(folder: Path) -> JsonObject:
    """Read the configuration of an adapter, which has at least `r` and `lora_alpha`.

    Raises:
        UserError: it is missing or invalid.
    """
    return read_json(folder / "adapter_config.json", _Config, DAMAGED).model_dump(exclude_unset=True)


@dataclass(frozen=True)
class PlainLora:
    """The content of a plain adapter.

    scale: alpha / r. factors: PEFT name of a module -> B (out, rank) and A (rank, in).
    """

    scale: float
    factors: "dict[str, tuple[Tensor, Tensor]]"


def read_plain_lora(folder: Path) -> PlainLora:
    """Read an adapter in PEFT format.

    Raises:
        UserError: it is missing, damaged, or not plain LoRA; the message names the setting that is not plain.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = adapter_config(folder)
    try:
        require_regular(folder / "adapter_model.safetensors", DAMAGED)
        tensors = load_file(folder / "adapter_model.safetensors")
    except (SafetensorError, OSError) as error:
        raise UserError(f"adapter {folder} does not load ({error})", DAMAGED) from error
    # Refuse settings and tensors beyond plain LoRA.
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
            DAMAGED,
        )
    # Check that the weights can be added to a model.
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
    """Save the adapter "default" of a PEFT model.

    Equal weights give equal files: the configuration holds no path of this machine, and its keys have a fixed order.
    float64 weights are saved as float32. This loses nothing, because they are multiples of the barrier's grid.

    Args:
        model: the trained model.
        folder: folder of the adapter. An existing folder is replaced.
        base: folder of the base. If the base comes from a model hub, its hub name is written into the configuration.
        policy: digest of the policy, which names the base in the configuration otherwise.
        state: the model's weights by name, if other processes hold some of them.
    """
    import torch

    weights = model.state_dict() if state is None else state
    plain = {
        name: tensor.float() if tensor.dtype == torch.float64 else tensor
        for name, tensor in weights.items()
        if ".lora_" in name
    }
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(str(folder), state_dict=plain, selected_adapters=["default"])
    config, source = adapter_config(folder), model_source(base)
    config["base_model_name_or_path"] = source.source if source.in_hub else f"captrain-base-{policy}"
    # PEFT stores sets, whose order differs between processes.
    config["target_modules"] = sorted(config["target_modules"])
    config["target_parameters"] = sorted(config.get("target_parameters") or ()) or None
    publish_text(folder / "adapter_config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def copy_adapter(model: "PeftModel", start: Adapter) -> None:
    """Copy the weights of a saved adapter into the adapter "default" of a PEFT model, to continue its training.

    Args:
        model: the model, before training.
        start: the saved adapter.

    Raises:
        UserError: the saved adapter has another digest, or another shape than the model's.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    folder = Path(require_trained(start).folder)
    saved, expected = adapter_config(folder), model.peft_config["default"].to_dict()
    expected["target_modules"] = sorted(expected["target_modules"])
    expected["target_parameters"] = sorted(expected["target_parameters"] or ()) or None
    for name in ("r", "lora_alpha", "target_modules", "target_parameters"):
        if saved.get(name) != expected[name]:
            raise UserError(
                f"the adapter in {folder} has {name} = {saved.get(name)}, and the trainer {expected[name]}",
                "train both with the same rank, alpha and targets",
            )
    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))


def adapts_experts(folder: Path) -> bool:
    """Return whether an adapter changes the experts of a mixture. Only PEFT itself can merge such an adapter."""
    return bool(adapter_config(folder).get("target_parameters"))


def merge_experts(module: "PreTrainedModel", folder: Path) -> "nn.Module":
    """Return a float64 copy of a mixture-of-experts model, into which PEFT has merged an adapter of its experts."""
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(copy.deepcopy(module).double(), str(folder))
    return adapted.merge_and_unload()


def normalised_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Round scores, such as probabilities, to tenths that sum to 1, by the method of largest remainders.

    Ties go to the name that is first in alphabetical order. Names that round to 0 are left out.

    Raises:
        ValueError: a weight is negative, or all are zero.
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
    """Return the name of a vector of weights, with members sorted by name. A single member at weight 1 keeps its name.

    Raises:
        ValueError: a weight is not a positive number of tenths, so that two vectors could have one name.
    """
    for name, weight in weights.items():
        if weight <= 0 or abs(weight * TENTHS - round(weight * TENTHS)) > 1e-9:
            raise ValueError(f"weight {weight} of {name} is not a positive number of tenths")
    rounded = {name: round(weights[name], 1) for name in sorted(weights)}
    return "+".join(name if weight == 1 else f"{weight}*{name}" for name, weight in rounded.items())


def parse_composition(name: str) -> dict[str, float]:
    """Return the weights that a composition's name stands for. Inverse of `composition_name`."""
    terms = (term.rpartition("*") for term in name.split("+"))
    return {member: float(weight or 1) for weight, _, member in terms}


def compose(members: Mapping[str, Adapter], weights: Mapping[str, float], folder: Path) -> Adapter:
    """Add up weighted adapters to one adapter. A single member at weight 1 is returned unchanged.

    Args:
        members: name -> adapter, all of one base.
        weights: name of a member -> weight; 0 leaves the member out.
        folder: cache of compositions. Each is in `folder/<key>/<content hash>`.

    Raises:
        UserError: a member is missing, damaged or not plain LoRA, or members change different modules.
        ValueError: all weights are 0.
    """
    import torch

    weighted = [(members[name], weight) for name, weight in weights.items() if weight]
    weighted.sort(key=lambda pair: (pair[0].digest, pair[1]))
    if not weighted:
        raise ValueError("a composition needs a member with a weight")
    if len(weighted) == 1 and weighted[0][1] == 1:
        return weighted[0][0]
    composed = folder / digest(code_digest(compose), [(member.digest, weight) for member, weight in weighted])
    # Use the cached composition, unless it was altered.
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
        UserError: it is missing, damaged or not plain LoRA.
    """
    lora = read_plain_lora(Path(member.folder))
    return {name: (lora.scale * up.float(), down.float()) for name, (up, down) in lora.factors.items()}


def save_lora_factors(folder: Path, like: Adapter, factors: Factors) -> None:
    """Write factors as a plain adapter in float32 with scale 1; equal factors give equal bytes.

    Args:
        folder: folder to create.
        like: an adapter of the same base and modules. Its configuration is copied.
        factors: factors of each module. If ranks differ, smaller ones are padded with zeros: servers need one rank.
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
    publish_text(folder / "adapter_config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
