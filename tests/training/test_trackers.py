"""Trackers: each step once, whatever happens on the way, a page that says what the run is of, and the same results."""

import json
import os
import struct
import sys
import uuid
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.stages import stage
from support.training import ROOT, fine_tuned, inside, kill, project, published

from captrain.errors import UserError
from captrain.records import file_digest
from captrain.run import compose_spec
from captrain.run.machine import Machine
from captrain.training import trackers

pytestmark = pytest.mark.usefixtures("vouched")

Values = dict[str, list[tuple[int, float]]]
"""Values of each metric, by their steps, in the order in which the tracker holds them."""


def tensorboard_run() -> tuple[Values, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = Path(".cache/trackers/tensorboard").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    [text] = events.Tensors("run/text_summary")[:1]
    scalars = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    return scalars, text.tensor_proto.string_val[0].decode()


def trackio_run() -> tuple[Values, str]:
    [run] = import_module("trackio").Api().runs(project := os.environ["TRACKIO_PROJECT"])
    logs = import_module("trackio.sqlite_storage").SQLiteStorage.get_logs(project, run.name)
    values, page = _columns(logs), json.dumps(run.config)
    run.delete()
    return values, page


def mlflow_run() -> tuple[Values, str]:
    client = import_module("mlflow").MlflowClient(f"sqlite:///{Path('.cache/trackers/mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("captrain")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    values = {name: [(m.step, m.value) for m in history] for name, history in histories.items()}
    return values, run.data.tags["mlflow.note.content"]


def wandb_run() -> tuple[Values, str]:
    files = sorted(Path(".cache/trackers/wandb").glob("offline-run-*/*.wandb"))
    rows = [{**row, "step": row["_step"]} for path in files for row in _wandb_rows(path.read_bytes())]
    # Of a step that comes again, the last before a kill alone, W&B takes the first.
    distinct = {row["step"]: row for row in reversed(rows)}
    assert len(rows) - len(distinct) <= 1
    return _columns([*reversed(distinct.values())]), b"".join(path.read_bytes() for path in files).decode(
        errors="replace"
    )


def _wandb_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a run in W&B's own file, as far as they were written: LevelDB's log format."""
    header, frame, block, whole, last = 7, 7, 1 << 15, 1, 4
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record
    rows, place, parts = list[dict[str, Any]](), header, b""
    while place + frame <= len(data):
        if (padding := -place % block) and padding < frame:
            place += padding
            continue
        length, kind = struct.unpack_from("<4xHB", data, place)
        parts, place = parts + data[place + frame : place + frame + length], place + frame + length
        if kind in (whole, last) and place <= len(data):
            record, parts = record_type.FromString(parts), b""
            if items := record.history.item:
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def _columns(rows: list[dict[str, Any]]) -> Values:
    values: Values = {}
    for row in rows:
        for name, value in row.items():
            if not name.startswith("_") and name not in ("step", "timestamp") and isinstance(value, int | float):
                values.setdefault(name, []).append((row["step"], value))
    return values


def tracker_of(name: str, marks: Any = ()) -> Any:
    return pytest.param(name, globals()[f"{name}_run"], marks=marks, id=name)


TRACKERS = [tracker_of("tensorboard"), *(tracker_of(name, pytest.mark.needs(name)) for name in ("trackio", "mlflow"))]
TRACKERS += [tracker_of("wandb", pytest.mark.needs("wandb"))]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent, and no run of another test is found: trackio keeps all in one folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_PROJECT", f"captrain-{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def untracked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed training of six steps that no tracker was told of."""
    folder = project(tmp_path_factory.mktemp("untracked"), tiny, "letters")
    assert stage(folder, "adapters") == 0
    return folder


@pytest.mark.parametrize(("name", "read"), TRACKERS)
@pytest.mark.usefixtures("offline")
def test_a_tracked_training_that_is_killed_and_goes_on_reports_each_step_once_and_ends_in_the_same_bytes(
    name: str, read: Callable[[], tuple[Values, str]], tiny: Path, tmp_path: Path, warm: Path, untracked: Path
) -> None:
    tracked = project(tmp_path / "tracked", tiny, "letters", more=[f"machine.report_to=[{name}]"])
    (tracked / "dvc.lock").write_text("schema: '2.0'\n")
    kill(tracked, "adapters", warm)
    assert stage(tracked, "adapters") == 0
    assert published(tracked) == published(untracked)
    with inside(tracked):
        values, page = read()
    history = (tracked / "results/adapters/history.csv").read_text().splitlines()[1:]
    for column, metric in ((3, "reward"), (4, "success"), (5, "informative")):
        rows = [(int(row.split(",")[1]), float(row.split(",")[column])) for row in history]
        assert values[metric] == [(step, pytest.approx(value)) for step, value in rows] and len(rows) == 6
    # What TRL has measured is there, too, and what each environment has given.
    for metric in ("loss", "grad_norm", "learning_rate", "entropy", "places/letters"):
        assert [step for step, _ in values[metric]] == [1, 2, 3, 4, 5, 6]
    for path in ("results/spec.yaml", "dvc.lock"):
        assert file_digest(tracked / path) in page


@pytest.mark.usefixtures("offline")
def test_a_tracked_fine_tuning_reports_the_loss_of_each_update_and_is_the_same_adapter(
    tiny: Path, tmp_path: Path
) -> None:
    plain = fine_tuned(tiny, tmp_path / "plain", Machine(workers=1, batch=1))
    tracked = fine_tuned(tiny, tmp_path / "tracked", Machine(workers=1, batch=1, report_to=["tensorboard"]))
    assert (tracked.digest, tracked.losses) == (plain.digest, plain.losses)
    with inside(tmp_path / "tracked"):
        values, _ = tensorboard_run()
    assert values["loss"] == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in enumerate(plain.losses, start=1)]
    assert not list((tmp_path / "plain").glob(".cache/trackers"))


class Failing:
    """A tracker that takes no step the first two times."""

    def __init__(self) -> None:
        self.faults, self.steps, self.is_over = 2, list[int](), False

    def log(self, values: object, step: int, **_: object) -> None:
        if self.faults:
            self.faults -= 1
            raise ConnectionError("the tracker is away")
        self.steps.append(step)

    def finish(self) -> None:
        self.is_over = True


def test_a_tracker_that_fails_on_the_way_ends_no_training_and_gets_the_steps_when_it_is_back(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing()
    monkeypatch.setattr(trackers, "begin", lambda *_: failing)
    tuned = fine_tuned(tiny, tmp_path, Machine(workers=1, batch=1, report_to=["tensorboard"]))
    assert failing.steps == [*range(1, len(tuned.losses) + 1)] and failing.is_over
    assert "tensorboard took no step 1, and gets it with the next: the tracker is away" in capsys.readouterr().err


def test_a_tracker_that_begins_no_run_ends_the_training_before_its_first_step(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Any:
        raise PermissionError("no key")

    monkeypatch.setattr(trackers, "begin", refuse)
    with pytest.raises(UserError, match="wandb, which machine.report_to names, begins no run: no key"):
        fine_tuned(tiny, tmp_path, Machine(workers=1, batch=1, report_to=["wandb"]))


def test_a_tracker_that_is_not_installed_is_refused_when_the_configuration_is_composed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A folder that W&B leaves behind is no package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if not (Path(path) / "wandb").is_dir())])
    with pytest.raises(UserError, match="machine.report_to names wandb, which is not installed") as refused:
        compose_spec("smoke", 0, ["machine.report_to=[tensorboard,wandb]"], ROOT / "conf")
    assert "pip install 'captrain[wandb]'" in str(refused.value.remedy)


def test_what_each_tracker_has_is_known_after_any_number_of_resumes(tmp_path: Path) -> None:
    """W&B alone gets the last step again, which it does not take."""
    board: Any = Failing()
    wandb: Any = Failing()
    steps = [{"loss": 0.5}] * 3
    board.faults = wandb.faults = 0
    for fault in (0, 1, 1, 0):
        wandb.faults = fault
        tracker: Any = trackers.Reports({"tensorboard": board, "wandb": wandb}, lambda: steps, tmp_path / "a.json")
        tracker.on_log()
        steps.append({"loss": 0.5})
    assert board.steps == [1, 2, 3, 4, 5, 6] and wandb.steps == [1, 2, 3, 3, 4, 5, 6]
