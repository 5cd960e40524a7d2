"""Slurm jobs of this repository: submissions, points of sweeps, states, and `captrain jobs`.

If Slurm does not answer, the information on disk is still shown.
"""

import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import model_validator
from rich.table import Table
from rich.text import Text

from captrain.errors import InfrastructureError, UserError
from captrain.records import FileName, Record, read_json
from captrain.run.failures import Failure

JOBS = Path(".cache/jobs")
SWEEPS = Path(".cache/sweeps")
"""Folder of Hydra's files of each sweep. With `hydra/launcher=submitit_slurm` each point is a job."""
RECORD = "submission.json"
SUBMITTED = "_submitted.pkl"
"""Suffix of the file that submitit writes for each accepted job, after the job id."""
ALIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "COMPLETING"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"),
}
"""States of a job that may still finish."""
LAUNCHERS = re.compile(r"submitit |srun: |\[[^]]*\]\[submitit\]")
"""Beginning of log lines that come from submitit or Slurm and not from the job's function."""
COLOURS = {
    **dict.fromkeys(("finished", "ended", "running", "completing"), "green"),
    **dict.fromkeys(("pending", "configuring"), "yellow"),
}


class Submission(Record):
    """One call of sbatch: a single job, or an array with one task per key. `at` is the time in UTC."""

    name: FileName
    label: str
    keys: list[str]
    items: list[str]
    at: str

    @model_validator(mode="after")
    def _names_each_key(self) -> Self:
        if len(self.keys) != len(self.items):
            raise ValueError(f"it has {len(self.keys)} keys and {len(self.items)} items")
        return self

    def attempts(self, folder: Path = JOBS) -> list["JobAttempt"]:
        """List an attempt for each key with a job that Slurm accepted. Files with other names are ignored."""
        names = [path.name.removesuffix(SUBMITTED) for path in (folder / self.name).glob(f"*{SUBMITTED}")]
        by_index = {job.partition("_")[2] or "0": job for job in names}
        return [
            JobAttempt(folder / self.name, by_index[str(index)], key)
            for index, key in enumerate(self.keys)
            if str(index) in by_index
        ]


