"""Where the weights of a base model come from: a folder that the base stage has trained, or a name in a model hub."""

import json
from dataclasses import dataclass
from pathlib import Path


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
