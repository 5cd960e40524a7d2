"""Experiment trackers: transformers' callbacks for the trackers that `machine.report_to` names.

Results do not depend on trackers: nothing is read back, and a tracker that fails after its start does not end the
training. A training that resumes from a checkpoint reports the steps after that checkpoint again. W&B and trackio
continue the same run; MLflow starts another one, and TensorBoard another file of the same run.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, get_reporting_integration_callbacks

from captrain.errors import UserError

PROJECT = "captrain"
LOCAL = Path(".cache/trackers")
"""Folder of the trackers' local files, unless their own environment variables name another one."""


class Tracker(TrainerCallback):
    """Wraps a tracker's own callback. Once its run has started, its failures do not end the training."""

    def __init__(self, name: str, callback: TrainerCallback) -> None:
        self.name, self.callback = name, callback

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **settings: object
    ) -> None:
        """Start the run.

        Raises:
            UserError: the tracker cannot start a run.
        """
        try:
            if self.name == "wandb":  # the callback uses the open run
                project, folder = os.environ.get("WANDB_PROJECT", PROJECT), os.environ.get("WANDB_DIR", LOCAL)
                Path(folder).mkdir(parents=True, exist_ok=True)
                run = {"id": args.run_name, "name": args.run_name, "resume": "allow"}
                import_module("wandb").init(project=project, dir=folder, **run)
            self.callback.on_train_begin(args, state, control, **settings)
        except Exception as error:
            raise UserError(
                f"{self.name}, which machine.report_to names, cannot start a run: {error}",
                "set the tracker up as its documentation says, or remove it from machine.report_to",
            ) from error

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **settings: object) -> None:
        """Report a step."""
        self._try(lambda: self.callback.on_log(args, state, control, **settings))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **settings: object
    ) -> None:
        """End the run."""
        self._try(lambda: self.callback.on_train_end(args, state, control, **settings))
        if self.name == "wandb":
            self._try(import_module("wandb").finish)

    def _try(self, report: Callable[[], object]) -> None:
        try:
            report()
        except Exception as error:
            print(f"{self.name} failed, and the training goes on: {error}", file=sys.stderr)


def attach(trainer: Trainer, names: list[str]) -> None:
    """Add the callbacks of trackers to a trainer.

    Args:
        trainer: its `run_name` ends in the digest of what decides the adapter.
        names: of the trackers.
    """
    LOCAL.mkdir(parents=True, exist_ok=True)
    database = f"sqlite:///{(LOCAL / 'mlflow.db').resolve()}"
    os.environ |= {"MLFLOW_TRACKING_URI": database, "MLFLOW_EXPERIMENT_NAME": PROJECT} | os.environ
    for name in dict.fromkeys(names):
        callback = get_reporting_integration_callbacks([name])[0]()
        if isinstance(callback, TensorBoardCallback):
            folder = os.environ.get("TENSORBOARD_LOGGING_DIR", LOCAL / "tensorboard")
            callback.logging_dir = str(Path(folder, str(trainer.args.run_name)))
        trainer.add_callback(Tracker(name, callback))
