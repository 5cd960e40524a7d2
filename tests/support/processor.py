"""A whole pipeline in one process, as another processor makes it.

    python -m support.processor FOLDER

plays the stages of a project that `support.pipeline.make_project` has made. Libraries choose their kernels when they
are loaded, by the processor and by what the environment says, so each choice needs a process of its own.
"""

import sys
from pathlib import Path

from support.pipeline import run_stages
from support.steps import record

record()  # in processes that train for this one, too: they import what it is

if __name__ == "__main__":
    run_stages(Path(sys.argv[1]))
