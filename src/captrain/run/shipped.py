"""Files that captrain ships for projects: conf/, stages/, dvc.yaml and the plots.

A checkout has them at the top of the repository, a wheel inside the package. A project's own file of the same name
wins.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from captrain.records import JsonObject, read_yaml

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath

PACKAGE = Path(__file__).parents[1]
WHEEL = PACKAGE / "pipeline"
"""Folder of these files in a wheel (see `BuildWithPipeline`)."""
PROJECT_FILE = "dvc.yaml"
"""File that makes a folder a project."""
_searched_first: list[Path] = []
"""Configuration folders that Hydra searches first."""


def shipped(name: str) -> Path:
    """Return the path of a shipped file or folder: conf, stages/NAME.py, dvc.yaml, .dvc/plots."""
    return (WHEEL if WHEEL.is_dir() else PACKAGE.parents[1]) / name


def find_project(folder: Path) -> Path | None:
    """Return the nearest parent folder (or the folder itself) that has a dvc.yaml. None if there is none."""
    return next((place for place in (folder, *folder.parents) if (place / PROJECT_FILE).exists()), None)


def read_stages(path: Path, remedy: str) -> dict[str, JsonObject]:
    """Read the stages of a dvc.yaml by DVC's names; a stage with `foreach` becomes several, such as row@NAME.

    Args:
        path: path of the dvc.yaml.
        remedy: for the message if the file is missing or damaged.

    Raises:
        UserError: it is not a pipeline.
    """
    return expand_stages(read_yaml(path, JsonObject, remedy).get("stages", {}))


def expand_stages(pipeline: JsonObject) -> dict[str, JsonObject]:
    """Expand the section `stages` of a dvc.yaml, see `read_stages`."""
    stages = dict[str, JsonObject]()
    for name, stage in pipeline.items():
        if "foreach" not in stage:
            stages[name] = stage
            continue
        for key, item in stage["foreach"].items():
            fields = {"": item} if isinstance(item, str) else {f".{field}": value for field, value in item.items()}
            values = {"key": key, **{f"item{field}": value for field, value in fields.items()}}
            text = re.sub(r"\$\{([\w.]+)\}", lambda match: values[match[1]], json.dumps(stage["do"]))  # noqa: B023
            stages[f"{name}@{key}"] = json.loads(text)
    return stages


def row_of(stage: str) -> str:
    """Return the short name of a stage: grpo_target for row@grpo_target. Other names are returned unchanged."""
    return stage.removeprefix("row@")


def repro(stage: str, root: Path = Path()) -> str:
    """Return the command `dvc repro` with DVC's name of a stage."""
    pipeline = root / PROJECT_FILE
    names = read_stages(pipeline, "restore it from git") if pipeline.exists() and pipeline.stat().st_size else {}
    return f"dvc repro {next((name for name in names if row_of(name) == stage), stage)}"


def conf_layers(conf_dir: Path) -> list[Path]:
    """List the configuration folders in search order: the project's and captrain's, without duplicates."""
    layers = [folder.resolve() for folder in (conf_dir, shipped("conf")) if folder.is_dir()]
    return [*dict.fromkeys(layers)]


@contextmanager
def searched_conf(conf_dir: Path) -> Iterator[Path]:
    """Make Hydra search all configuration folders in order within the block. Yields the folder to pass to Hydra.

    Nothing is copied, so a killed process leaves nothing behind.
    """
    *_searched_first[:], last = conf_layers(conf_dir)
    _make_searched_first()
    try:
        yield last
    finally:
        _searched_first.clear()


@cache
def _make_searched_first() -> None:
    """Register a plugin of Hydra that searches `_searched_first` first."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Layers(SearchPathPlugin):
        def manipulate_search_path(self, search_path: "ConfigSearchPath") -> None:
            for folder in reversed(_searched_first):
                search_path.prepend("project", f"file://{folder}")

    Plugins.instance().register(Layers)
