"""The campaign of faults, `make faults`: short here, on the first stage alone; hundreds are made by hand."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHORT = ("--targets", "base", "--overrides", "base.steps=40", "base.batch=8")


def campaign(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/faults.py", *options, *SHORT]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_a_pipeline_that_is_hurt_at_random_comes_out_the_same() -> None:
    process = campaign("--faults", "3", "--seed", "8")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "3 faults in" in process.stdout and " 0 differ; 0 half-written" in process.stdout
