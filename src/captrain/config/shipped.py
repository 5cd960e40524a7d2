"""What captrain brings along for projects: the folder conf/, the scripts of the stages, the pipeline and its plots.

In a checkout these lie where everybody expects them, at the top of the repository; a wheel has them inside of the
package. Whatever a project has under the same name comes first.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
WHEEL = PACKAGE / "pipeline"
"""Where a wheel has them (see `BuildWithPipeline`)."""
PROJECT_FILE = "dvc.yaml"
"""What makes a folder a project."""


def shipped(name: str) -> Path:
    """The path of a file or folder that captrain brings along: conf, stages/NAME.py, dvc.yaml, .dvc/plots."""
    return (WHEEL if WHEEL.is_dir() else PACKAGE.parents[1]) / name


def find_project(folder: Path) -> Path | None:
    """The project that a folder is in: the nearest one upwards that holds dvc.yaml; None where there is none."""
    return next((place for place in (folder, *folder.parents) if (place / PROJECT_FILE).exists()), None)


def conf_layers(conf_dir: Path) -> list[Path]:
    """The folders that a configuration is composed from, what is searched first first: a project's own, and captrain's.
    One where they are the same."""
    layers = [folder.resolve() for folder in (conf_dir, shipped("conf")) if folder.is_dir()]
    return [*dict.fromkeys(layers)]


@contextmanager
def layered_conf(conf_dir: Path) -> Iterator[Path]:
    """One folder with the files of all layers, each from the first that has it; Hydra wants its first file in the first
    folder that it searches."""
    layers = conf_layers(conf_dir)
    if len(layers) == 1:
        yield layers[0]
        return
    with tempfile.TemporaryDirectory(prefix="captrain-conf-") as folder:
        for layer in reversed(layers):
            shutil.copytree(layer, folder, dirs_exist_ok=True)
        yield Path(folder).resolve()
