"""Experiment trackers: the steps of a training, on the page of a run in each tracker that `machine.report_to` names.

A run is named by what decides the adapter, so that a training which goes on after a kill goes on with its run: the
tracker is asked for the last step that it holds, and gets those that follow, each once. What the page says of the
training, links to spec and dvc.lock among it, is said when the run begins. Nothing is read back: results are the same
bytes with trackers and without. A tracker that fails on the way ends no training: it gets what it lacks with the next
step, and the log says so.
"""

import json
import math
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from transformers import Trainer, TrainerCallback

from captrain.errors import UserError
from captrain.records import JsonObject, file_digest
from captrain.training import collectives

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "captrain"
"""Project of the runs, where the tracker's own variable names no other."""
SOURCES = ("results/spec.yaml", "dvc.lock")
"""Files that say what a run is of."""
LOCAL = Path(".cache/trackers")
"""Folder of what trackers keep on this disk, where their own variables name no other."""
WANDB_HEADER, FRAME, BLOCK, WHOLE, LAST = 7, 7, 1 << 15, 1, 4
"""Sizes in W&B's files: bytes of the header, of a record's frame, of a block; kinds of frames that end a record."""
Step = dict[str, int | float]


@dataclass(frozen=True)
class RunPage:
    """Page of a run: the id by which it is found again, its name, and what stands on it."""

    id: str
    name: str
    settings: Mapping[str, str | int | float]

    @property
    def markdown(self) -> str:
        """The page's text."""
        return "\n\n".join(f"**{name}**: {value}" for name, value in self.settings.items())


def run_page(name: str, workspace: Path, settings: Mapping[str, object]) -> RunPage:
    """Describe a training for its page.

    Args:
        name: of the adapter.
        workspace: named by what decides the adapter.
        settings: of the training.
    """
    values = {
        key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in settings.items()
    }
    links = {path: f"[{file_digest(Path(path))}]({link(Path(path))})" for path in SOURCES if Path(path).exists()}
    return RunPage(workspace.name, f"{name}-{workspace.name[:8]}", {"adapter": name, **values, **links})


def link(path: Path) -> str:
    """Link to a file as it is now: at the origin of its repository where that has it so, else on this disk."""
    origin, commit = _git("remote", "get-url", "origin"), _git("rev-parse", "HEAD")
    disk = path.resolve().as_uri()
    if not origin or _git("diff", "--name-only", "HEAD", "--", str(path)) or not _git("branch", "-r", "--contains"):
        return disk
    if not _git("ls-files", "--", str(path)):
        return disk
    place = re.fullmatch(r"(?:\w+://)?(?:[^@/]*@)?([\w-]+(?:\.[\w-]+)+)(?::\d+)?[:/](.+?)(?:\.git)?/?", origin)
    return f"https://{place[1]}/{place[2]}/blob/{commit}/{_git('rev-parse', '--show-prefix')}{path}" if place else disk


def _git(*arguments: str) -> str:
    """Run a git command; its output, "" where it fails."""
    try:
        process = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return ""
    return "" if process.returncode else process.stdout.strip()


class Opening(Protocol):
    """Opening of a run in one tracker."""

    def __call__(self, page: RunPage) -> "tuple[GeneralTracker, int]":
        """Begin the run, or go on with it; returns its tracker, and the last step that it holds, 0 for none."""
        ...


def _tensorboard(page: RunPage) -> "tuple[GeneralTracker, int]":
    from accelerate.tracking import TensorBoardTracker
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", LOCAL / "tensorboard"))
    (folder / page.name).mkdir(parents=True, exist_ok=True)
    events = EventAccumulator(str(folder / page.name), size_guidance={"scalars": 0})
    events.Reload()
    scalars = events.Tags()["scalars"]
    last = max((event.step for name in scalars for event in events.Scalars(name)), default=0)
    # Files are read in the order of their names, which begin with the second in which they were made.
    while any(path.name.split(".")[3] >= f"{int(time.time()):010d}" for path in (folder / page.name).glob("events.*")):
        time.sleep(0.05)
    # A kill may have left a part of the last step: TensorBoard forgets it from there on, and gets it again.
    tracker = TensorBoardTracker(page.name, str(folder), purge_step=last or None)
    tracker.start()
    tracker.writer.add_text("run", page.markdown)
    return tracker, max(0, last - 1)


def _trackio(page: RunPage) -> "tuple[GeneralTracker, int]":
    from accelerate.tracking import TrackioTracker

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    # Measures of the machine would make a run of their own of one that was killed before its first step.
    tracker = TrackioTracker(
        project,
        name=page.name,
        resume="allow",
        config=dict(page.settings),
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    tracker.start()
    return tracker, max(0, tracker.run._next_step - 1)


def _wandb(page: RunPage) -> "tuple[GeneralTracker, int]":
    from accelerate.tracking import WandBTracker

    folder = Path(os.environ.get("WANDB_DIR", LOCAL))
    folder.mkdir(parents=True, exist_ok=True)
    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT", PROJECT),
        id=page.id,
        name=page.name,
        notes=page.markdown,
        config=dict(page.settings),
        resume="allow",
        dir=str(folder),
    )
    tracker.start()
    files = (folder / "wandb").glob(f"offline-run-*-{page.id}/*.wandb")
    steps = (int(row["_step"]) for path in files for row in wandb_rows(path.read_bytes()))
    return tracker, max(0, tracker.run.step - 1, *steps)


