"""Experiment trackers: transformers' callbacks for the trackers that `machine.report_to` names.

Results do not depend on trackers: nothing is read back, and a tracker that fails later than its start ends no training.
A training that resumes from a checkpoint reports the steps after that checkpoint again. W&B and trackio continue the
same run; MLflow starts another one, and TensorBoard another file of the same run.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback, get_reporting_integration_callbacks

from captrain.errors import UserError
from captrain.training import collectives

PROJECT = "captrain"
LOCAL = Path(".cache/trackers")
"""Folder of the files that trackers keep here, unless their own variables name another."""


class Tracker(TrainerCallback):
    """A tracker's own callback, whose failures end no training once its run has started."""

    def __init__(self, name: str, callback: TrainerCallback) -> None:
        self.name, self.callback = name, callback

    def on_train_begin(self, *arguments: Any, **settings: Any) -> None:
        """Start the run.

        Raises:
            UserError: the tracker cannot.
        """
        try:
            self.callback.on_train_begin(*arguments, **settings)
        except Exception as error:
            raise UserError(
                f"{self.name}, which machine.report_to names, cannot start a run: {error}",
                "set the tracker up as its documentation says, or remove it from machine.report_to",
            ) from error

    def on_log(self, *arguments: Any, **settings: Any) -> None:
        """Report a step."""
        self._try(self.callback.on_log, *arguments, **settings)

    def on_train_end(self, *arguments: Any, **settings: Any) -> None:
        """End the run. transformers leaves W&B's open, for its own later use."""
        self._try(self.callback.on_train_end, *arguments, **settings)
        if self.name == "wandb":
            self._try(import_module("wandb").finish)

    def _try(self, report: Any, *arguments: Any, **settings: Any) -> None:
        try:
            report(*arguments, **settings)
        except Exception as error:
            print(f"{self.name} failed, and the training goes on: {error}", file=sys.stderr)


def attach(trainer: Trainer, names: list[str]) -> None:
    """Add the callbacks of trackers to a trainer; rank 0 alone reports.

    Args:
        trainer: its `run_name` ends in the digest of what decides the adapter.
        names: of the trackers.
    """
    if not names or collectives.rank():
        return
    run = str(trainer.args.run_name)
    LOCAL.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{(LOCAL / 'mlflow.db').resolve()}")
    os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", PROJECT)
    os.environ.setdefault("WANDB_PROJECT", PROJECT)
    os.environ.setdefault("WANDB_DIR", str(LOCAL))
    os.environ |= {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"}
    trainer.args.project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    for name in dict.fromkeys(names):
        [kind] = get_reporting_integration_callbacks([name])
        callback = kind()
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = str(Path(os.environ.get("TENSORBOARD_LOGGING_DIR", LOCAL / "tensorboard")) / run)
        trainer.add_callback(Tracker(name, callback))
