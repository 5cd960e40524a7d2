"""Looking at a pipeline while it runs: the look is honest, and the run goes on."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from captrain.cli import app
from captrain.errors import UserError
from captrain.monitoring import provenance
from captrain.monitoring.provenance import stage_states
from captrain.monitoring.verification import verify
from captrain.records import publish_text

PIPELINE = f"""
stages:
  first:
    cmd: {sys.executable} first.py
    deps: [first.py]
    outs:
      - results/first: {{cache: false}}
  second:
    cmd: {sys.executable} second.py
    deps: [second.py, results/first]
    outs:
      - results/second: {{cache: false}}
"""
# Waits in the middle of its outputs, until it is let go.
FIRST = """import time
from pathlib import Path
Path("results/first").mkdir(parents=True)
Path("results/first/begun").write_text("begun")
while not Path("go").exists():
    time.sleep(0.05)
"""
SECOND = """from pathlib import Path
Path("results/second").mkdir(parents=True)
"""
DVC = [sys.executable, "-m", "dvc", "repro"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A pipeline of two stages, of which none has run."""
    folder = tmp_path / "project"
    publish_text(folder / ".dvc/config", "[core]\n    analytics = false\n    no_scm = true\n    check_update = false\n")
    for name, text in {"dvc.yaml": PIPELINE, "first.py": FIRST, "second.py": SECOND}.items():
        publish_text(folder / name, text)
    return folder


@pytest.fixture
def running(root: Path) -> Iterator[subprocess.Popen[str]]:
    """`dvc repro`, in the middle of its first stage."""
    process = subprocess.Popen(DVC, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 120
    while not (root / "results/first/begun").exists():
        assert process.poll() is None and time.monotonic() < end, process.stdout and process.stdout.read()
        time.sleep(0.05)
    yield process
    (root / "go").touch()
    process.wait(120)


def states(root: Path) -> dict[str, str]:
    return {one.name: one.state for one in stage_states(root)}


def test_status_while_a_stage_runs_neither_fails_nor_ends_the_run(
    root: Path, running: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["captrain", "status"])
    with pytest.raises(SystemExit) as end:
        app.main()
    out = capsys.readouterr().out
    assert not end.value.code
    first, second = (next(line for line in out.splitlines() if f"│ {name} " in line) for name in ("first", "second"))
    assert "runs now" in first and "never run" in second and "captrain watch" in out
    with pytest.raises(UserError, match="first runs now"):
        verify(root)
    (root / "go").touch()
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert states(root) == {"first": "fresh", "second": "fresh"}


def test_a_run_that_begins_while_it_is_looked_at_ends_and_is_seen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "go").touch()
    plain, looks = provenance.stage_changes, 0

    def slow(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            done = subprocess.run(DVC, cwd=root, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return plain(*given)

    monkeypatch.setattr(provenance, "stage_changes", slow)
    assert states(root) == {"first": "fresh", "second": "fresh"}
    assert looks == 4  # what was seen first was out of date, and was looked at once more


def test_a_look_does_not_wait_for_dvcs_lock(root: Path) -> None:
    from dvc.repo import Repo

    with Repo(str(root)) as repo, repo.lock:
        assert states(root) == {"first": "never run", "second": "never run"}


def test_files_that_go_while_they_are_looked_at_are_said_to_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "go").touch()
    subprocess.run(DVC, cwd=root, capture_output=True, check=True)
    plain = provenance._output_changes

    def gone(out: Any, path: str) -> Any:
        if path == "results/first":
            raise FileNotFoundError(2, "No such file", str(root / "results/first/begun"))
        return plain(out, path)

    monkeypatch.setattr(provenance, "_output_changes", gone)
    first, second = stage_states(root)
    assert first.state == "changing" and "changed while they were looked at" in first.reasons[0]
    assert "results/first/begun" in first.reasons[0] and str(root) not in first.reasons[0]
    assert second.state == "waiting" and "first (changing)" in second.reasons[0]


def test_a_record_that_never_rests_ends_in_one_message(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, looks = provenance.stage_changes, 0

    def busy(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        publish_text(root / "dvc.lock", f"schema: '2.0'\nstages: {{}}\n# {looks}\n")
        return plain(*given)

    monkeypatch.setattr(provenance, "stage_changes", busy)
    with pytest.raises(UserError, match="dvc.lock was written each time"):
        stage_states(root)
