"""Worker processes that hold a benchmark in its own virtual environment, seen from our side.

A worker that dies, hangs or prints something that is not a reply is ended and replaced; what it held becomes an
`InfrastructureError` for the episodes concerned, which are then played again and never scored. Other workers go on.
Calls may come from several threads; each worker answers one request at a time, and waiting for one's turn is not the
worker's time.
"""

import atexit
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from modulefinder import ModuleFinder
from pathlib import Path

from captrain.benchmarks.worker import GRACE, Worker
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, file_digest

WORKERS = Path(__file__).parent / "workers"
STARTS = 3
"""So many workers in a row that end before they have answered anything mean that none will."""


def workers_code(package: str) -> str:
    """Digest of all code of ours that plays and scores a package's episodes in its worker, with what the worker's
    script imports of its neighbours: part of what a benchmark is."""
    script = WORKERS / f"{package}_worker.py"
    finder = ModuleFinder([str(WORKERS)])
    finder.run_script(str(script))
    code = [path for path in sorted(WORKERS.glob("*.py")) if path == script or path.stem in finder.modules]
    clients = [Path(__file__).with_name(f"{name}.py") for name in ("pool", "worker", "simulation", "scripted")]
    return file_digest(*code, *clients)


class Pool:
    """Workers of one benchmark, started when they are needed.

    Args:
        name: of the benchmark, as in `machine.benchmarks`.
        command: interpreter and script.
        processes: workers at most.
        timeout: seconds that one request may take.
        start_timeout: seconds that a start, which imports the benchmark, may take.
        env: additions to the workers' environment; PYTHON* and VIRTUAL_ENV* of ours are not handed down.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        processes: int,
        timeout: float,
        start_timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.command, self.timeout = name, list(command), timeout
        self._start_timeout, self._env = start_timeout, dict(env or {})
        self._workers: list[Worker | None] = [None] * processes
        self._lock = threading.Lock()
        self._failed = 0
        self._refusal = ""
        self._remedy = (
            f"make a virtual environment for it as its own repository says, and set machine.benchmarks.{name}.python "
            "to the interpreter in it"
        )
        atexit.register(self.close)

    def call(self, op: str, **arguments: object) -> JsonObject:
        """A request that belongs to no episode, on the worker that is least busy.

        Raises:
            InfrastructureError: the worker failed, or the benchmark raised.
            UserError: the benchmark cannot be started, or refused the request.
        """
        return self._call_any(op, arguments, opening=False)[1]

    def session(self, **arguments: object) -> "Session":
        """Open an episode (op `reset`) on the worker with the fewest open ones; raises as `call` does."""
        return Session(self, *self._call_any("reset", arguments, opening=True))

    def close(self) -> None:
        """End all workers; what they held is lost. A worker ends at the end of its input, or is ended if it is at work
        or takes too long."""
        with self._lock:
            workers = [worker for worker in self._workers if worker is not None]
            self._workers[:] = [None] * len(self._workers)
        for worker in workers:
            worker.end_reason = worker.end_reason or "was ended"
            if worker.lock.acquire(blocking=False):
                assert worker.process.stdin is not None
                worker.process.stdin.close()
                worker.lock.release()
            else:
                worker.process.kill()
        deadline = time.monotonic() + GRACE
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.end("was ended")
            with worker.lock:
                worker.close_pipes()

    def _call_any(self, op: str, arguments: Mapping[str, object], opening: bool) -> tuple[Worker, JsonObject]:
        """Ask the worker with the fewest open episodes, or the least busy one. One that is lost before it is this
        request's turn held nothing of it, so that another takes its place."""
        while True:
            worker = self._acquire(opening)
            in_session = False
            try:
                with worker.lock:
                    if not worker.has_ended() and self._start(worker):
                        result = self.result(op, worker.exchange(op, arguments, self.timeout))
                        in_session = opening
                        return worker, result
            finally:
                self.release(worker, session=opening and not in_session)

    def _acquire(self, opening: bool) -> Worker:
        """Get in line for a worker, which is started rather than waited for, but not where one stands idle."""
        with self._lock:
            if self._refusal:
                raise UserError(self._refusal, self._remedy)
            loads: list[tuple[int, int, bool, int]] = []
            for place, worker in enumerate(self._workers):
                if worker is None or worker.has_ended():
                    loads.append((0, 0, True, place))
                else:
                    loads.append((worker.sessions if opening else 0, worker.requests, False, place))
            place = min(loads)[-1]
            worker = self._workers[place]
            if worker is None or worker.end_reason:
                worker = self._workers[place] = Worker(self.name, self._process())
            worker.requests += 1
            worker.sessions += opening
            return worker

    def _process(self) -> subprocess.Popen[bytes]:
        """Start a worker's process."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        # Strings hash alike in all workers, so that no order in a benchmark depends on which one plays.
        env, pipe = {**inherited, "PYTHONHASHSEED": "0", **self._env}, subprocess.PIPE
        try:
            # Without buffers: what is written and read here goes past them.
            return subprocess.Popen(self.command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
        except OSError as error:
            problem = f"benchmark {self.name}: {self.command[0]} does not start ({error.strerror})"
            raise UserError(problem, self._remedy) from None

    def _start(self, worker: Worker) -> bool:
        """Tell if the worker answers; the first request that it gets is ours, so that no episode is to blame."""
        if worker.ready:
            return True
        problem = ""
        try:
            reply = worker.exchange("hello", {}, self._start_timeout)
            if reply.get("error", {}).get("refused"):
                self.result("hello", reply)
            worker.ready = True
        except InfrastructureError:
            words = "".join(f"\n    {line}" for line in worker.last_words())
            problem = f"benchmark {self.name} does not start: {self.command[0]} {worker.end_reason}{words}"
        with self._lock:
            self._failed = self._failed + 1 if problem else 0
            self._refusal = problem if self._failed >= STARTS else self._refusal
        return worker.ready

    def queue(self, worker: Worker) -> None:
        """Get in line for the worker of a session."""
        with self._lock:
            worker.requests += 1

    def release(self, worker: Worker, session: bool) -> None:
        """Leave the line, and with `session` give an episode back."""
        with self._lock:
            worker.requests -= 1
            worker.sessions -= session

    def result(self, op: str, reply: JsonObject) -> JsonObject:
        """The result in a reply, or its error, raised: ours when the request was, otherwise the benchmark's."""
        if reply["ok"]:
            return reply["result"]
        error = reply["error"]
        if error.get("refused"):
            raise UserError(
                f"benchmark {self.name} refused {op}: {error['message']}",
                f"see whether machine.benchmarks.{self.name}.python names the installation that was meant",
            )
        raise InfrastructureError(f"{self.name} raised {error['type']} in {op}: {error['message']}")


class Session:
    """One episode in one worker; `opening` is the worker's reply to `reset`."""

    def __init__(self, pool: Pool, worker: Worker, opening: JsonObject) -> None:
        self._pool, self._worker, self.opening = pool, worker, opening
        self._closed = False

    def call(self, op: str, **arguments: object) -> JsonObject:
        """A request on this episode; raises as `Pool.call` does."""
        self._pool.queue(self._worker)
        try:
            with self._worker.lock:
                request = {"episode": self.opening["episode"], **arguments}
                return self._pool.result(op, self._worker.exchange(op, request, self._pool.timeout))
        finally:
            self._pool.release(self._worker, session=op == "close")

    def close(self) -> None:
        """Let the worker drop the episode; nothing happens when it is gone already."""
        if not self._closed:
            self._closed = True
            with suppress(InfrastructureError, UserError):
                self.call("close")
