"""The README shows what the committed results say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_table_in_the_readme_is_what_the_command_prints_from_the_committed_results() -> None:
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "results"], cwd=ROOT, check=False).returncode:
        pytest.skip("results/ is not what is committed: the README shows the committed run")
    done = subprocess.run(
        [Path(sys.executable).parent / "captrain", "results"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    assert "\n".join(printed) in (ROOT / "README.md").read_text()


def test_no_marker_is_left_unfilled() -> None:
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/decisions.md"):
        assert "@@" not in (ROOT / name).read_text()
