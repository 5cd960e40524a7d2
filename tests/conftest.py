"""Fixtures of several tests: a tiny random model, an easy environment, a finished pipeline, and the command line."""

import gc
import importlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.browser import PROGRAM, Browser
from support.composed import compose_once
from support.finished import Captrain, finished_pipeline
from support.letters import LETTERS
from support.needs import NEEDS
from support.shared import make_once
from support.smoke import make_smoke
from support.warm import Server, warm_commands

from captrain.benchmarks import installing
from captrain.cli import app
from captrain.contract import CheckedEnvironment
from captrain.records import Task

# As in the Makefile. Tests need no network, and one thread is faster here.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")

compose_once()

LONGEST = ("test_pipeline.py", "test_slurm.py", "test_sweep.py", "test_distributed.py", "test_instruction_sets.py")
"""These files take minutes each. The last one needs the output of the first."""
MANY = 20_000
"""Fewest objects worth freezing: a search for garbage among them takes hundredths of a second."""


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of warm processes, unless the parent process has."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory()
        server = Server(Path(folder.name))
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(server.stop)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need anything outside of .venv, and start with the longest files.

    xdist's workers take one file at a time, so they then end at about the same time.
    """
    for item in items:
        if any(NEEDS[name].outside for name in needs_of(item)):
            item.add_marker("outside")
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Exclude everything that the test modules have imported from garbage collection."""
    freeze()


def needs_of(item: pytest.Item) -> list[str]:
    """List what a test needs."""
    return [name for mark in item.iter_markers("needs") for name in mark.args]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose needs are missing, and freeze new imports."""
    if reasons := [reason for name in needs_of(item) if (reason := NEEDS[name].lacking())]:
        pytest.skip("; ".join(reasons))
    if len(gc.get_objects(generation=2)) > MANY:
        freeze()


def freeze() -> None:
    """Exclude everything in memory from garbage collection.

    Libraries collect after each training, and would search all that was ever loaded.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def only_what_is_needed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the environments of `make installations` from tests that do not need them.

    Such a test then does the same on every machine, and starts none of their processes.
    """
    if not any(NEEDS[name].outside for name in needs_of(request.node)):
        monkeypatch.setattr(installing, "MARK", ".made-by-a-test")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with random weights and the embedded base's tokenizer."""
    import torch

    from captrain.run import BaseModelSettings
    from captrain.training.base.tokenizer import build_tokenizer
    from captrain.training.base.training import build_model

    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    size = BaseModelSettings(hidden=32, layers=2, heads=2, steps=1, batch=1, learning_rate=1e-3, weight_decay=0.0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_model(tokenizer, size, seed=13).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    importlib.import_module("trl.trainer.grpo_trainer")  # imported here so that it is frozen, too
    freeze()
    return folder


@pytest.fixture(scope="session")
def warm() -> Path:
    """Folder of the commands `python`, `dvc` and `captrain`, which run in warm processes."""
    return warm_commands()


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Path:
    """The repository after `dvc repro` of experiment smoke, committed. Read or copy it."""
    return make_once(tmp_path_factory, "smoke", lambda folder: make_smoke(folder, warm))


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commit that is checked out, without later changes in this folder."""
    root, folder = Path(__file__).parent.parent, tmp_path_factory.mktemp("committed")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture
def letters(tmp_path: Path) -> Callable[..., Path]:
    """Write an environment file that pays for letters; every `flat`-th task pays 0.5 for anything."""

    def write(name: str = "letters", flat: int = 0, folder: Path = tmp_path) -> Path:
        path = folder / f"{name}.py"
        path.write_text(LETTERS.format(name=name, flat=flat))
        return path

    return write


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """List every task that is opened from now on."""
    tasks: list[Task] = []
    open_ = CheckedEnvironment.open
    monkeypatch.setattr(
        CheckedEnvironment, "open", lambda self, task, key="": (tasks.append(task), open_(self, task, key))[1]
    )
    return tasks


@pytest.fixture(scope="module")
def vouched() -> Iterator[None]:
    """Trust environment files that their passports call our own text, so that they run in this process.

    The sandbox would start a process for each of hundreds of episodes. Other tests show that its results are equal.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("captrain.environments.loading.is_own_text", lambda _text: True)
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished and committed pipeline, made once. Each test copies it."""
    return make_once(tmp_path_factory, "finished", finished_pipeline)


@pytest.fixture
def pipeline(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished`."""
    return shutil.copytree(finished, tmp_path / "project", symlinks=True)


@pytest.fixture
def captrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Captrain:
    """Run `captrain ARGUMENTS` in a folder; return exit status, stdout and stderr."""

    def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["captrain", *arguments])
        with pytest.raises(SystemExit) as end:
            app.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium."""
    assert PROGRAM
    started = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()
