"""The pipeline without DVC: its stages one after the other in one process, which imports torch once for all of them.

    python -m support.pipeline FOLDER

plays a project's stages in a process of its own, as a test needs that sets what is read when a process starts.
"""

import gc
import sys
from pathlib import Path

import yaml
from support.stages import stage
from support.training import ROOT

from captrain.run import read_stages, row_of


def make_project(folder: Path, *overrides: str, experiment: str = "smoke", seed: int = 0) -> Path:
    """A project in which nothing has run: the configuration, stages and pipeline of this checkout, linked, and a
    choice of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("conf", "stages", "dvc.yaml"):
        (folder / name).symlink_to(ROOT / name)
    choice = {"experiment": experiment, "seed": seed, "overrides": list(overrides)}
    (folder / "params.yaml").write_text(yaml.safe_dump(choice))
    return folder


def stages_of(folder: Path) -> list[str]:
    """The stages of a project's pipeline, in the order of its dvc.yaml."""
    return [row_of(name) for name in read_stages(folder / "dvc.yaml", "")]


def run_stages(folder: Path, *names: str) -> None:
    """Run stages of a project's pipeline in this process; without names all of them."""
    for name in names or stages_of(folder):
        gc.collect()
        gc.freeze()  # libraries search for garbage often, and what the stages before have loaded is none
        status = stage(folder, name)
        assert status == 0, f"stage {name} ended with {status}"


if __name__ == "__main__":
    run_stages(Path(sys.argv[1]), *sys.argv[2:])
