"""How a stage, a command or a server ends where the person at the keyboard can mend what is wrong: in one message."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from captrain.config import find_project
from captrain.errors import InfrastructureError, UserError
from captrain.execution.clock import timed
from captrain.execution.optional import light_installation


def entry_point(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a stage's main so that a `UserError`, or an infrastructure fault that no rollout could take, ends in one
    message and exit status 2, without a traceback; and note what the stage took. The modules of the project that it is
    started in can be imported: a benchmark of the user's own is one."""

    @wraps(main)
    def run() -> None:
        add_project_to_path()
        try:
            with timed(Path(main.__code__.co_filename).stem):
                main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except ModuleNotFoundError as error:
            missing = light_installation(error)
            if missing is None:
                raise
            print(f"error: {missing}", file=sys.stderr)
            raise SystemExit(2) from None
        except InfrastructureError as error:
            print(
                f"error: infrastructure: {error}\n  remedy: mend it and run again; what is whole is kept",
                file=sys.stderr,
            )
            raise SystemExit(2) from None

    return run


def add_project_to_path() -> None:
    """Put the project of the current folder first among the places of modules, for further processes, too."""
    project = find_project(Path.cwd())
    if project is not None and str(project) not in sys.path:
        sys.path.insert(0, str(project))
        inherited = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{project}{os.pathsep}{inherited}" if inherited else str(project)
