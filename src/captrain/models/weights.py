"""Weights of a base model: from a folder of the base stage, or by a name in a model hub."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captrain.errors import UserError
from captrain.records import JsonObject, file_digest, read_bytes, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DENSE = ("qwen3", "llama")
"""Architectures with code of our own: the engine decodes them from their weights alone, and training computes shared
beginnings of rows once."""
TRUST = "CAPTRAIN_TRUST_REMOTE_CODE"


@dataclass(frozen=True)
class ModelSource:
    """A folder, or a name in a model hub with its revision."""

    source: str
    revision: str | None = None
    in_hub: bool = False


def model_source(folder: Path) -> ModelSource:
    """Return the source of the base in a folder: the folder itself, or the model that its model.json names."""
    pointer = folder / "model.json"
    if not pointer.exists():
        return ModelSource(str(folder))
    name, _, revision = read_json(pointer, dict[str, str])["model"].partition("@")
    return ModelSource(name, revision or None, in_hub=True)


def trusts_code(source: Path | str, revision: str | None = None) -> bool:
    """Return `trust_remote_code` for a model: true only if `CAPTRAIN_TRUST_REMOTE_CODE` is 1.

    Args:
        source: folder, or name in the cache of the model hub.
        revision: of a name.

    Raises:
        UserError: the model has code of its own (`auto_map`), and that is not allowed.
    """
    if os.environ.get(TRUST) == "1":
        return True
    for name in ("config.json", "tokenizer_config.json"):
        path = Path(source) / name
        if not path.is_file() and not Path(source).is_dir():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(str(source), name, revision=revision)
            path = Path(cached) if isinstance(cached, str) else path
        if path.is_file() and b'"auto_map"' in read_bytes(path):
            raise UserError(
                f"model {source} brings Python code of its own ({name} has auto_map), which would run with your rights",
                f"choose a model that transformers knows, or read its code and set {TRUST}=1",
            )
    return False


def require_recorded(folder: Path) -> None:
    """Refuse a base whose weights differ from the record in results/base.json. A folder elsewhere has no record.

    Raises:
        UserError: the weights were altered, or are of another run.
    """
    record, weights = folder.parent.parent / "results/base.json", folder / "model.safetensors"
    if folder.parts[-2:] != ("artifacts", "base") or not record.exists() or not weights.exists():
        return
    expected = read_json(record, JsonObject).get("weights_sha256")
    if expected is not None and (content := file_digest(weights)) != expected:
        raise UserError(
            f"{weights} has the hash {content}, and {record} has {expected}",
            "it was altered, or is of another run: remove it, then run `dvc checkout` or `dvc repro base`",
        )


def computes_on_cpu(precision: str) -> bool:
    """Return whether training in a precision uses the CPU: without a GPU, and in float64, which gives the same bytes on
    every CPU (see `captrain.models.barrier`) but not on GPUs."""
    import torch

    return precision == "float64" or not torch.cuda.is_available()


def load_module(folder: Path, precision: str) -> "PreTrainedModel":
    """Load a base for training.

    Args:
        folder: of the base.
        precision: of its weights: float64, with all computations in float64 (see `to_float64`), float32 or bfloat16.

    Raises:
        UserError: it has code of its own.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from captrain.models.dense import to_float64

    # With rows of different lengths, cuDNN's attention gives gradients that are not finite (seen on an H200 with torch
    # 2.11, heads 32 wide, in bfloat16); other kernels do not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = model_source(folder)
    module: Any = AutoModelForCausalLM.from_pretrained(
        model.source,
        revision=model.revision,
        dtype=getattr(torch, precision),
        trust_remote_code=trusts_code(model.source, model.revision),
    )
    if precision == "float64":
        to_float64(module)
    return module
