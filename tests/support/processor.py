"""A whole pipeline in one process, as another processor makes it.

    python -m support.processor FOLDER [STAGE ...]

plays the stages of a project that `support.pipeline.make_project` has made, those that are named with two workers,
which load all libraries anew. Libraries choose their kernels when they are loaded, by the processor and by what the
environment says, so each choice needs a process of its own.
"""

import sys
from pathlib import Path

import yaml
from support.pipeline import run_stages, stages_of
from support.steps import record

record()  # in processes that train for this one, too: they import what it is


def employ(folder: Path, workers: int) -> None:
    """Have the stages of a project from here on work with so many processes."""
    path = folder / "results/spec.yaml"
    if path.exists():
        spec = yaml.safe_load(path.read_text())
        spec["machine"]["workers"] = workers
        path.write_text(yaml.safe_dump(spec, sort_keys=False))


if __name__ == "__main__":
    project, spread = Path(sys.argv[1]), sys.argv[2:]
    for stage in stages_of(project):
        employ(project, 2 if stage in spread else 1)
        run_stages(project, stage)
