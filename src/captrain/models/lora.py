"""LoRA adapters as files: plain PEFT folders that equal weights make equal, known by the hash of their content."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from captrain.config import repro
from captrain.errors import UserError
from captrain.models.plain_lora import adapter_config
from captrain.models.targets import peft_experts, plain_experts, plain_targets
from captrain.models.weights import model_source
from captrain.records import file_digest, require_regular

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

CHECKPOINTS = "checkpoints"
"""Folder below an adapter of what it was at points of its training, each named by the rollouts played; and
their hashes in an index."""


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

    weights = model.state_dict() if state is None else state
    plain = {
        name: tensor.float() if tensor.dtype == torch.float64 else tensor
        for name, tensor in weights.items()
        if ".lora_" in name
    }
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(str(folder), state_dict=plain, selected_adapters=["default"])
    if model.peft_config["default"].to_dict().get("target_parameters"):
        _separate_experts(model, folder / "adapter_model.safetensors")
    _settle(folder, base, policy)


def _separate_experts(model: "PeftModel", path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file(plain_experts(model, load_file(path)), path, metadata={"format": "pt"})


def _settle(folder: Path, base: Path, policy: str) -> None:
    model = model_source(base)
    path = folder / "adapter_config.json"
    config = adapter_config(folder)
    config["base_model_name_or_path"] = model.source if model.in_hub else f"captrain-base-{policy}"
    config |= {"target_modules": plain_targets(config), "target_parameters": None}
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
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
    folder = Path(start.folder)
    require_trained(start)
    config, expected = adapter_config(folder), model.peft_config["default"].to_dict()
    for name in ("r", "lora_alpha", "target_modules"):
        before, after = (
            plain_targets(value) if name == "target_modules" else value[name] for value in (config, expected)
        )
        if before != after:
            raise UserError(
                f"the adapter in {folder} has {name} = {before}, and the trainer {after}",
                "train both with the same rank, alpha and targets",
            )
    load_weights(model, folder)


def load_weights(model: "PeftModel", folder: Path, name: str = "default") -> None:
    """Give an adapter of a PEFT model the weights of a saved one of its shape, in place.

    Args:
        model: that has the adapter.
        folder: of the saved one.
        name: of the adapter in the model.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    tensors = peft_experts(model, load_peft_weights(str(folder), device="cpu"))
    set_peft_model_state_dict(model, tensors, adapter_name=name)
