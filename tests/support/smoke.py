"""The whole pipeline of experiment smoke, run with `dvc repro` in a repository of its own, once per test run.

Beside TRACE's adapters and GRPO on the target, it runs every other row, on a base with little training.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from support.training import ROOT

from captrain.projects.pipeline import shipped_stages
from captrain.run import row_of

BIN = Path(sys.executable).parent
STAGES = [*shipped_stages()]
SETTINGS = (
    "baselines.solutions.run=true",
    "baselines.solutions.demonstrations=100",
    "merging.methods=[svd,distillation]",
    "merging.rollouts=80",
)
RECORDING = """#!/bin/sh
case "$*" in *stages/*) exec {python} -P {steps} "$@";; *) exec {python} "$@";; esac
"""


class Repository:
    """A copy of the repository with a git of its own, to run commands in.

    Args:
        folder: where the copy is.
        commands: folder with the programs `python`, `dvc` and `captrain`.
    """

    def __init__(self, folder: Path, commands: Path) -> None:
        self.folder, self.commands = folder, commands

    def call(self, *command: str, cwd: Path | None = None, status: int = 0) -> str:
        """Run a command, require its exit status, and return stdout and stderr."""
        path = os.pathsep.join([str(self.commands), str(BIN), os.environ["PATH"]])
        paths = {"PATH": path, "PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(ROOT / "tests")])}
        env = {**os.environ, **paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout

    def choose(self, *overrides: str) -> None:
        """Write params.yaml."""
        choice = {"experiment": "smoke", "seed": 0, "overrides": [*SETTINGS, *overrides]}
        (self.folder / "params.yaml").write_text(yaml.safe_dump(choice))

    def commit(self) -> None:
        """Commit everything that git does not ignore."""
        self.call("git", "add", "-A")
        self.call("git", "-c", "user.name=test", "-c", "user.email=test@example.org", "commit", "-qm", "state")

    def stale(self) -> list[str]:
        """List the stages that DVC would run first, in the pipeline's order, without those downstream of others."""
        spec = self.folder / "results/spec.yaml"
        before = spec.read_bytes()
        self.call("python", "stages/compose.py")
        changed = {row_of(name) for name in json.loads(self.call("dvc", "status", "--json"))}
        spec.write_bytes(before)
        return [name for name in STAGES if name in changed and name != "compose"]


def make_smoke(folder: Path, warm: Path) -> None:
    """Copy this checkout into an empty folder, run its pipeline and commit it.

    Args:
        folder: an empty folder.
        warm: the fixture of that name.
    """
    commands = folder.with_name("recording")
    commands.mkdir()
    for name in ("captrain", "dvc"):
        shutil.copy(warm / name, commands)
    (commands / "python").write_text(RECORDING.format(python=warm / "python", steps=ROOT / "tests/support/steps.py"))
    (commands / "python").chmod(0o755)
    repository = Repository(folder, commands)
    listed = repository.call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\n")
    for name in filter(None, listed):
        if not name.startswith("results/") and name != "dvc.lock" and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    repository.call("git", "init", "-q")
    repository.choose()
    repository.commit()
    repository.call("dvc", "repro")
    repository.commit()
