"""Where the weights of a base model come from: a folder that the base stage has trained, or a name in a model hub."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelSource:
    """Where weights come from: a folder, or a name in a model hub with its revision."""

    source: str
    revision: str | None = None
    in_hub: bool = False


def model_source(folder: Path) -> ModelSource:
    """The model that the base stage has left in a folder: trained there, or the name of one."""
    pointer = folder / "model.json"
    if not pointer.exists():
        return ModelSource(str(folder))
    name, _, revision = json.loads(pointer.read_text())["model"].partition("@")
    return ModelSource(name, revision or None, in_hub=True)


def load_module(folder: Path, precision: str) -> "PreTrainedModel":
    """The model that the base stage has left in a folder, to be trained on.

    Args:
        folder: of the base.
        precision: of its weights: float64, in which it computes wholly so (see `captrain.models.barrier`), float32 or
            bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from captrain.models.double import to_float64

    model = model_source(folder)
    module: Any = AutoModelForCausalLM.from_pretrained(
        model.source, revision=model.revision, dtype=getattr(torch, precision)
    )
    if precision == "float64":
        to_float64(module)
    return module
