"""The jobs of this repository: the ledger of what was submitted, what Slurm says of it, and `captrain jobs`.

Where Slurm does not answer, what lies on disk is shown all the same.
"""

import json
import os
import pickle
import subprocess
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Record, first_fault, remains

JOBS = Path(".cache/jobs")
ALIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "COMPLETING"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"),
}
"""States of a job that may yet come to its end by itself."""
LAUNCHERS = ("submitit ", "srun: ")
"""Beginnings of lines in a job's log that its function has not printed."""
COLOURS = {"finished": "green", "running": "green", "pending": "yellow", "configuring": "yellow", "completing": "green"}


class Submission(Record):
    """One call of sbatch: a single job, or an array with one task for each key. `job` is Slurm's id, None until it is
    known; `at` is the local time, which only sacct needs."""

    name: str
    label: str
    keys: list[str]
    items: list[str]
    at: str
    job: str | None = None

    def attempts(self, folder: Path = JOBS) -> list["Attempt"]:
        """List one attempt for each key; none before the job id is known."""
        jobs = [] if self.job is None else [self.job] * len(self.keys)
        if len(jobs) > 1:
            jobs = [f"{job}_{index}" for index, job in enumerate(jobs)]
        return [Attempt(folder / self.name, job, key) for job, key in zip(jobs, self.keys, strict=False)]


class Attempt(NamedTuple):
    """Slurm job for one item."""

    folder: Path
    job: str
    key: str

    @property
    def log(self) -> Path:
        """File that the job prints to, over all its restarts."""
        return self.folder / f"{self.job}_0_log.out"

    @property
    def submitted(self) -> Path:
        """The pickled work, where submitit looks for it."""
        return self.folder / f"{self.job}_submitted.pkl"

    def failure(self) -> Exception | None:
        """Read the exception that the job's function raised, if it did."""
        path = self.folder / f"{self.key}.failure"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def last_line(self) -> str:
        """Read the last line that its function printed; a progress bar's states are lines, too."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith(LAUNCHERS)), "")


class State(NamedTuple):
    """State of a job as Slurm reports it."""

    name: str
    node: str = ""
    elapsed: str = ""
    reason: str = ""


def submissions(jobs: Path = JOBS) -> list[Submission]:
    """Read all submissions in the ledger, oldest first.

    A line that was cut off is passed over: it was the last thing its process did, and nothing had followed from it.
    """
    path, rows = jobs / "ledger.jsonl", dict[str, JsonObject]()
    for row in remains(path, JsonObject):
        if row is not None and isinstance(name := row.get("name"), str):
            rows.setdefault(name, {}).update(row)
    try:
        return [Submission.model_validate(row) for row in rows.values()]
    except ValidationError as error:
        raise UserError(f"{path} is not a list of jobs ({first_fault(error)})", "move it away: jobs run on") from None


def states(jobs: Collection[str]) -> dict[str, State]:
    """Ask Slurm for the state of each of these jobs; the name is "GONE" of one that it has forgotten.

    Raises:
        InfrastructureError: the controller does not answer.
    """
    if not jobs:
        return {}
    # The controller knows every job that is not over, and forgets the others; sacct is seconds behind, or not there.
    queue = _slurm("squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T|%N|%M|%r")
    rows = (line.strip().split("|") for line in queue.splitlines())
    by_job = {row[0]: State(*row[1:]) for row in rows if len(row) == 5}
    if forgotten := [job for job in jobs if job not in by_job]:
        with suppress(InfrastructureError):
            command = ("sacct", "-X", "--noheader", "--parsable2", "--format=JobID,State,NodeList,Elapsed,ExitCode")
            for line in _slurm(*command, f"--jobs={','.join(forgotten)}").splitlines():
                job, state, node, elapsed, code = line.strip().split("|")
                by_job[job] = State(state.split()[0], node, elapsed, f"exit code {code}")
    return {job: by_job.get(job, State("GONE")) for job in jobs}


def job_named(name: str, since: str) -> str | None:
    """Find the id of the job or array of this name, if Slurm has heard of one; `since` is when it was submitted, at the
    earliest and by this machine's clock."""
    try:
        listing = _slurm("squeue", "--me", "--noheader", "--states=all", "--format=%F", f"--name={name}")
    except InfrastructureError as error:
        raise UserError(f"Slurm does not answer: {error}", "see that it runs, and run again") from None
    if not listing.split():
        # sacct leaves out what was over by then on the controller's clock, which may be behind; the name is ours alone.
        early = (datetime.fromisoformat(since) - timedelta(days=1)).isoformat()
        with suppress(InfrastructureError):
            command = ("sacct", "-X", "--noheader", "--parsable2", "--format=JobID", f"--name={name}")
            listing = _slurm(*command, f"--starttime={early}")
    return next((line.split("_")[0] for line in listing.split()), None)


