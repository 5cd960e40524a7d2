"""The frame of every program: a stage, a command or a server.

What goes wrong ends in one message (`captrain.execution.boundary`). A stage ends in one line that says what it took and
what it made; warnings of libraries, about which its user can do nothing, go to its log and not to the screen.
"""

import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import NoReturn

from captrain.config import find_project, load_spec
from captrain.errors import UserError
from captrain.execution.boundary import ending
from captrain.execution.clock import timed
from captrain.execution.optional import light_installation

LOGS = Path(".cache/logs")
"""The folder of the stages' logs, one of each name, which hold what libraries warn of."""


def entry_point(main: Callable[[], str | None], *, stage: bool = True, name: str = "") -> Callable[[], None]:
    """Wrap a program's main so that whatever it raises ends in one message, and what the user can mend with exit status
    2 and without a traceback. The modules of the project that it is started in can be imported: a benchmark of the
    user's own is one.

    Args:
        main: to be wrapped. What it returns is what its line says that it made; None names its outputs.
        stage: whether it is a stage's: what it took is noted and printed and, where the specification names no model,
            libraries of models ask no hub for anything. What starts stages leaves that to each of them.
        name: of the stage; "" for that of the file.
    """
    name = name or Path(main.__code__.co_filename).stem

    @wraps(main)
    def run() -> None:
        # Libraries make millions of objects that stay: looking through them as often as by default takes a fifth of the
        # time in which they are imported.
        gc.set_threshold(100_000, 20, 100)
        add_project_to_path()
        if stage and not _names_model(Path("results/spec.yaml")):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            if stage:
                log_warnings(LOGS / f"{name}.log")
                with timed(name) as seconds:
                    outcome = main()
                print(f"{name:<16} {seconds():6.1f} s   {outcome or _outputs(name)}")
            else:
                main()
        except ModuleNotFoundError as error:
            _end(light_installation(error) or error)
        except (Exception, KeyboardInterrupt) as error:
            _end(error)

    return run


def _names_model(path: Path) -> bool:
    """Return whether a specification names a model of the hub, which may be downloaded.

    False where it cannot be read, which the stage itself will say.
    """
    with suppress(UserError):
        return load_spec(path).base.model is not None
    return False


def log_warnings(path: Path) -> None:
    """Append warnings of this process and of those forked from it to a log, which is made with the first of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.captureWarnings(True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def _outputs(stage: str) -> str:
    paths = (Path("results", f"{stage}.json"), Path("results", stage), Path("artifacts", stage))
    return ", ".join(str(path) for path in paths if path.exists())


def _end(error: BaseException) -> NoReturn:
    status, text = ending(error)
    if text:
        print(text, file=sys.stderr)
    if isinstance(error, BrokenPipeError):
        # Whoever read has gone: the interpreter must not write what is left, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(status) from None


def add_project_to_path() -> None:
    """Put the project of the current folder first among the places of modules, for further processes, too."""
    project = find_project(Path.cwd())
    if project is not None and str(project) not in sys.path:
        sys.path.insert(0, str(project))
        inherited = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{project}{os.pathsep}{inherited}" if inherited else str(project)
