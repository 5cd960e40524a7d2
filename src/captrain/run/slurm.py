"""Runs independent items of work as Slurm jobs. Each item is submitted once, and later processes find and reuse it.

An item's key is its fingerprint: a digest of everything that decides its result, which excludes the machine. All state
is in `.cache/jobs`, on a file system that every node sees under the same path:

    lock                held during a submission, so two pipelines never submit the same item
    results/<key>.jsonl its digest and the result of a finished job, reused by every process with this key
    <submission>/       record of the submission, submitit's script, pickles and logs, and failures of jobs

- A process may be killed at any moment. Then nothing was submitted, or its successor finds the jobs by submitit's
  files. If it is killed within sbatch, the job finds no work and ends.
- Two jobs of one key wait for each other, and the second finds the result.
- A job that is preempted or reaches its time limit is queued again and calls its function again. Functions resume from
  their own state (`captrain.training`, `captrain.agents`).
- A job that dies otherwise (killed, cancelled, out of memory, lost node) is submitted again, a limited number of times.
  To stop the jobs, stop the pipeline first.
- An exception of the function reaches the caller as if the function had run here.
"""

import os
import secrets
import shutil
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from tqdm import tqdm

from captrain.errors import InfrastructureError, UserError
from captrain.records import ProgressBar, digest, json_without_secrets, publish_bytes
from captrain.run import Slurm
from captrain.run.failures import Failure
from captrain.run.fingerprint import fingerprint, identity_of
from captrain.run.jobs import ALIVE, JOBS, RECORD, JobAttempt, Submission, states, submissions
from captrain.run.locks import exclusive
from captrain.run.streams import clean_output

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

GRACE = 5.0
"""Seconds to wait for the result of a finished job on a slow file system."""
ENDING = threading.Event()
"""Set in a job that Slurm is ending. Slurm ends the steps of a job in any order, so exceptions around that time are not
failures of the work."""
NOTICE = 2.0
"""Seconds until all steps of a job have received the signal that the job ends."""
THREADS = "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1"


