"""A pipeline with one stage that dispatches chores and publishes their results.

    python -m support.cluster.pipeline NAME...

It is killed at the moment that the variable MOMENT names.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import JobPaths
from support.cluster.work import Chore, chore, refuse

from captrain.records import publish_json
from captrain.run import launch, slurm
from captrain.run.entry import entry_point
from captrain.run.machine import Machine, Slurm

MACHINE = Machine(launcher="slurm", slurm=Slurm(memory="100MB", minutes=5, resubmissions=2), workers=1, batch=1)


def die(*_: Any, **__: Any) -> Any:
    """End like a machine that loses power."""
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(moment: str) -> None:
    """Make this process die at a moment."""
    patches: dict[str, tuple[Any, str, Any]] = {
        "before sbatch": (SlurmExecutor, "_submit_command", die),
        "after sbatch, before the job has its work": (JobPaths, "move_temporary_file", die),
        "while waiting": (slurm.Dispatch, "_look", die),
        "before publishing": (sys.modules[__name__], "publish_json", die),
    }
    if moment:
        setattr(*patches[moment])


@entry_point
def main() -> None:
    """Run chores that wait for the file `go`, or that fail, and write done.json."""
    prepare(os.environ.get("MOMENT", ""))
    function = refuse if "scarce" in sys.argv else chore
    publish_json(
        Path("done.json"), launch.run(function, [Chore(name, "go") for name in sys.argv[1:]], MACHINE, "chores")
    )


if __name__ == "__main__":
    main()
