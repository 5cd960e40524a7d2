"""Runs points of a sweep: the pipeline with other settings, each in its own workspace.

A workspace has a copy of the files under git, its own params.yaml, and the DVC cache of this repository. So a stage
that ran for one point is restored for another. Points also share the workspaces of trainings by rollouts, so an adapter
that two points need is trained once even if their stages differ. Points may run at the same time, on one machine or on
several with a shared file system. Each stage runs under a lock that is named by a digest of everything that decides its
outputs, so the same stage never runs twice. A failed or interrupted point resumes after its last finished stage.

A finished point is a table with one row per method, small enough for git. Sweeps and replicates write such tables, and
figures over several runs use them alone (`captrain.reporting`). The table is read from the point's results, so making
it again takes seconds.
"""

import os
import re
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
from captrain.run import Choice, clean, exclusive, launch, times
from captrain.training import TRAININGS

if TYPE_CHECKING:
    from dvc.stage import PipelineStage

WORKSPACES = Path(".cache/points")
LOCKS = Path(".cache/locks")
LOCAL = "[core]\n    no_scm = true\n[cache]\n    dir = {cache}\n"
LOG = "log.txt"
TABLES = ("results/sweeps/", "results/studies/", "results/replicates/")
"""Results over several points."""
STAGE_LINE = re.compile(r"[a-z_]+ +[\d.]+ s ")
"""Start of the line that a stage prints when it ends."""
TableRow = dict[str, object]


