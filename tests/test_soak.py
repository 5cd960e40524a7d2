"""The soak of `make soak`, for a few seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.needs("minutes")
def test_neither_server_nor_pool_grows_under_mixed_load(tiny: Path) -> None:
    command = [sys.executable, "scripts/soak.py", "--seconds", "25", "--model", str(tiny)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "captrain serve" in done.stdout and "pool of workers" in done.stdout
