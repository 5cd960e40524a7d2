"""A computing process keeps freed memory, unless the user configures glibc."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import psutil
from captrain.run.arithmetic import prepare_torch
prepare_torch()
before = psutil.Process().memory_info().rss
blocks = [b"x" * (1 << 20) for _ in range(100)]
del blocks
print(psutil.Process().memory_info().rss - before)
"""
BLOCKS = 100 << 20


@pytest.mark.parametrize(
    ("settings", "is_kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, False)], ids=["default", "asked"]
)
def test_freed_memory_is_kept_unless_the_user_configures_glibc(settings: dict[str, str], is_kept: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env | settings, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > BLOCKS / 2) is is_kept