def wandb_rows(data: bytes) -> Iterator[JsonObject]:
    """Read the rows in a file of W&B's, as far as they were written: LevelDB's log format."""
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record
    place, parts = WANDB_HEADER, b""
    while place + FRAME <= len(data):
        if (padding := -place % BLOCK) and padding < FRAME:
            place += padding
            continue
        length, kind = struct.unpack_from("<4xHB", data, place)
        parts, place = parts + data[place + FRAME : place + FRAME + length], place + FRAME + length
        if kind in (WHOLE, LAST) and place <= len(data):
            record, parts = record_type.FromString(parts), b""
            if items := record.history.item:
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def _mlflow(page: RunPage) -> "tuple[GeneralTracker, int]":
    from accelerate.tracking import MLflowTracker

    mlflow = import_module("mlflow")
    LOCAL.mkdir(parents=True, exist_ok=True)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{(LOCAL / 'mlflow.db').resolve()}")
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    runs = mlflow.search_runs(
        experiment_names=[experiment], filter_string=f"tags.captrain = '{page.id}'", output_format="list"
    )
    run, last = None, 0
    if runs:
        run, client = runs[0].info.run_id, mlflow.MlflowClient()
        last = max((m.step for name in runs[0].data.metrics for m in client.get_metric_history(run, name)), default=0)
    tracker = MLflowTracker(
        experiment,
        logging_dir=(LOCAL / "mlflow").resolve().as_uri(),
        run_id=run,
        run_name=page.name,
        tags={"captrain": page.id},
        description=page.markdown,
    )
    tracker.start()
    if not runs:
        tracker.store_init_configuration(dict(page.settings))
    return tracker, last


OPENINGS: dict[str, Opening] = {
    "trackio": _trackio,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
}


class Report:
    """A training's run in one tracker.

    Args:
        name: of the tracker.
        page: of the run.

    Raises:
        UserError: the run does not begin.
    """

    def __init__(self, name: str, page: RunPage) -> None:
        self.name = name
        try:
            self.tracker, self.last = OPENINGS[name](page)
        except Exception as error:
            raise UserError(
                f"{name}, which machine.report_to names, begins no run: {error}",
                "set it up as its pages say, or leave it out of machine.report_to",
            ) from error

    def send(self, steps: Sequence[Step]) -> None:
        """Send what the run lacks of the steps from the first one on."""
        at_once = {"commit": True} if self.name == "wandb" else {}
        try:
            for number, values in enumerate(steps[self.last :], start=self.last + 1):
                self.tracker.log(values, step=number, **at_once)
                self.last = number
        except Exception as error:
            print(f"{self.name} took no step {self.last + 1}, and gets it with the next: {error}", file=sys.stderr)

    def close(self) -> None:
        """End the run, as far as this training goes."""
        try:
            self.tracker.finish()
        except Exception as error:
            print(f"{self.name} did not end its run: {error}", file=sys.stderr)


@contextmanager
def reported(
    trainer: Trainer, names: Sequence[str], page: Callable[[], RunPage], steps: Callable[[], Sequence[Step]]
) -> Iterator[None]:
    """Report what is trained meanwhile, by the first process.

    Args:
        trainer: logs at the end of each step.
        names: of the trackers.
        page: describes the run.
        steps: gives all steps so far, from the first one on.

    Raises:
        UserError: a run does not begin.
    """
    if not names or collectives.rank():
        yield
        return
    run, reports = page(), list[Report]()

    class Steps(TrainerCallback):
        """Callback that sends each step when it is over."""

        def on_log(self, *_: object, **__: object) -> None:
            """Send what is new."""
            for report in reports:
                report.send(steps())

    try:
        for name in dict.fromkeys(names):
            reports.append(Report(name, run))
        trainer.add_callback(Steps())
        yield
    finally:
        for report in reports:
            report.close()


def numbers(row: Mapping[str, object]) -> Step:
    """Keep the finite numbers of a row, those of a mapping in it by the names of both."""
    values = Step()
    for name, value in row.items():
        if isinstance(value, Mapping):
            inner = numbers(cast(Mapping[str, object], value))
            values |= {f"{name}/{key}": number for key, number in inner.items()}
        elif isinstance(value, int | float) and math.isfinite(value) and name not in ("step", "epoch"):
            values[name] = value
    return values


def logged(trainer: Trainer) -> list[JsonObject]:
    """List what the trainer has logged of its updates, in their order, without its summary at the end."""
    return [dict(row) for row in trainer.state.log_history if "loss" in row]
