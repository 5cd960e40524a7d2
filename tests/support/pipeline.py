"""The pipeline without DVC: all stages in one process, which imports torch once.

    python -m support.pipeline FOLDER

plays the stages in a process of its own, for tests that change something which is read at start.
"""

import gc
import sys
from pathlib import Path

import yaml
from support.stages import stage
from support.training import ROOT

from captrain.run import read_stages, row_of


def make_project(folder: Path, *overrides: str, experiment: str = "smoke", seed: int = 0) -> Path:
    """Make a project that has not run yet: this checkout's configuration and stages, linked, and a choice of its
    own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("conf", "stages", "dvc.yaml"):
        (folder / name).symlink_to(ROOT / name)
    choice = {"experiment": experiment, "seed": seed, "overrides": list(overrides)}
    (folder / "params.yaml").write_text(yaml.safe_dump(choice))
    return folder


def stages_of(folder: Path) -> list[str]:
    """List a project's stages in the order of its dvc.yaml."""
    return [row_of(name) for name in read_stages(folder / "dvc.yaml", "")]


def run_stages(folder: Path, *names: str) -> None:
    """Run the named stages in this process, or all of them."""
    for name in names or stages_of(folder):
        gc.collect()
        gc.freeze()  # the loaded libraries are never garbage, so leave them out of the searches
        status = stage(folder, name)
        assert status == 0, f"stage {name} ended with {status}"


if __name__ == "__main__":
    run_stages(Path(sys.argv[1]), *sys.argv[2:])
