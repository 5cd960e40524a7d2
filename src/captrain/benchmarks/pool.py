"""Worker processes that run a benchmark in its own virtual environment, seen from our side.

A worker that dies, hangs or prints something that is not a reply is killed and replaced. Its episodes get an
`InfrastructureError`; they are played again and never scored. Other workers go on. Calls may come from several threads.
Each worker answers one request at a time, and waiting for its turn does not count against a request's timeout.
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
from typing import Any, NotRequired, TypedDict

from captrain.benchmarks.worker import GRACE, Reply, Worker
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message, file_digest

WORKERS = Path(__file__).parent / "workers"
STARTS = 3
"""Workers in a row that may end before they answer anything; then no further one is started."""


class Observation(TypedDict):
    """Answer to `reset` and `step`: the new messages, and whose turn it is ("agent", "user", None at the end).

    On the user's turn `user_messages` is the user's prompt, and `user_tools` are the user's tools.
    """

    turn: str | None
    messages: list[Message]
    user_messages: NotRequired[list[Message]]
    user_tools: NotRequired[list[JsonObject]]


class Opening(Observation):
    """Answer to `reset`."""

    episode: str
    system: str
    tools: list[JsonObject]


def workers_code(package: str) -> str:
    """Digest of our code that plays and scores a package's episodes: part of the benchmark's identity.

    It covers the worker's script, the modules beside it that the script imports, and the client's side.
    """
    script = WORKERS / f"{package}_worker.py"
    finder = ModuleFinder([str(WORKERS)])
    finder.run_script(str(script))
    code = [path for path in sorted(WORKERS.glob("*.py")) if path == script or path.stem in finder.modules]
    clients = [Path(__file__).with_name(f"{name}.py") for name in ("pool", "worker", "simulation", "listed")]
    return file_digest(*code, *clients)


class Pool:
    """Workers of one benchmark, started when they are needed.

    Args:
        name: of the benchmark, as in `machine.benchmarks`.
        command: interpreter and script.
        processes: maximum number of workers.
        timeout: seconds that one request may take.
        start_timeout: seconds that a start, which imports the benchmark, may take.
        env: additions to the workers' environment. Our PYTHON* and VIRTUAL_ENV* variables are removed from it.
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

    def call(self, op: str, **arguments: object) -> Any:
        """Send a request that belongs to no episode to the least busy worker; return the operation's JSON result.

        Raises:
            InfrastructureError: the worker failed, or the benchmark raised.
            UserError: the benchmark cannot be started, or refused the request.
        """
        return self._call_any(op, arguments, opening=False)[1]

    def session(self, **arguments: object) -> "Session":
        """Open an episode (`reset`) on the worker with the fewest open episodes; raises like `call`."""
        return Session(self, *self._call_any("reset", arguments, opening=True))

    def close(self) -> None:
        """End all workers; their episodes are lost. Closing its input ends an idle worker; others are killed."""
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

    def _call_any(self, op: str, arguments: Mapping[str, object], opening: bool) -> tuple[Worker, Any]:
        """Ask the worker with the fewest open episodes, or the least busy one. If that is lost before this request's
        turn, ask another: the lost worker held nothing of this request."""
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
        """Queue for a worker: an idle one if there is one, else a new one, else the one with the shortest queue."""
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
        # Equal string hashes in all workers: no order in a benchmark may depend on which worker plays.
        env = {**inherited, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", **self._env}
        pipe = subprocess.PIPE
        try:
            # No buffers: `Worker` reads and writes the file descriptors directly.
            return subprocess.Popen(self.command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
        except OSError as error:
            problem = f"benchmark {self.name}: {self.command[0]} does not start ({error.strerror})"
            raise UserError(problem, self._remedy) from None

    def _start(self, worker: Worker) -> bool:
        """Return whether the worker answers. Its first request is always `hello`, so that no episode is to blame."""
        if worker.ready:
            return True
        problem = ""
        try:
            reply = worker.exchange("hello", {}, self._start_timeout)
            if reply.refused:
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
        """Queue for the worker of a session."""
        with self._lock:
            worker.requests += 1

    def release(self, worker: Worker, session: bool) -> None:
        """Leave the queue; with `session`, an episode is closed, too."""
        with self._lock:
            worker.requests -= 1
            worker.sessions -= session

    def result(self, op: str, reply: Reply) -> Any:
        """The result in a reply. Raises a refusal as a UserError and an exception of the benchmark like `call`."""
        if not reply.error:
            return reply.result
        if reply.refused:
            raise UserError(
                f"benchmark {self.name} refused {op}: {reply.message}",
                f"check that machine.benchmarks.{self.name}.python names the right installation",
            )
        raise InfrastructureError(f"{self.name} raised {reply.error} in {op}: {reply.message}")


class Session:
    """One episode in one worker; `opening` is the worker's reply to `reset`."""

    def __init__(self, pool: Pool, worker: Worker, opening: Opening) -> None:
        self._pool, self._worker, self.opening = pool, worker, opening
        self._closed = False

    def call(self, op: str, **arguments: object) -> Observation:
        """Send a request on this episode; raises like `Pool.call`."""
        self._pool.queue(self._worker)
        try:
            with self._worker.lock:
                request = {"episode": self.opening["episode"], **arguments}
                return self._pool.result(op, self._worker.exchange(op, request, self._pool.timeout))
        finally:
            self._pool.release(self._worker, session=op == "close")

    def close(self) -> None:
        """Let the worker drop the episode; does nothing the second time."""
        if not self._closed:
            self._closed = True
            with suppress(InfrastructureError, UserError):
                self.call("close")
