"""Entry point of every program: stage, command or server.

An error ends in one message (`captrain.run.boundary`). A stage ends with one line: its name, its time and its outputs.
Warnings of libraries go to the stage's log and not to the terminal.

Seconds differ from run to run, so they are not results. They are stored in the cache of this checkout, named by the
digest of the stage's results. A stage restored from the cache keeps the time of the run that made it, if that was here.
A resumed stage counts its last part. CPU seconds include finished worker processes, but no cluster jobs.
"""

import codecs
import gc
import locale
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path

from captrain.errors import UserError
from captrain.records import digest, file_digest, plain, publish_json, read_json, redacted
from captrain.run import find_project, launch, load_spec
from captrain.run.boundary import ending
from captrain.run.streams import clean_output

LOGS = Path(".cache/logs")
"""Folder of the stages' logs, which hold warnings of libraries."""
TIMES = Path(".cache/times")
PLACE = "CAPTRAIN_PLACE"
"""Environment variable with the position of a stage among the stages of `captrain run`, such as "7 of 27".

Empty for a stage that the configuration turns off. Such a stage prints nothing.
"""


def entry_point(main: Callable[[], str | None], *, stage: bool = True, name: str = "") -> Callable[[], None]:
    """Wrap the main function of a program.

    An error ends the program with one message and an exit status, see `captrain.run.boundary`. Modules of the current
    project, such as a user's own benchmark, become importable.

    Args:
        main: function to wrap. It returns the text of the program's last line. None: list the outputs instead.
        stage: whether the program is a stage. Its time is then stored and printed. If the specification names no model,
            libraries are kept offline.
        name: name of the stage; "" for the name of the file.
    """
    name = name or Path(main.__code__.co_filename).stem

    @wraps(main)
    def run() -> None:
        _use_utf8()
        # Libraries make millions of permanent objects. With the default threshold, garbage collection takes a fifth of
        # the import time.
        gc.set_threshold(100_000, 20, 100)
        before = signal.getsignal(signal.SIGINT)
        with clean_output():
            try:
                if before is signal.SIG_DFL:  # as `captrain/__init__.py` set it
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                _import_from_project()
                if stage:
                    _run_stage(main, name)
                else:
                    main()
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt):
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut off the message
                status, text = ending(error)
                if isinstance(error, KeyboardInterrupt) and stage and PLACE in os.environ:
                    text = ""  # `captrain run` says it
                if text:
                    print(text, file=sys.stderr)
                if isinstance(error, KeyboardInterrupt):
                    # At once: the interpreter would first free the libraries, for a second or more on a busy machine.
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
                if isinstance(error, BrokenPipeError):
                    # The reader of the pipe is gone, so the interpreter must not flush the remaining output.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(status) from None
            finally:
                if before is signal.SIG_DFL:  # no traceback while the interpreter ends either
                    signal.signal(signal.SIGINT, before)

    return run


class _StageLog(logging.FileHandler):
    """A stage's log, which is created on the first line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (named by logging)
        """Skip a line that cannot be written, such as on a full disk. The stage's own files then fail with one
        message.
        """


class _CleanFormatter(logging.Formatter):
    """Formats lines of a log without keys and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return redacted(plain(super().format(record)))


def _import_from_project() -> None:
    """Put the current project first on the import path, also for child processes.

    Raises:
        UserError: the current folder was removed.
    """
    try:
        project = find_project(Path.cwd())
    except FileNotFoundError:
        raise UserError("the current folder was removed", "change to a folder that exists") from None
    if project is not None and str(project) not in sys.path:
        sys.path.insert(0, str(project))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(project), os.environ.get("PYTHONPATH")]))


def _use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale has another encoding.

    Files and names of files then have the same bytes under every locale, in libraries and child processes too.
    """
    is_utf8 = sys.flags.utf8_mode or codecs.lookup(locale.getencoding()).name == "utf-8"
    if not is_utf8 and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        words: Sequence[str | bytes] = sys.orig_argv[1:]
        with suppress(OSError):
            # The bytes themselves: some locales decode words that they cannot encode again.
            words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
        os.execv(sys.executable, [sys.executable, *words])


def _run_stage(main: Callable[[], str | None], name: str) -> None:
    """Run a stage, and print its line. The stage ends with the process that runs the pipeline."""
    launch.end_with_pipeline()
    # A model of the hub may be downloaded. If the specification cannot be read, the stage itself reports it.
    names_model = False
    with suppress(UserError):
        names_model = load_spec(Path("results/spec.yaml")).base.model is not None
    if not names_model:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Warnings of this process and its forks go to a log, created on the first warning.
    LOGS.mkdir(parents=True, exist_ok=True)
    logging.captureWarnings(True)
    handler = _StageLog(LOGS / f"{name}.log", delay=True)
    handler.setFormatter(_CleanFormatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    with timed(name) as seconds:
        outcome = main()
    paths = (Path("results", f"{name}.json"), Path("results", name), Path("artifacts", name))
    place = os.environ.get(PLACE)
    if place != "":
        said = outcome or ", ".join(str(path) for path in paths if path.exists())
        print(f"{f'{place}  ' if place else ''}{name:<24} {seconds():6.1f} s   {said}")


@dataclass(frozen=True)
class Time:
    """Seconds of one stage."""

    wall_s: float
    cpu_s: float


@contextmanager
def timed(stage: str, results: Path = Path("results"), folder: Path = TIMES) -> Iterator[Callable[[], float]]:
    """Measure the time of the block. Yields a function that returns the seconds so far.

    The time is stored if the block succeeds and the stage has results.
    """
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    yield lambda: time.perf_counter() - wall
    if outputs := _outputs_digest(results, stage):
        duration = Time(round(time.perf_counter() - wall, 1), round(sum(os.times()[:4]) - cpu, 1))
        publish_json(folder / stage / f"{outputs}.json", asdict(duration))


def times(root: Path) -> dict[str, Time]:
    """Read the time of each stage whose current results were made here."""
    stages = [folder.name for folder in sorted((root / TIMES).glob("*"))]
    paths = {stage: root / TIMES / stage / f"{_outputs_digest(root / 'results', stage)}.json" for stage in stages}
    return {stage: read_json(path, Time, f"remove {path}") for stage, path in paths.items() if path.exists()}


def _outputs_digest(results: Path, stage: str) -> str:
    """Hash the stage's files in `results`; "" without files."""
    alone = results / f"{stage}.json"
    files = sorted(path for path in (results / stage).rglob("*") if path.is_file())
    files += [alone] if alone.is_file() else []
    return digest([str(path.relative_to(results)) for path in files], file_digest(*files)) if files else ""