class JobAttempt(NamedTuple):
    """One Slurm job for one item. A point of a sweep has the job's name as its key."""

    folder: Path
    job: str
    key: str

    @property
    def log(self) -> Path:
        """File of the job's output, over all restarts."""
        return self.folder / f"{self.job}_0_log.out"

    def failure(self) -> Failure | None:
        """Read the exception that the job's function raised, if any."""
        return Failure.read(self.folder / f"{self.key}.failure")

    def is_ended_point(self) -> bool:
        """Return whether this is a point of a sweep and its job has ended. It may have failed."""
        return self.key == self.job and (self.folder / f"{self.job}_0_result.pkl").exists()

    def last_line(self) -> str:
        """Read the last line that its function printed, progress bars included."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip() and not LAUNCHERS.match(line)), "")


class State(NamedTuple):
    """State of a job as Slurm reports it."""

    name: str
    node: str = ""
    elapsed: str = ""
    reason: str = ""


def submissions(jobs: Path = JOBS) -> list[Submission]:
    """Read all submissions, oldest first."""
    rows = [read_json(path, Submission, "move it away: jobs run on") for path in jobs.glob(f"*/{RECORD}")]
    return sorted(rows, key=lambda row: row.at)


def sweep_attempts(root: Path) -> list[tuple[str, JobAttempt]]:
    """List the jobs of sweeps, each with the name of its sweep, oldest first."""
    paths = list[Path]()
    for folder in (root / SWEEPS).glob("*/.submitit"):
        if any(folder.glob("*/*_submission.sh")):  # `submitit_local` writes none
            paths += folder.glob(f"*/*{SUBMITTED}")
    paths.sort(key=lambda path: (path.lstat().st_mtime, path.name))
    names = [path.name.removesuffix(SUBMITTED) for path in paths]
    return [
        (f"sweep {path.parents[2].name}", JobAttempt(path.parent, name, name))
        for path, name in zip(paths, names, strict=True)
    ]


def states(jobs: Collection[str]) -> dict[str, State]:
    """Ask Slurm for the state of each job; "GONE" for a finished job that Slurm has forgotten.

    Raises:
        InfrastructureError: the controller does not answer.
    """
    if not jobs:
        return {}
    command = ("squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T|%N|%M|%r")
    try:
        process = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(str(error)) from None
    if process.returncode:
        raise InfrastructureError(" ".join(process.stderr.split()) or f"squeue ended with {process.returncode}")
    rows = (line.strip().split("|") for line in process.stdout.splitlines())
    by_job = {row[0]: State(*row[1:]) for row in rows if len(row) == 5}
    return {job: by_job.get(job, State("GONE")) for job in jobs}


def jobs_table(root: Path, limit: int = 40) -> Table:
    """Tabulate the last attempts of the newest items, oldest first, then the newest jobs of sweeps: `limit` of each."""
    attempts: dict[str, list[tuple[str, JobAttempt]]] = {}
    for submission in submissions(root / JOBS):
        items = dict(zip(submission.keys, submission.items, strict=True))
        for attempt in submission.attempts(root / JOBS):
            # Reinsert the item, so the newest attempt comes last.
            earlier = attempts.pop(attempt.key, [])
            attempts[attempt.key] = [*earlier, (f"{submission.label} {items[attempt.key]}", attempt)]
    last = [*[rows[-1] for rows in attempts.values()][-limit:], *sweep_attempts(root)[-limit:]]
    try:
        by_job, caption = states([attempt.job for _, attempt in last]), None
    except InfrastructureError as error:
        by_job, caption = {}, f"Slurm does not answer: {error}"
    table = Table(title="jobs", title_justify="left", caption=caption, caption_justify="left")
    for column in ("job", "item", "state", "node", "elapsed"):
        table.add_column(column, no_wrap=column != "item")
    table.add_column("last line", max_width=50)
    table.add_column("reason")
    for item, attempt in last:
        # One word for the state, and the reason why the job waits or failed.
        state, failure = by_job.get(attempt.job, State("UNKNOWN")), attempt.failure()
        count = len(attempts.get(attempt.key, []))
        word, reasons = state.name.lower(), [] if state.reason in ("", "None") else [state.reason]
        if (root / JOBS / "results" / f"{attempt.key}.jsonl").exists():
            word, reasons = "finished", []
        elif attempt.is_ended_point() and state.name in ("GONE", "UNKNOWN", "COMPLETED"):
            word, reasons = "ended", []
        elif failure is not None:
            fault = failure.message if failure.remedy else f"{failure.type}: {failure.message}"
            word, reasons = "failed", fault.splitlines()[:1]
        reasons += [f"submitted {count} times"] if count > 1 else []
        table.add_row(
            attempt.job,
            item,
            Text(word, COLOURS.get(word, "red")),
            state.node,
            state.elapsed,
            Text(attempt.last_line()[:100]),
            Text("; ".join(reasons)),
        )
    return table


def job_log(root: Path, job: str) -> str:
    """Read the output of a job, over all restarts.

    Raises:
        UserError: the job does not exist, or has no output yet.
    """
    attempts = [attempt for submission in submissions(root / JOBS) for attempt in submission.attempts(root / JOBS)]
    attempts += [attempt for _, attempt in sweep_attempts(root)]
    # The id of an array stands for its first task.
    attempt = next((attempt for attempt in attempts if job in (attempt.job, attempt.job.split("_")[0])), None)
    if attempt is None:
        last_jobs = ", ".join(attempt.job for attempt in attempts[-5:])
        raise UserError(
            f"there is no job {job} here",
            f"the last ones are {last_jobs}" if last_jobs else "no job was submitted here; machine=slurm submits jobs",
        )
    if not attempt.log.exists():
        raise UserError(f"job {attempt.job} has no output yet", "see `captrain jobs` for its state")
    return attempt.log.read_text(errors="replace", encoding="utf-8")
