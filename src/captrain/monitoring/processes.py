"""Processes of a pipeline: the stages that run here, by the list of processes.

A stage is the Python process whose script is the one that dvc.yaml names, in this folder, or that runs `captrain run
STAGE` in it, which counts as the script stages/STAGE.py. No lock says that as well:
DVC's own (`.dvc/tmp/lock`) is free while a stage runs, and its list of readers and writers (`.dvc/tmp/rwlock`) outlives
a run that was killed, and names no machine. The latter is shown where it names a process that is not here, which may be
one of another node. Looking takes no lock.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import yaml

from captrain.errors import UserError
from captrain.experiments import WORKSPACES
from captrain.records import JsonObject, read_yaml

UNREADABLE = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError)
"""Exceptions of reading a file that is half-written, gone, or not what it should be."""


@dataclass(frozen=True)
class Running:
    """The process of a stage, and when it began, in seconds since 1970."""

    pid: int
    since: float


class RunningPoint(NamedTuple):
    """A stage that runs in the workspace of a sweep's point, and when it began."""

    name: str
    stage: str
    since: float


def pipeline(root: Path) -> dict[str, JsonObject]:
    """Read the stages of dvc.yaml as they stand there; none while it cannot be read."""
    try:
        stages = read_yaml(root / "dvc.yaml", JsonObject)["stages"]
        return {str(name): stage for name, stage in stages.items() if isinstance(stage, dict)}
    except UNREADABLE:
        return {}


def running(root: Path, stages: Mapping[str, JsonObject]) -> tuple[dict[str, Running], list[RunningPoint]]:
    """Find stages that run here, in the order of the pipeline, and those that run in the points beneath.

    Args:
        root: the folder that holds dvc.yaml, resolved.
        stages: what `pipeline` returns.
    """
    commands = {name: _words(stage.get("cmd")) for name, stage in stages.items()}
    scripts = {(root / path).resolve(): name for name, words in commands.items() if (path := _script_of(words))}
    by_stage, points = dict[str, Running](), dict[tuple[str, str], float]()
    beneath = root / WORKSPACES
    for process in psutil.process_iter(["pid", "cmdline", "cwd", "create_time", "status"]):
        facts = process.info
        script = _script(facts["cmdline"] or [], facts["cwd"] or "")
        if script is None or facts["status"] == psutil.STATUS_ZOMBIE:
            continue
        since = facts["create_time"]
        if name := scripts.get(script):
            # Processes that a stage forks have its command line, too.
            if name not in by_stage or since < by_stage[name].since:
                by_stage[name] = Running(facts["pid"], since)
        elif script.parent.name == "stages" and script.parents[2] == beneath:
            key = script.parents[1].name, script.stem
            points[key] = min(since, points.get(key, since))
    order = [*stages]
    return (
        {name: by_stage[name] for name in sorted(by_stage, key=order.index)},
        [RunningPoint(*key, since) for key, since in sorted(points.items())],
    )


def writers(root: Path, stages: Mapping[str, JsonObject]) -> list[str]:
    """List whom DVC says to be at work, in words; of use when no stage is seen to run."""
    try:
        record = read_yaml(root / ".dvc/tmp/rwlock", JsonObject)
        pids = {str(path): int(writer["pid"]) for path, writer in record.get("write", {}).items()}
    except UNREADABLE:
        return []
    makers = {
        str(root / path): name
        for name, stage in stages.items()
        for kind in ("outs", "plots", "metrics")
        for output in stage.get(kind) or []
        for path in ([output] if isinstance(output, str) else output)
    }
    writing = {(makers.get(path, "an unknown stage"), pid) for path, pid in pids.items()}
    return [
        f"DVC is about to begin or to end {name} (process {pid})"
        if psutil.pid_exists(pid)
        else f"DVC's rwlock has process {pid} at work on {name}, which is not here: it runs on another machine, or "
        "was killed"
        for name, pid in sorted(writing)
    ]


def _script(command: Sequence[str], folder: str) -> Path | None:
    """Find the script that a Python process runs, None where it runs none."""
    if not command or not Path(command[0]).name.startswith("python"):
        return None
    path = _script_of(command[1:])
    return Path(os.path.realpath(Path(folder) / path)) if path else None


def _script_of(words: Sequence[str]) -> str:
    """Find the script that the words of a command name, "" for none."""
    words = [word for word in words if not word.startswith("-") and not Path(word).name.startswith("python")]
    if words and words[0].endswith(".py"):
        return words[0]
    if len(words) > 2 and Path(words[0]).name == "captrain" and words[1] == "run":
        return f"stages/{words[2]}.py"
    return ""


def _words(command: object) -> list[str]:
    try:
        return shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return []
