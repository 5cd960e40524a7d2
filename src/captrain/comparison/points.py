"""Points: the pipeline under another selection, each in a workspace of its own, sharing what did not change.

A workspace holds the files that git keeps, as they lie here, a params.yaml of its own, and the DVC cache of this
repository, so that a stage which ran for another point is restored and not run. Points may run at the same time, on one
machine or on several that share the file system: each stage runs under a lock that is named by all that decides its
outputs, so that of two points that need the same cold stage one runs it and the other takes it from the cache. A point
that failed or was cut off goes on from its last whole stage when it is run again.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from captrain.config import Choice
from captrain.errors import UserError
from captrain.execution import exclusive
from captrain.records import digest, publish_text

if TYPE_CHECKING:
    from dvc.stage import PipelineStage

WORKSPACES = Path(".cache/points")
LOCKS = Path(".cache/locks")
LOCAL = "[core]\n    no_scm = true\n[cache]\n    dir = {cache}\n"
LOG = "log.txt"


def is_execution(override: str) -> bool:
    """Return whether an override says only where and how fast, so that it names no other point."""
    return override.lstrip("+").startswith(("machine=", "machine."))


@dataclass(frozen=True)
class Point:
    """A selection: what its params.yaml says."""

    choice: Choice

    @property
    def name(self) -> str:
        """Names the workspace: the experiment, the seed, and a digest where settings are overridden."""
        settings = [override for override in self.choice.overrides if not is_execution(override)]
        return "-".join([self.choice.experiment, str(self.choice.seed), *([digest(settings)[:8]] if settings else [])])

    def workspace(self, root: Path) -> Path:
        """Return the folder in which the point runs."""
        return root / WORKSPACES / self.name

    def lock(self, root: Path) -> Path:
        """Return the lock held by whoever changes or reads the workspace, so that no two selections compose into it at
        once."""
        return root / LOCKS / f"point-{self.name}"


def prepare(point: Point, root: Path) -> Path:
    """Make the workspace, or bring its code up to date; what ran there stays. The caller holds the point's lock."""
    workspace = point.workspace(root)
    for name in ("conf", "src", "stages", "components"):  # a file that is gone here must not stay there
        shutil.rmtree(workspace / name, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listing.split("\0")):
        # Results are the point's own: with those of another run it would look as if it had run.
        if name.startswith(("results/", ".cache/")) or name == "dvc.lock" or not (root / name).is_file():
            continue
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, workspace / name)
    cache = os.path.relpath(root / ".dvc/cache", workspace / ".dvc")
    publish_text(workspace / ".dvc/config.local", LOCAL.format(cache=cache))
    publish_text(workspace / "params.yaml", yaml.safe_dump(point.choice.model_dump(), sort_keys=False))
    return workspace


def run(point: Point, root: Path) -> Path:
    """Bring a point up to date; what its stages say goes into log.txt of its workspace.

    Where it is being run already, perhaps by a job of an earlier sweep, that is waited for.

    Returns:
        Its workspace.

    Raises:
        UserError: a stage failed; says with which message.
    """
    with exclusive(point.lock(root)) as lock:
        return _run(point, root, lock)


def _run(point: Point, root: Path, lock: int) -> Path:
    workspace = prepare(point, root)
    # Left by a run that was killed: it names processes by numbers that other nodes give to other processes.
    (workspace / ".dvc/tmp/rwlock").unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DVC_NO_ANALYTICS": "1"}
    if (workspace / "src/captrain").is_dir():
        # The code that runs is the code that DVC hashes: the workspace's, not the one that is installed. A project of
        # a user's has none, and hashes the installed one by its digests.
        env["PYTHONPATH"] = str(workspace / "src")
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    log = workspace / LOG
    with log.open("w") as file:
        command = [sys.executable, "-m", "captrain.comparison.points", str(root / LOCKS)]
        # The child has the lock, too: killed is only who waits for it, and it goes on in the workspace.
        status = subprocess.run(
            command, cwd=workspace, env=env, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,)
        ).returncode
    if status:
        raise UserError(
            f"point {point.name} failed: {reason(log)}", f"see {log.relative_to(root)}; run the same again to go on"
        )
    return workspace


def reason(log: Path) -> str:
    """Find why a run failed: its error message, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]


def reproduce(locks: Path) -> None:
    """Run what is stale of the pipeline in the current folder, stage by stage, each under its lock."""
    import networkx
    from dvc.exceptions import ReproductionError
    from dvc.repo import Repo

    with Repo() as repo:
        # Edges lead from a stage to what it needs.
        for stage in networkx.dfs_postorder_nodes(repo.index.graph):
            with exclusive(locks / f"{stage.name}-{needs(stage)}"):
                try:
                    repo.reproduce(stage.addressing, single_item=True)
                except ReproductionError as error:
                    raise SystemExit(f"stage {stage.name} failed: {error.__cause__ or error}") from None


def needs(stage: "PipelineStage") -> str:
    """Hash all that decides a stage's outputs: its command, its params, and the content of what it reads."""
    stage.save_deps()
    contents = [[str(dep.def_path), digest(dep.hash_info.value if dep.hash_info else None)] for dep in stage.deps]
    return digest(stage.cmd, sorted(contents))


if __name__ == "__main__":
    reproduce(Path(sys.argv[1]))
