"""LoRA adapters as files: plain PEFT folders that equal weights make equal, known by the hash of their content."""

import json
from dataclasses import dataclass
from pathlib import Path

from captrain.errors import UserError
from captrain.models.weights import model_source
from captrain.records import file_digest


@dataclass(frozen=True)
class Adapter:
    """An adapter to act with: the folder it lies in, and the digest that rollouts record."""

    folder: str
    digest: str


def adapter_digest(folder: Path, stage: str = "adapters") -> str:
    """Content hash of an adapter in plain PEFT format: of its configuration and its weights, and of no other file.

    Args:
        folder: of the adapter.
        stage: which has published it, for messages.

    Raises:
        UserError: one of the two files is missing.
    """
    paths = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    if missing := [path for path in paths if not path.exists()]:
        raise UserError(f"{missing[0]} is missing", f"run `dvc repro {stage}` to make it again")
    return file_digest(*paths)


def settle(folder: Path, base: Path, policy: str) -> None:
    """Make a saved adapter one that equal weights always give: the path of the base on this machine is no part of it,
    and key order and unset fields must not vary. A base that has a name is called by it, another by the `policy`'s
    digest."""
    model = model_source(base)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = model.source if model.in_hub else f"captrain-base-{policy}"
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)
