"""Loads and checks the weights of a base model, from a folder of the base stage or from a model hub."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captrain.errors import UserError
from captrain.records import JsonObject, file_digest, publish_text, read_bytes, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DENSE = ("qwen3", "llama")
"""Architectures with captrain's own fast code, which needs only the weights: `DenseDecoder` and `token_scores`."""
TRUST = "CAPTRAIN_TRUST_REMOTE_CODE"
SUMS = "SHA256SUMS"
"""File with the hashes of a model's files."""


@dataclass(frozen=True)
class ModelSource:
    """A folder, or a name in a model hub with its revision."""

    source: str
    revision: str | None = None
    in_hub: bool = False


def model_source(folder: Path) -> ModelSource:
    """Return the source of a base model: its folder, or the hub model that model.json in the folder names.

    Raises:
        UserError: as `require_recorded`.
    """
    require_recorded(folder)
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


def record_files(folder: Path) -> None:
    """Write the SHA-256 of every file of a finished model into the folder, in the format of `sha256sum`."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != SUMS]
    publish_text(folder / SUMS, "".join(f"{_sha256(path)}  {path.name}\n" for path in paths))


def require_recorded(folder: Path) -> None:
    """Check that a model's files match the recorded hashes, and that a base's weights match results/base.json.

    A model without recorded hashes is accepted.

    Raises:
        UserError: weights, tokenizer, chat template or another file were altered, added or removed.
    """
    remedy = f"it was altered, or is of another run: remove {folder}, then run `dvc checkout` or `dvc repro base`"
    if altered := altered_files(folder):
        raise UserError(f"{folder / altered[0]} is not the file that {folder / SUMS} has the hash of", remedy)
    record, weights = folder.parent.parent / "results/base.json", folder / "model.safetensors"
    if folder.parts[-2:] != ("artifacts", "base") or not record.exists():
        return
    summary, pointer = read_json(record, JsonObject), folder / "model.json"
    if "weights_sha256" in summary and not (folder / SUMS).exists():
        raise UserError(f"{folder} lacks {SUMS}, so that nothing tells whether its files were altered", remedy)
    if pointer.exists() and (name := read_json(pointer, JsonObject).get("model")) != summary.get("model", name):
        raise UserError(f"{pointer} names {name}, and {record} {summary['model']}", remedy)
    expected = summary.get("weights_sha256") if weights.exists() else None
    if expected is not None and (content := file_digest(weights)) != expected:
        raise UserError(f"{weights} has the hash {content}, and {record} has {expected}", remedy)


def altered_files(folder: Path) -> list[str]:
    """Return the names of files that differ from the record of `record_files`; [] if there is none."""
    record = folder / SUMS
    if not record.exists():
        return []
    lines = [line.partition("  ") for line in read_bytes(record).decode(errors="replace").splitlines()]
    expected = {name: digest for digest, _, name in lines}
    found = {path.name for path in folder.iterdir() if path.is_file() and path.name[0] != "."} - {SUMS}
    present = {name: _sha256(folder / name) for name in found}
    return sorted(name for name in {*expected, *present} if expected.get(name) != present.get(name))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def computes_on_cpu(precision: str) -> bool:
    """Return whether training uses the CPU: without a GPU, and always in float64.

    float64 training gives the same bytes on every CPU (see `captrain.models.barrier`), but not on GPUs.
    """
    import torch

    return precision == "float64" or not torch.cuda.is_available()


def load_module(folder: Path, precision: str) -> "PreTrainedModel":
    """Load a base for training.

    Args:
        folder: folder of the base.
        precision: type of the weights: float64 (all computations too, see `to_float64`), float32 or bfloat16.

    Raises:
        UserError: the model needs custom code that is not allowed (see `trusts_code`).
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
