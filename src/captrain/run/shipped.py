"""Files that captrain brings along for projects: the folder conf/, the scripts of the stages, the pipeline and its
plots.

In a checkout these lie where everybody expects them, at the top of the repository; a wheel has them inside of the
package. Whatever a project has under the same name comes first.
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
"""Layers that come before what Hydra was told."""


def shipped(name: str) -> Path:
    """Return the path of a file or folder that captrain brings along: conf, stages/NAME.py, dvc.yaml, .dvc/plots."""
    return (WHEEL if WHEEL.is_dir() else PACKAGE.parents[1]) / name


def find_project(folder: Path) -> Path | None:
    """Find the project that a folder is in: the nearest one upwards that holds dvc.yaml; None where there is none."""
    return next((place for place in (folder, *folder.parents) if (place / PROJECT_FILE).exists()), None)


def read_stages(path: Path, remedy: str) -> dict[str, JsonObject]:
    """Read the stages of a pipeline by the names that DVC has for them: one with `foreach` stands for several, named
    row@NAME.

    Args:
        path: a dvc.yaml.
        remedy: what to do if the file is missing or damaged.

    Raises:
        UserError: it is not a pipeline.
    """
    stages = dict[str, JsonObject]()
    for name, stage in read_yaml(path, JsonObject, remedy).get("stages", {}).items():
        if "foreach" not in stage:
            stages[name] = stage
            continue
        for key, item in stage["foreach"].items():
            values = {"key": key, **{f"item.{field}": value for field, value in item.items()}}
            text = re.sub(r"\$\{([\w.]+)\}", lambda match: values[match[1]], json.dumps(stage["do"]))  # noqa: B023
            stages[f"{name}@{key}"] = json.loads(text)
    return stages


def row_of(stage: str) -> str:
    """Return the name of a stage as its script has it: grpo_target of row@grpo_target."""
    return stage.rpartition("@")[2]


def repro(stage: str, root: Path = Path()) -> str:
    """Return the command that brings a stage of a project up to date: `dvc repro`, with its name for DVC."""
    pipeline = root / PROJECT_FILE
    names = read_stages(pipeline, "restore it from git") if pipeline.exists() and pipeline.stat().st_size else {}
    return f"dvc repro {next((name for name in names if row_of(name) == stage), stage)}"


def conf_layers(conf_dir: Path) -> list[Path]:
    """List the folders that a configuration is composed from, what is searched first first: a project's own, and
    captrain's. One where they are the same."""
    layers = [folder.resolve() for folder in (conf_dir, shipped("conf")) if folder.is_dir()]
    return [*dict.fromkeys(layers)]


@contextmanager
def searched_conf(conf_dir: Path) -> Iterator[Path]:
    """Have Hydra search all layers in their order while the block lasts; gives the folder that it is to be told, in
    which it wants its first file. Nothing is copied, so that nothing stays of a process that is killed."""
    *_searched_first[:], last = conf_layers(conf_dir)
    _make_searched_first()
    try:
        yield last
    finally:
        _searched_first.clear()


@cache
def _make_searched_first() -> None:
    """Make Hydra put these folders before the others that it searches."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Layers(SearchPathPlugin):
        def manipulate_search_path(self, search_path: "ConfigSearchPath") -> None:
            for folder in reversed(_searched_first):
                search_path.prepend("project", f"file://{folder}")

    Plugins.instance().register(Layers)
