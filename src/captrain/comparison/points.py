"""Points: the pipeline under another selection, each in a workspace of its own, sharing what did not change.

A workspace holds the files that git keeps, as they lie here, a params.yaml of its own, and the DVC cache of this
repository, so that a stage which ran for another point is restored and not run. Points may run at the same time, on one
machine or on several that share the file system: each stage runs under a lock that is named by all that decides its
outputs, so that of two points that need the same cold stage one runs it and the other takes it from the cache. A point
that failed or was cut off goes on from its last whole stage when it is run again.

A finished point is a table with a row for each method, small enough for git. Sweeps and replicates write such tables,
and figures of several runs are drawn from them alone (`captrain.reporting`). A table is read off each point's own
results, so that gathering again costs seconds and changes nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import yaml

from captrain.capabilities import read_selection
from captrain.comparison.differences import versus
from captrain.comparison.rows import GRPO, supervision
from captrain.comparison.tables import evaluation_table
from captrain.errors import UserError
from captrain.records import digest, publish_text, read_table
from captrain.run import Choice, exclusive, times

if TYPE_CHECKING:
    from dvc.stage import PipelineStage

WORKSPACES = Path(".cache/points")
LOCKS = Path(".cache/locks")
LOCAL = "[core]\n    no_scm = true\n[cache]\n    dir = {cache}\n"
LOG = "log.txt"
TableRow = dict[str, object]


def is_execution(override: str) -> bool:
    """Return whether an override says only where and how fast, so that it names no other point."""
    return override.lstrip("+").startswith(("machine=", "machine."))


@dataclass(frozen=True)
class SweepPoint:
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


def prepare(point: SweepPoint, root: Path) -> Path:
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


def run(point: SweepPoint, root: Path) -> Path:
    """Bring a point up to date; what its stages say goes into log.txt of its workspace.

    Where it is being run already, perhaps by a job of an earlier sweep, that is waited for.

    Returns:
        Its workspace.

    Raises:
        UserError: a stage failed; says with which message.
    """
    with exclusive(point.lock(root)) as lock:
        workspace = prepare(point, root)
        # Left by a run that was killed: it names processes by numbers that other nodes give to other processes.
        (workspace / ".dvc/tmp/rwlock").unlink(missing_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DVC_NO_ANALYTICS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        if (workspace / "src/captrain").is_dir():
            # The code that runs is the code that DVC hashes: the workspace's, not the one that is installed. A project
            # of a user's has none, and hashes the installed one by its digests.
            env["PYTHONPATH"] = str(workspace / "src")
        log = workspace / LOG
        command = [sys.executable, "-m", "captrain.comparison.points", str(root / LOCKS)]
        with log.open("w") as file:
            # The child has the lock, too: killed is only who waits for it, and it goes on in the workspace.
            status = subprocess.run(
                command, cwd=workspace, env=env, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,)
            ).returncode
        if status:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("error: ")]
            reason = (errors or lines or ["it said nothing"])[-1]
            remedy = f"see {log.relative_to(root)}; run the same again to go on"
            raise UserError(f"point {point.name} failed: {reason}", remedy)
        return workspace


def point_rows(point: SweepPoint, root: Path) -> list[TableRow]:
    """Tabulate a finished point while nobody changes its workspace: one row for each method of its evaluation.

    Returns:
        Rows of experiment, seed, method, label, learns_from, pass_rate, low, high (over tasks), rollouts_spent, cpu_s
        (of the stages that the method rests on, None unless all of them ran in this point), over_grpo, over_low,
        over_high, reading (the paired difference to GRPO on the target, None where the evaluation compares no such
        pair), selected (capabilities, joined by spaces).

    Raises:
        UserError: the evaluation's tables are missing.
    """
    with exclusive(point.lock(root)):
        results = point.workspace(root) / "results"
        main, differences, costs = (
            evaluation_table(results / "evaluation", name).to_dict("records")
            for name in ("main", "differences", "spent")
        )
        candidates = read_selection(results)["candidates"]
        durations = times(results.parent)
    selected = " ".join(sorted(candidate["id"] for candidate in candidates if candidate["selected"]))
    over_grpo = versus(differences, GRPO)
    stages = {row["method"]: row["stages"].split() for row in costs if isinstance(row["stages"], str)}
    rows = []
    for row in main:
        method, cpu = row["method"], None
        if method in stages and all(stage in durations for stage in stages[method]):
            cpu = round(sum(durations[stage].cpu_s for stage in stages[method]), 1)
        choice = {"experiment": point.choice.experiment, "seed": point.choice.seed}
        words = {"method": method, "label": row["label"], "learns_from": supervision(method) or ""}
        numbers = {name: row[name] for name in ("pass_rate", "low", "high", "rollouts_spent")}
        compared = over_grpo.get(method, (None, None, None, None))
        over = dict(zip(("over_grpo", "over_low", "over_high", "reading"), compared, strict=True))
        rows.append({**choice, **words, **numbers, "cpu_s": cpu, **over, "selected": selected})
    return rows


def write_table(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Publish a table as CSV, numbers rounded, so that equal results give equal bytes."""
    publish_text(path, pd.DataFrame(rows).to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def read_rows(path: Path) -> list[TableRow]:
    """Read the rows of points that `write_table` wrote; an empty cell is None.

    Raises:
        UserError: the table is missing, or not whole.
    """
    frame = read_table(path, "name the folder of an earlier replication", columns=("experiment", "seed", "method"))
    return [{name: None if pd.isna(cell) else cell for name, cell in row.items()} for row in frame.to_dict("records")]  # pyright: ignore[reportReturnType]


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
