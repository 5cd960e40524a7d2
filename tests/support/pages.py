"""The commands on the repository's pages, and their output."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.waiting import PATIENCE
from support.warm import warm_commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = "# not run here: "
"""Marks a line of a fence: the following commands are not run, and why."""


@dataclass(frozen=True)
class PageCommand:
    """A command on a page. reason: why it is not run, or ""."""

    page: str
    line: str
    reason: str = ""


def commands_of(page: Path) -> list[PageCommand]:
    """List the commands in a page's shell fences, in order, without comments."""
    commands: list[PageCommand] = []
    for fence in FENCE.findall(page.read_text(encoding="utf-8")):
        reason = ""
        for line in fence.replace("\\\n", " ").splitlines():
            if line.startswith(NOT_RUN):
                reason = line.removeprefix(NOT_RUN)
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                commands.append(PageCommand(page.name, shlex.join(words), reason))
    return commands


def run_command(line: str, folder: Path, columns: int = 120) -> subprocess.CompletedProcess[str]:
    """Run a page's command in a folder, with the programs of this environment."""
    words = shlex.split(line.removeprefix(".venv/bin/"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(warm_commands()), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": str(columns),
        "DVC_NO_ANALYTICS": "1",
    }
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def printed_diagnosis(out: Path) -> str:
    """Run `captrain diagnose` on the included example and return its output without the line about the report."""
    command = f"captrain diagnose docs/examples/servicedesk.jsonl --out {shlex.quote(str(out))}"
    *printed, _ = run_command(command, ROOT, columns=200).stdout.splitlines()
    return "\n".join(line.rstrip().replace(str(out), "diagnosis") for line in printed)
