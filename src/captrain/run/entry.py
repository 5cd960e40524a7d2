"""The frame of every program: a stage, a command or a server.

What goes wrong ends in one message (`captrain.run.boundary`). A stage ends in one line that says what it took and
what it made; warnings of libraries, about which its user can do nothing, go to its log and not to the screen.

Wall-clock and CPU seconds of a stage differ from run to run, so they are no part of any result and no output of any
stage: they lie in the cache of this checkout, each named by the digest of the results that it belongs to. A stage that
was restored from the cache keeps the time of the run that made it, if that was here; one that went on from a journal or
checkpoint counts its last part. CPU seconds include worker processes that have ended, and not the jobs of a cluster.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path

from captrain.errors import UserError
from captrain.records import digest, file_digest, publish_json, read_json
from captrain.run import find_project, load_spec
from captrain.run.boundary import ending

LOGS = Path(".cache/logs")
"""The folder of the stages' logs, one of each name, which hold what libraries warn of."""
TIMES = Path(".cache/times")


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
        # The project comes first among the places of modules, for further processes, too.
        project = find_project(Path.cwd())
        if project is not None and str(project) not in sys.path:
            sys.path.insert(0, str(project))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(project), os.environ.get("PYTHONPATH")]))
        try:
            if stage:
                _run_stage(main, name)
            else:
                main()
        except (Exception, KeyboardInterrupt) as error:
            status, text = ending(error)
            if text:
                print(text, file=sys.stderr)
            if isinstance(error, BrokenPipeError):
                # Whoever read has gone: the interpreter must not write what is left, either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(status) from None

    return run


def _run_stage(main: Callable[[], str | None], name: str) -> None:
    """Run a stage, and print its line."""
    # A model of the hub, which may be downloaded; where the specification cannot be read, the stage itself will say so.
    names_model = False
    with suppress(UserError):
        names_model = load_spec(Path("results/spec.yaml")).base.model is not None
    if not names_model:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Warnings of this process and of those forked from it go to a log, which is made with the first of them.
    LOGS.mkdir(parents=True, exist_ok=True)
    logging.captureWarnings(True)
    handler = logging.FileHandler(LOGS / f"{name}.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    with timed(name) as seconds:
        outcome = main()
    paths = (Path("results", f"{name}.json"), Path("results", name), Path("artifacts", name))
    print(f"{name:<16} {seconds():6.1f} s   {outcome or ', '.join(str(path) for path in paths if path.exists())}")


@dataclass(frozen=True)
class Time:
    """Seconds of one stage."""

    wall_s: float
    cpu_s: float


@contextmanager
def timed(stage: str, results: Path = Path("results"), folder: Path = TIMES) -> Iterator[Callable[[], float]]:
    """Write down what the block takes, if it ends well and leaves results of that stage; the block is given what tells
    the seconds since it began."""
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    yield lambda: time.perf_counter() - wall
    if outputs := _outputs_digest(results, stage):
        duration = Time(round(time.perf_counter() - wall, 1), round(sum(os.times()[:4]) - cpu, 1))
        publish_json(folder / stage / f"{outputs}.json", asdict(duration))


def times(root: Path) -> dict[str, Time]:
    """Read the time of each stage whose results here were made here."""
    stages = [folder.name for folder in sorted((root / TIMES).glob("*"))]
    paths = {stage: root / TIMES / stage / f"{_outputs_digest(root / 'results', stage)}.json" for stage in stages}
    return {stage: read_json(path, Time, f"remove {path}") for stage, path in paths.items() if path.exists()}


def _outputs_digest(results: Path, stage: str) -> str:
    """Hash what the stage has left in `results`, "" for nothing."""
    alone = results / f"{stage}.json"
    files = sorted(path for path in (results / stage).rglob("*") if path.is_file())
    files += [alone] if alone.is_file() else []
    return digest([str(path.relative_to(results)) for path in files], file_digest(*files)) if files else ""
