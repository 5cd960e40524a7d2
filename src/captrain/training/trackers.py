"""Experiment trackers: the steps of a training, in a run of each tracker that `machine.report_to` names.

A run is named by what decides the adapter, so that a training which goes on after a kill goes on with its run. The last
step that was reported is remembered in the training's workspace: each is reported once, unless a kill falls between the
two. The run has the training's settings, with digests of spec and dvc.lock among them. Nothing is read back: results
are the same bytes with trackers and without. A tracker that fails on the way ends no training: it gets what it lacks
with the next step, and the log says so.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import Trainer, TrainerCallback

from captrain.errors import UserError
from captrain.records import JsonObject, file_digest, publish_json, read_json
from captrain.training import collectives

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "captrain"
"""Project of the runs, where the tracker's own variable names no other."""
SOURCES = ("results/spec.yaml", "dvc.lock")
"""Files that say what a run is of."""
LOCAL = Path(".cache/trackers")
"""Folder of what trackers keep on this disk, where their own variables name no other."""
Step = dict[str, int | float]


class Reports(TrainerCallback):
    """Callback that sends each step to every tracker when it is over.

    Args:
        trackers: with a run of this training, by name.
        steps: gives all steps so far, from the first one on.
        record: file that remembers the last step that each tracker has.
    """

    def __init__(
        self, trackers: "Mapping[str, GeneralTracker]", steps: Callable[[], Sequence[Step]], record: Path
    ) -> None:
        self.trackers, self.steps, self.record = trackers, steps, record
        self.last = dict[str, int]()
        try:
            self.last |= read_json(record, dict[str, int]) if record.exists() else {}
        except UserError as error:  # no result depends on it
            print(f"trackers get all steps again: {error}", file=sys.stderr)
        self.resent = {"wandb"}
        """Trackers that get their last step again: W&B writes in a process of its own, which a kill ends, too, and
        takes no step twice."""
        if "trackio" in trackers:
            # It sends in the background: what had arrived before a kill it alone knows.
            run: Any = cast(Any, trackers["trackio"]).run
            self.last["trackio"] = max(0, run._next_step - 1)

    def on_log(self, *_: object, **__: object) -> None:
        """Send what each tracker lacks."""
        steps = self.steps()
        for name, tracker in self.trackers.items():
            before = max(0, self.last.get(name, 0) - (name in self.resent))
            at_once = {"commit": True} if name == "wandb" else {}
            for number, values in enumerate(steps[before:], start=before + 1):
                try:
                    tracker.log(values, step=number, **at_once)
                except Exception as error:
                    print(f"{name} took no step {number}, and gets it with the next: {error}", file=sys.stderr)
                    break
                self.resent.discard(name)
                self.last[name] = number
                publish_json(self.record, self.last)


@contextmanager
def reported(
    trainer: Trainer,
    names: Sequence[str],
    adapter: str,
    workspace: Path,
    settings: Mapping[str, object],
    steps: Callable[[], Sequence[Mapping[str, object]]],
) -> Iterator[None]:
    """Report what is trained meanwhile, by the first process.

    Args:
        trainer: logs at the end of each step.
        names: of the trackers.
        adapter: name of what is trained.
        workspace: named by what decides the adapter.
        settings: of the training.
        steps: gives all steps so far, from the first one on.

    Raises:
        UserError: a run does not begin.
    """
    if not names or collectives.rank():
        yield
        return
    sources = {path: file_digest(Path(path)) for path in SOURCES if Path(path).exists()}
    values = {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in {"adapter": adapter, **settings, **sources}.items()
    }
    trackers: dict[str, GeneralTracker] = {}
    record = workspace / "reported.json"
    try:
        for name in dict.fromkeys(names):
            try:
                trackers[name] = begin(name, workspace.name, f"{adapter}-{workspace.name[:8]}", values)
            except Exception as error:
                raise UserError(
                    f"{name}, which machine.report_to names, begins no run: {error}",
                    "set it up as its pages say, or leave it out of machine.report_to",
                ) from error
        trainer.add_callback(Reports(trackers, lambda: [numbers(step) for step in steps()], record))
        yield
    finally:
        for name, tracker in trackers.items():
            try:
                tracker.finish()
            except Exception as error:
                print(f"{name} did not end its run: {error}", file=sys.stderr)


def begin(tracker: str, run: str, title: str, settings: JsonObject) -> "GeneralTracker":
    """Begin a run in a tracker, or go on with it.

    Args:
        tracker: its name.
        run: id by which the run is found again.
        title: of the run.
        settings: of the training.
    """
    from accelerate import tracking

    LOCAL.mkdir(parents=True, exist_ok=True)
    page = "\n\n".join(f"**{name}**: {value}" for name, value in settings.items())
    if tracker == "tensorboard":
        folder = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", LOCAL / "tensorboard"))
        # Files are read in the order of their names, which begin with the second in which they were made.
        while any(path.name.split(".")[3] >= f"{int(time.time()):010d}" for path in (folder / title).glob("events.*")):
            time.sleep(0.05)
        board = tracking.TensorBoardTracker(title, str(folder))
        board.start()
        board.writer.add_text("run", page)
        return board
    if tracker == "mlflow":
        mlflow = import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{(LOCAL / 'mlflow.db').resolve()}")
        experiment, condition = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), f"tags.captrain = '{run}'"
        runs = mlflow.search_runs(experiment_names=[experiment], filter_string=condition, output_format="list")
        flow = tracking.MLflowTracker(
            experiment,
            logging_dir=(LOCAL / "mlflow").resolve().as_uri(),
            run_id=runs[0].info.run_id if runs else None,
            run_name=title,
            tags={"captrain": run},
            description=page,
        )
        flow.start()
        if not runs:  # MLflow refuses another value of what it has
            flow.store_init_configuration(settings)
        return flow
    shared = {"name": title, "resume": "allow", "config": settings}
    if tracker == "trackio":
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # Measures of the machine would make a run of their own of one that was killed before its first step.
        running: Any = tracking.TrackioTracker(project, auto_log_cpu=False, auto_log_gpu=False, **shared)
    else:
        folder = Path(os.environ.get("WANDB_DIR", LOCAL))
        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        running = tracking.WandBTracker(project, id=run, notes=page, dir=str(folder), **shared)
    running.start()
    return running


def updates(trainer: Trainer) -> list[JsonObject]:
    """List what the trainer has logged of its updates, in their order, without its summary at the end."""
    return [row for row in trainer.state.log_history if "loss" in row]


def numbers(row: Mapping[str, object]) -> Step:
    """Select the finite numbers of a row, those of a mapping in it by the names of both."""
    values = Step()
    for name, value in row.items():
        if isinstance(value, Mapping):
            inner = numbers(cast(Mapping[str, object], value))
            values |= {f"{name}/{key}": number for key, number in inner.items()}
        elif isinstance(value, int | float) and math.isfinite(value) and name not in ("step", "epoch"):
            values[name] = value
    return values
