"""Finding on one thing that a run needs, and the commands that ask for it."""

import subprocess
from typing import NamedTuple

PATIENCE = 20.0
"""Seconds that an interpreter, a cluster or an endpoint may take to answer."""


class Finding(NamedTuple):
    """One thing that was looked at: whether it is as the run needs it (None: it cannot be seen yet), what was seen, and
    what to do if it is not."""

    subject: str
    passed: bool | None
    detail: str
    remedy: str = ""


def command_output(*command: str, patience: float = PATIENCE) -> str | None:
    """Run a command and return what it prints; None where it fails, is not there, or takes too many seconds."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