@contextmanager
def _told_of_the_end(requeues: int) -> Iterator[None]:
    """Set `ENDING` when Slurm ends this job, in addition to submitit's own handlers."""
    from submitit.core.job_environment import JobEnvironment
    from submitit.core.utils import UncompletedJobError

    numbers = (signal.SIGTERM, signal.Signals[f"SIG{JobEnvironment.USR_SIG}"])
    previous = {int(number): signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        ENDING.set()
        try:
            if callable(handler := previous[number]):
                handler(number, frame)
        except UncompletedJobError:
            # Use SystemExit, because the interrupted function may catch any other exception.
            raise SystemExit(f"not queued again: {requeues} times are the limit (machine.slurm.requeues)") from None

    for number in previous:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Work:
    """Callable of a job. submitit calls `checkpoint` when the job is preempted or its time is nearly up."""

    function: Callable[[Any], object]
    item: object
    key: str
    folder: Path
    requeues: int

    def __call__(self) -> None:
        """Compute and store the result, or the exception, unless the result exists."""
        with clean_output(), exclusive(JOBS / "results" / f"{self.key}.lock"), _told_of_the_end(self.requeues):
            if stored_result(self.function, self.key) is not None:
                print("the result exists already", flush=True)
                return
            try:
                result = self.function(self.item)
            except Exception as error:
                account = f"error: {error}" if isinstance(error, UserError) else traceback.format_exc()
                print(account, flush=True)
                if not ENDING.wait(NOTICE):
                    Failure.of(error).write(self.folder / f"{self.key}.failure")
                # submitit would record any other exception. With SystemExit, Slurm marks the job as failed.
                raise SystemExit(1) from None
            kind = _type_of(self.function)
            text = json_without_secrets(kind.dump_json(result).decode())
            lines = f'"{digest(identity_of(kind.validate_json(text)))}"\n{text}\n'.encode()
            publish_bytes(JOBS / "results" / f"{self.key}.jsonl", lines, flush=True)

    def checkpoint(self) -> "DelayedSubmission":
        """Return this work, so that the requeued job runs it again."""
        from submitit.helpers import DelayedSubmission

        ENDING.set()
        return DelayedSubmission(self)


class Dispatch:
    """Applies a module-level function to every item, each in its own job.

    Args:
        function: importable function with picklable arguments. It declares the type of its result, which is stored as
            JSON. A second call must resume the first.
        items: independent items: dataclasses, models or paths.
        slurm: resources of a job.
        label: name of the progress bar and of the jobs.

    Raises:
        UserError: sbatch is not installed here.
    """

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any], slurm: Slurm, label: str) -> None:
        if shutil.which("sbatch") is None:
            remedy = "run this on a machine of the cluster, or choose machine=local"
            raise UserError("sbatch is not installed here", remedy)
        self.function, self.slurm, self.label = function, slurm, label
        self.order = [fingerprint(function, item) for item in items]
        self.items = dict(zip(self.order, items, strict=True))
        self.results: dict[str, Any] = {}
        self.failures: dict[str, Exception] = {}
        self.out: dict[str, JobAttempt] = {}
        self.deaths: Counter[str] = Counter()
        self.over: dict[JobAttempt, float] = {}

    def wait(self) -> list[Any]:
        """Wait for all jobs, and return the results in the order of the items.

        Raises:
            UserError: Slurm refuses a submission, or an item's jobs died too often.
            Any exception of the function for the first failed item, after all other items have finished.
        """
        with ProgressBar(what=self.label, total=len(self.items), unit="job") as bar:
            last_look, pause = 0.0, 1.0
            while pending := self._collect():
                bar.update(len(self.items) - len(pending) - bar.n)
                if any(key not in self.out for key in pending):
                    self._send()
                    pause = 1.0
                elif time.monotonic() - last_look > pause:
                    bar.set_postfix_str(self._look(pending))
                    last_look, pause = time.monotonic(), min(30.0, 1.2 * pause)
                else:
                    time.sleep(0.2)
        for key in self.order:
            if key in self.failures:
                raise self.failures[key]
        return [self.results[key] for key in self.order]

    def _collect(self) -> list[str]:
        """Collect results and failures; return the unfinished items."""
        pending = [key for key in self.items if key not in self.results and key not in self.failures]
        for key in pending:
            if (stored := stored_result(self.function, key)) is not None:
                self.results[key] = stored[0]
            elif key in self.out and (failure := self.out[key].failure()) is not None:
                self.failures[key] = failure.exception()
        return [key for key in pending if key not in self.results and key not in self.failures]

    def _look(self, pending: Sequence[str]) -> str:
        """Ask Slurm for the states of running jobs, and drop dead jobs. Return the text of the progress bar."""
        try:
            by_job = states([self.out[key].job for key in pending])
        except InfrastructureError as error:
            # The controller may be restarting. The jobs continue, and their results arrive as files.
            return f"Slurm does not answer: {error}"
        for key in pending:
            attempt = self.out[key]
            state = by_job[attempt.job]
            if state.name in ALIVE:
                self.over.pop(attempt, None)
                continue
            os.listdir(attempt.folder)  # On NFS, listing a folder refreshes it.
            os.listdir(JOBS / "results")
            if time.monotonic() - self.over.setdefault(attempt, time.monotonic()) <= GRACE:
                continue
            del self.out[key]
            self.deaths[key] += 1
            death = f"{self.label} {name_of(self.items[key])}: job {attempt.job} ended without a result "
            death += f"({state.name.lower()}{f' on {state.node}' if state.node else ''}), and its last line is: "
            death += attempt.last_line() or "none"
            if self.deaths[key] <= self.slurm.resubmissions:
                tqdm.write(f"{death}; it is submitted again")
                continue
            limit = f"machine.slurm.resubmissions = {self.slurm.resubmissions} allows no further job"
            remedy = f"see `captrain jobs {attempt.job}`; change machine.slurm if memory or time was too short, and "
            self.failures[key] = UserError(f"{death}; {limit}", f"{remedy}run again")
        counts = Counter(state.name.lower() for state in by_job.values())
        return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))

    def _send(self) -> None:
        """Attach to existing jobs of items that were not submitted here, and submit the other items."""
        with exclusive(JOBS / "lock"):
            unsent = [key for key in self._collect() if key not in self.out]
            last: dict[str, JobAttempt] = {}
            for submission in submissions():
                if set(submission.keys) & set(unsent):
                    last |= {attempt.key: attempt for attempt in submission.attempts()}
            try:
                by_job = states([last[key].job for key in unsent if key in last])
            except InfrastructureError as error:
                raise UserError(f"Slurm does not answer: {error}", "check that it runs, and run again") from None
            for key in unsent:
                if key in last and by_job[last[key].job].name in ALIVE and last[key].failure() is None:
                    self.out[key] = last[key]
            if attached := [self.out[key].job for key in unsent if key in self.out]:
                tqdm.write(f"{self.label}: waiting for earlier jobs: {shorten(', '.join(attached), 80)}")
            if new := [key for key in unsent if key not in self.out]:
                self._submit(new)

    def _submit(self, keys: Sequence[str]) -> None:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        submission = Submission(
            name=f"captrain-{self.label}-{secrets.token_hex(4)}",
            label=self.label,
            keys=list(keys),
            items=[name_of(self.items[key]) for key in keys],
            at=datetime.now(UTC).isoformat(timespec="microseconds"),
        )
        folder = JOBS / submission.name
        publish_bytes(folder / RECORD, json_without_secrets(submission.model_dump_json(indent=1)).encode(), flush=True)
        executor = SlurmExecutor(folder, max_num_timeout=self.slurm.requeues)
        executor.update_parameters(
            job_name=submission.name,
            time=self.slurm.minutes,
            nodes=self.slurm.nodes,
            ntasks_per_node=1,
            mem=self.slurm.memory,
            cpus_per_task=self.slurm.cpus,
            gpus_per_node=self.slurm.gpus or None,
            partition=self.slurm.partition or None,
            setup=[THREADS, *self.slurm.setup],
            stderr_to_stdout=True,
            # srun does not inherit these options from sbatch since 22.05. The work runs on the first node, and a
            # training starts its processes on all nodes from there.
            srun_args=[
                *(f"--cpus-per-task={self.slurm.cpus}", "--open-mode=append"),
                *("--nodes=1", "--ntasks=1", "--relative=0"),
            ],
            additional_parameters={**self.slurm.options, "requeue": True},
        )
        try:
            works = [Work(self.function, self.items[key], key, folder, self.slurm.requeues) for key in keys]
            jobs = executor.submit_array(works)
        except FailedJobError as error:
            raise UserError(
                f"sbatch refused {self.label}: {' '.join(str(error).split())}", "correct machine.slurm, and run again"
            ) from None
        self.out |= {attempt.key: attempt for attempt in submission.attempts()}
        message = (
            f"{self.label}: submitted {shorten(', '.join(submission.items), 80)} as job {jobs[0].job_id.split('_')[0]}"
        )
        tqdm.write(f"{message}; it continues if this process ends, and `captrain jobs` shows it")


def stored_result(function: Callable[..., object], key: str) -> tuple[object] | None:
    """Return the stored result of a function for an item, inside a tuple.

    None if there is no result, it is damaged, or a file named in it has changed.
    """
    path = JOBS / "results" / f"{key}.jsonl"
    if not path.exists():
        return None
    try:
        expected, _, line = path.read_bytes().partition(b"\n")
        result = _type_of(function).validate_json(line)
    except ValidationError:
        return None
    return (result,) if f'"{digest(identity_of(result))}"'.encode() == expected else None


def _type_of(function: Callable[..., object]) -> TypeAdapter[object]:
    """Return the type that a function declares for its result."""
    return TypeAdapter(get_type_hints(function)["return"])


def name_of(item: object) -> str:
    """Return the name of an item, or the item as text."""
    return str(getattr(item, "name", item))[:60]