def is_execution(override: str) -> bool:
    """Return whether an override only sets where and how fast to run, and so is not part of a point's name."""
    return override.lstrip("+").startswith(("machine=", "machine."))


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep: the content of its params.yaml."""

    choice: Choice

    @property
    def name(self) -> str:
        """Name of the workspace: experiment, seed, and a digest of overridden settings."""
        settings = [override for override in self.choice.overrides if not is_execution(override)]
        return "-".join([self.choice.experiment, str(self.choice.seed), *([digest(settings)[:8]] if settings else [])])

    def workspace(self, root: Path) -> Path:
        """Return the folder where the point runs."""
        return root / WORKSPACES / self.name

    def lock(self, root: Path) -> Path:
        """Return the lock to hold while changing or reading the workspace."""
        return root / LOCKS / f"point-{self.name}"


def prepare(point: SweepPoint, root: Path) -> Path:
    """Make the workspace or update its code; keep its results. The caller holds the point's lock.

    A new workspace starts from the results here, so that stages whose settings and inputs are the same do not run.
    """
    workspace = point.workspace(root)
    is_new = not (workspace / "dvc.lock").exists()
    for name in ("conf", "src", "stages", "components"):  # remove files that were deleted here
        shutil.rmtree(workspace / name, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8", check=True).stdout
    for name in filter(None, listing.split("\0")):
        is_result = name.startswith("results/") or name == "dvc.lock"
        if name.startswith((".cache/", *TABLES)) or (is_result and not is_new) or not (root / name).is_file():
            continue
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, workspace / name)
    shared, own = root / TRAININGS, workspace / TRAININGS
    shared.mkdir(parents=True, exist_ok=True)
    if not own.is_dir():
        own.parent.mkdir(exist_ok=True)
        own.symlink_to(os.path.relpath(shared, own.parent))
    cache = os.path.relpath(root / ".dvc/cache", workspace / ".dvc")
    publish_text(workspace / ".dvc/config.local", LOCAL.format(cache=cache))
    publish_text(workspace / "params.yaml", yaml.safe_dump(point.choice.model_dump(), sort_keys=False))
    return workspace


def run(point: SweepPoint, root: Path) -> Path:
    """Run the stale stages of a point; output goes to log.txt of its workspace.

    Waits if another process runs the point.

    Returns:
        The workspace.

    Raises:
        UserError: a stage failed. The error has the stage's message.
    """
    with exclusive(point.lock(root)):
        workspace = prepare(point, root)
        # A killed run leaves DVC's lock behind, and on another node its process ids belong to other processes.
        (workspace / ".dvc/tmp/rwlock").unlink(missing_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DVC_NO_ANALYTICS": "1", launch.PIPELINE: str(os.getpid())}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        if (workspace / "src/captrain").is_dir():
            # Run the workspace's code, which DVC hashes, not the installed code. A user's project has no src/.
            env["PYTHONPATH"] = str(workspace / "src")
        log = workspace / LOG
        command = [sys.executable, "-m", "captrain.comparison.points", str(root / LOCKS)]
        out, both = subprocess.PIPE, subprocess.STDOUT
        with (
            log.open("w", encoding="utf-8") as file,
            subprocess.Popen(
                command, cwd=workspace, env=env, stdout=out, stderr=both, encoding="utf-8", errors="replace"
            ) as child,
        ):
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    file.write(clean(line))
                    file.flush()
                    if STAGE_LINE.match(line):
                        print(f"{point.name}: {line.rstrip()}", flush=True)
            except KeyboardInterrupt:
                launch.end_children()
                raise
        if child.returncode:
            lines = [
                line.strip() for line in log.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()
            ]
            errors = [line for line in lines if line.startswith("error: ")]
            reason = (errors or lines or ["it printed nothing"])[-1]
            remedy = f"see {log.relative_to(root)}; run the same again to go on"
            raise UserError(f"point {point.name} failed: {reason}", remedy)
        return workspace


def point_rows(point: SweepPoint, root: Path) -> list[TableRow]:
    """Tabulate a finished point under its lock, one row per method of its evaluation.

    Returns:
        Rows of experiment, seed, method, label, learns_from, pass_rate, low, high (over tasks), rollouts_spent, cpu_s
        (of the method's stages; None unless all of them ran in this point), over_grpo, over_low, over_high, reading
        (the paired difference to GRPO on the target; None if not compared), selected (capabilities, joined by spaces).

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
    """Publish a table as CSV. Numbers are rounded, so equal results give equal bytes."""
    publish_text(path, pd.DataFrame(rows).to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def read_rows(path: Path) -> list[TableRow]:
    """Read a table of `write_table`; an empty cell is None.

    Raises:
        UserError: the table is missing or damaged.
    """
    frame = read_table(path, "name the folder of an earlier replication", columns=("experiment", "seed", "method"))
    return [{name: None if pd.isna(cell) else cell for name, cell in row.items()} for row in frame.to_dict("records")]  # pyright: ignore[reportReturnType]


def reproduce(locks: Path) -> None:
    """Run the stale stages of the pipeline in the current folder, each under its own lock.

    The process ends with the sweep, also if the sweep is killed or interrupted.
    """
    launch.end_with_pipeline()
    os.environ[launch.PIPELINE] = str(os.getpid())
    import networkx
    from dvc.exceptions import ReproductionError
    from dvc.repo import Repo

    with Repo() as repo:
        repo.checkout(allow_missing=True)  # outputs of the stages that did not change
        # Edges lead from a stage to its dependencies, so postorder runs dependencies first.
        for stage in networkx.dfs_postorder_nodes(repo.index.graph):
            with exclusive(locks / f"{stage.name}-{needs(stage)}"):
                try:
                    repo.reproduce(stage.addressing, single_item=True)
                except ReproductionError as error:
                    raise SystemExit(f"stage {stage.name} failed: {error.__cause__ or error}") from None


def needs(stage: "PipelineStage") -> str:
    """Hash everything that decides a stage's outputs: command, params, and content of its dependencies."""
    stage.save_deps()
    contents = [[str(dep.def_path), digest(dep.hash_info.value if dep.hash_info else None)] for dep in stage.deps]
    return digest(stage.cmd, sorted(contents))


if __name__ == "__main__":
    reproduce(Path(sys.argv[1]))
