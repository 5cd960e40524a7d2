"""Weights of a base model, from a folder that the base stage has trained or by a name in a model hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captrain.errors import UserError
from captrain.records import JsonObject, file_digest, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DENSE = ("qwen3", "llama")
"""Architectures whose every part is known here: the engine decodes them from their weights alone, and training may
compute the beginnings of rows once."""


@dataclass(frozen=True)
class ModelSource:
    """Source of weights: a folder, or a name in a model hub with its revision."""

    source: str
    revision: str | None = None
    in_hub: bool = False


def model_source(folder: Path) -> ModelSource:
    """Return the source of the model that the base stage has left in a folder: trained there, or the name of one."""
    pointer = folder / "model.json"
    if not pointer.exists():
        return ModelSource(str(folder))
    name, _, revision = read_json(pointer, dict[str, str])["model"].partition("@")
    return ModelSource(name, revision or None, in_hub=True)


def require_recorded(folder: Path) -> None:
    """Refuse a base whose weights are not those that its stage has recorded in results/base.json, where it has: what is
    trained on others, or served as them, would be called by the wrong name. A folder elsewhere has no record.

    Raises:
        UserError: the weights were altered, or are of another run.
    """
    record, weights = folder.parent.parent / "results/base.json", folder / "model.safetensors"
    if folder.parts[-2:] != ("artifacts", "base") or not record.exists() or not weights.exists():
        return
    expected = read_json(record, JsonObject).get("weights_sha256")
    if expected is not None and (content := file_digest(weights)) != expected:
        raise UserError(
            f"{weights} is {content}, and {record} has {expected}",
            "it was altered, or is of another run: remove it, and `dvc checkout` or `dvc repro base` makes it again",
        )


def load_module(folder: Path, precision: str) -> "PreTrainedModel":
    """Load the model that the base stage has left in a folder, to be trained on.

    Args:
        folder: of the base.
        precision: of its weights: float64, in which it computes wholly so (see `captrain.models.barrier`), float32 or
            bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from captrain.models.dense import to_float64

    model = model_source(folder)
    module: Any = AutoModelForCausalLM.from_pretrained(
        model.source, revision=model.revision, dtype=getattr(torch, precision)
    )
    if precision == "float64":
        to_float64(module)
    return module
