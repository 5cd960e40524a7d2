"""The campaign of `make faults`, shortened to the first stage. Longer campaigns are started by hand."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.needs("minutes")
ROOT = Path(__file__).parents[1]
SHORT = ("--targets", "base", "--overrides", "base.steps=40", "base.batch=8")


def campaign(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/faults.py", *options, *SHORT]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_a_pipeline_that_is_hurt_at_random_comes_out_the_same() -> None:
    process = campaign("--faults", "3", "--seed", "8")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "whole after 3 faults; 0 files differ, 0 half-written files stayed, 0 tracebacks" in process.stdout


def test_a_campaign_that_is_stopped_tells_what_it_has_seen_and_leaves_nothing_at_work() -> None:
    command = [sys.executable, "scripts/faults.py", "--faults", "1000", "--length", "1", *SHORT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = next(line for line in process.stdout if "pipelines whole" in line)
        process.terminate()
        text = process.stdout.read()
    assert first.startswith("1 pipelines whole after 1 faults; 0 files differ")
    assert process.returncode == 0 and "stopped by SIGTERM" in text and "hit: " in text
    folder = str(ROOT / ".cache/faults")
    assert not [entry.pid for entry in psutil.process_iter(["cwd"]) if (entry.info["cwd"] or "").startswith(folder)]


def test_a_campaign_ends_after_its_seconds_and_has_shown_nothing_without_a_whole_pipeline() -> None:
    process = campaign("--seconds", "2")
    assert process.returncode == 1 and "stopped by --seconds" in process.stdout
    assert "0 pipelines whole after 0 faults" in process.stdout
