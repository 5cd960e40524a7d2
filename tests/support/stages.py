"""Stages of the pipeline, run in this process."""

import contextlib
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command_of(name: str, root: Path = Path()) -> list[str]:
    """Return the script and arguments of a stage, below a folder that contains `stages/`."""
    group, _, row = name.partition("@")
    script = Path("stages") / f"{group}.py"
    if not (ROOT / script).exists():
        return [str(root / "stages/row.py"), name]
    return [str(root / script), *filter(None, [row])]


def run_here(name: str, root: Path = Path()) -> None:
    """Run a stage in the current folder. A failure raises SystemExit."""
    before, sys.argv = sys.argv, command_of(name, root)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before


def stage(folder: Path, name: str) -> int:
    """Run a stage in a project's folder with the project's scripts, and return its exit status."""
    with contextlib.chdir(folder):
        try:
            run_here(name)
        except SystemExit as end:
            return int(end.code or 0)
    return 0
