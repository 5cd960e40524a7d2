"""The whole pipeline of experiment smoke, through `dvc repro`, in a repository of its own: made once a suite.

Besides TRACE's adapters and GRPO on the target, all other ways to make weights run, on a base of little training.
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
    """A copy of the repository, or of such a copy, with its own git, to run things in.

    Args:
        folder: of the copy.
        commands: folder of `python`, `dvc` and `captrain`.
    """

    def __init__(self, folder: Path, commands: Path) -> None:
        self.folder, self.commands = folder, commands

    def call(self, *command: str, cwd: Path | None = None, status: int = 0) -> str:
        """Run a command; its output (stdout and stderr) when it ends with the status."""
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
        """Commit everything that is not ignored."""
        self.call("git", "add", "-A")
        self.call("git", "-c", "user.name=test", "-c", "user.email=test@example.org", "commit", "-qm", "state")

    def stale(self) -> list[str]:
        """Stages that DVC would run on what is chosen, in the order of the pipeline, those downstream of others left
        out."""
        spec = self.folder / "results/spec.yaml"
        before = spec.read_bytes()
        self.call("python", "stages/compose.py")
        changed = {row_of(name) for name in json.loads(self.call("dvc", "status", "--json"))}
        spec.write_bytes(before)
        return [name for name in STAGES if name in changed and name != "compose"]


def make_smoke(folder: Path, warm: Path) -> None:
    """Copy this checkout into a folder, run its pipeline and commit it.

    Args:
        folder: is empty.
        warm: the fixture.
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
