"""A whole pipeline in one process, and one adapter more whose checkpoints stay, as another processor makes them.

    python -m support.processor FOLDER

plays the stages of a project that `support.pipeline.make_project` has made. Libraries choose their kernels when they
are loaded, by the processor and by what the environment says, so each choice needs a process of its own.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from support.pipeline import run_stages


def train_and_stop(folder: Path) -> None:
    """Train an adapter in the project's first environment, and leave its workspace with all checkpoints."""
    from captrain.config import build, load_spec
    from captrain.training import GRPO, learner
    from captrain.training.grpo import fit
    from captrain.training.recipe import capability_jobs

    os.chdir(folder)
    spec = load_spec()
    job = replace(capability_jobs(spec, Path("artifacts/base"), Path("results/environments"))[0], rollouts=80)
    policy = learner(job.policy, job.base, job.machine, purpose="a test", way_out="")
    targets = [environment.target(job.machine) for environment in job.environments]
    fit(build(job.trainer, GRPO), job, policy, targets, Path("workspace"))


if __name__ == "__main__":
    run_stages(Path(sys.argv[1]))
    train_and_stop(Path(sys.argv[1]))
