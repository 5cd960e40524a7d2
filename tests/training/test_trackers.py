"""Trackers: each step is reported, and results do not depend on it."""

import os
import sys
import uuid
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.stages import stage
from support.training import ROOT, fine_tuned, inside, kill, project, published
from transformers import TrainerCallback

from captrain.errors import UserError
from captrain.run import compose_spec
from captrain.run.machine import Machine
from captrain.training import trackers

pytestmark = pytest.mark.usefixtures("vouched")

Values = dict[str, list[float]]
"""Values of each metric, in the order in which they were reported."""
PREFIX = "train/"
"""Of the names of metrics in all trackers but MLflow."""


def tensorboard_run() -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = Path(".cache/trackers/tensorboard").iterdir()
    # Files are read by name: time in seconds, then process. Those of one second may be out of order.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    in_order = {
        name: sorted(events.Scalars(name), key=lambda event: event.wall_time) for name in events.Tags()["scalars"]
    }
    return {name: [event.value for event in scalars] for name, scalars in in_order.items()}


def trackio_run() -> Values:
    [run] = import_module("trackio").Api().runs(project := os.environ["TRACKIO_PROJECT"])
    logs = import_module("trackio.sqlite_storage").SQLiteStorage.get_logs(project, run.name)
    run.delete()
    return {name: [row[name] for row in logs if name in row] for name in {key for row in logs for key in row}}


def mlflow_run() -> Values:
    client = import_module("mlflow").MlflowClient(f"sqlite:///{Path('.cache/trackers/mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("captrain")
    assert experiment is not None
    values: Values = {}
    for run in reversed(client.search_runs([experiment.experiment_id])):  # the run that was killed comes last
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            values.setdefault(PREFIX + name, []).extend(metric.value for metric in history)
    return values


TRACKERS = [
    pytest.param("tensorboard", tensorboard_run, id="tensorboard"),
    pytest.param("trackio", trackio_run, id="trackio", marks=pytest.mark.needs("trackio")),
    pytest.param("mlflow", mlflow_run, id="mlflow", marks=pytest.mark.needs("mlflow")),
]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send nothing, and find no run of another test: trackio keeps all in one folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_PROJECT", f"captrain-{uuid.uuid4().hex}")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def untracked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed training of six steps without a tracker."""
    folder = project(tmp_path_factory.mktemp("untracked"), tiny, "letters")
    assert stage(folder, "adapters") == 0
    return folder


@pytest.mark.parametrize(("name", "read"), TRACKERS)
@pytest.mark.usefixtures("offline")
def test_a_killed_and_resumed_training_reports_each_step_and_gives_the_same_bytes(
    name: str, read: Callable[[], Values], tiny: Path, tmp_path: Path, warm: Path, untracked: Path
) -> None:
    tracked = project(tmp_path / "tracked", tiny, "letters", more=[f"machine.report_to=[{name}]"])
    kill(tracked, "adapters", warm)
    assert stage(tracked, "adapters") == 0
    assert published(tracked) == published(untracked)
    with inside(tracked):
        values = read()
    rows = [row.split(",") for row in (tracked / "results/adapters/history.csv").read_text().splitlines()[1:]]
    for column, metric in ((3, "reward"), (4, "success"), (5, "informative")):
        expected = [float(row[column]) for row in rows]
        # A step after the last checkpoint may be reported twice.
        reported = values[PREFIX + metric]
        assert reported[-1] == pytest.approx(expected[-1]) and 6 <= len(reported) <= 7
        assert all(min(abs(value - other) for other in reported) < 1e-6 for value in expected)
    for metric in ("loss", "grad_norm", "learning_rate", "entropy", "places/letters"):
        assert 6 <= len(values[PREFIX + metric]) <= 7


@pytest.mark.parametrize("name", ["tensorboard", pytest.param("wandb", marks=pytest.mark.needs("wandb"))])
@pytest.mark.usefixtures("offline")
def test_a_tracked_fine_tuning_reports_each_loss_and_gives_the_same_adapter(
    name: Any, tiny: Path, tmp_path: Path
) -> None:
    plain = fine_tuned(tiny, tmp_path / "plain", Machine(workers=1, batch=1))
    tracked = fine_tuned(tiny, tmp_path / "tracked", Machine(workers=1, batch=1, report_to=[name]))
    assert (tracked.digest, tracked.losses) == (plain.digest, plain.losses)
    assert not list((tmp_path / "plain").glob(".cache/trackers"))
    with inside(tmp_path / "tracked"):
        if name == "wandb":
            assert import_module("wandb").run is None and len([*Path(".cache/trackers/wandb").glob("offline-run-*")])
        else:
            assert tensorboard_run()["train/loss"] == pytest.approx(plain.losses, abs=1e-6)


class Failing(TrainerCallback):
    """A tracker that fails at some of the events."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.reports = failing, 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if "begin" in self.failing:
            raise PermissionError("no key")

    def on_log(self, *_: Any, **__: Any) -> None:
        self.reports += 1
        if "log" in self.failing:
            raise ConnectionError("the tracker is away")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("the tracker is gone")


def test_a_tracker_that_fails_later_ends_no_training(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing("log")
    monkeypatch.setattr(trackers, "get_reporting_integration_callbacks", lambda _: [lambda: failing])
    tuned = fine_tuned(tiny, tmp_path, Machine(workers=1, batch=1, report_to=["tensorboard"]))
    assert failing.reports == len(tuned.losses) + 1
    told = capsys.readouterr().err
    assert "tensorboard failed, and the training goes on: the tracker is away" in told and "is gone" in told


def test_a_tracker_that_cannot_start_ends_the_training(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "get_reporting_integration_callbacks", lambda _: [lambda: Failing("begin")])
    with pytest.raises(UserError, match="mlflow, which machine.report_to names, cannot start a run: no key"):
        fine_tuned(tiny, tmp_path, Machine(workers=1, batch=1, report_to=["mlflow"]))


def test_a_missing_tracker_is_refused_with_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A folder that W&B leaves behind is no package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if not (Path(path) / "wandb").is_dir())])
    with pytest.raises(UserError, match="machine.report_to names wandb, which is not installed") as refused:
        compose_spec("smoke", 0, ["machine.report_to=[tensorboard,wandb]"], ROOT / "conf")
    assert "pip install 'captrain[wandb]'" in str(refused.value.remedy)
