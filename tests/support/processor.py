"""A whole pipeline in one process, for simulating another processor.

    python -m support.processor FOLDER [STAGE ...]

plays the stages of a project made by `support.pipeline.make_project`. The named stages run with two workers, which
load all libraries again. Libraries choose their kernels when they are loaded, from the processor and the environment,
so each choice needs a new process.
"""

import sys
from pathlib import Path

import yaml
from support.pipeline import run_stages, stages_of
from support.steps import record

record()  # worker processes import this module, too


def employ(folder: Path, workers: int) -> None:
    """Set the number of worker processes for a project's later stages."""
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