def append_to_ledger(row: JsonObject) -> None:
    """Append to the ledger, and return when it is on the disk."""
    with open(JOBS / "ledger.jsonl", "ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read() not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _slurm(*command: str) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(str(error)) from None
    if process.returncode:
        raise InfrastructureError(" ".join(process.stderr.split()) or f"{command[0]} ended with {process.returncode}")
    return process.stdout


def jobs_table(root: Path, limit: int = 40) -> Table:
    """Tabulate the last attempt at each item, oldest first: job, item, state, node, elapsed, last line, reason."""
    attempts: dict[str, list[tuple[Submission, int, Attempt]]] = {}
    for submission in submissions(root / JOBS):
        for index, attempt in enumerate(submission.attempts(root / JOBS)):
            attempts.setdefault(attempt.key, []).append((submission, index, attempt))
    # The newest last, whenever the item was first tried.
    last = sorted((rows[-1] for rows in attempts.values()), key=lambda row: (row[0].at, row[0].name, row[1]))[-limit:]
    try:
        by_job, caption = states([attempt.job for *_, attempt in last]), None
    except InfrastructureError as error:
        by_job, caption = {}, f"Slurm does not answer: {error}"
    table = Table(title="jobs", title_justify="left", caption=caption, caption_justify="left")
    for column in ("job", "item", "state", "node", "elapsed"):
        table.add_column(column, no_wrap=column != "item")
    table.add_column("last line", max_width=50)
    table.add_column("reason")
    for submission, index, attempt in last:
        # One word for the state, and a reason: why it waits, what it failed with, how it died.
        state, failure, count = by_job.get(attempt.job, State("UNKNOWN")), attempt.failure(), len(attempts[attempt.key])
        word, reasons = state.name.lower(), [] if state.reason in ("", "None") else [state.reason]
        if (root / JOBS / "results" / f"{attempt.key}.pkl").exists():
            word, reasons = "finished", []
        elif failure is not None:
            fault = failure.problem if isinstance(failure, UserError) else f"{type(failure).__name__}: {failure}"
            word, reasons = "failed", fault.splitlines()[:1]
        reasons += [f"submitted {count} times"] if count > 1 else []
        table.add_row(
            attempt.job,
            f"{submission.label} {submission.items[index]}",
            Text(word, COLOURS.get(word, "red")),
            state.node,
            state.elapsed,
            Text(attempt.last_line()[:100]),
            Text("; ".join(reasons)),
        )
    return table


def job_log(root: Path, job: str) -> str:
    """Read all that a job has printed, over its restarts.

    Raises:
        UserError: there is no such job, or it has printed nothing yet.
    """
    attempts = [attempt for submission in submissions(root / JOBS) for attempt in submission.attempts(root / JOBS)]
    # An array's own id stands for its first task.
    attempt = next((attempt for attempt in attempts if job in (attempt.job, attempt.job.split("_")[0])), None)
    if attempt is None:
        last_jobs = ", ".join(attempt.job for attempt in attempts[-5:])
        remedy = f"the last ones are {last_jobs}" if last_jobs else "choose machine=slurm in params.yaml (overrides)"
        raise UserError(f"there is no job {job} here", remedy)
    if not attempt.log.exists():
        raise UserError(f"job {attempt.job} has said nothing yet", "see `captrain jobs` for its state")
    return attempt.log.read_text(errors="replace")
