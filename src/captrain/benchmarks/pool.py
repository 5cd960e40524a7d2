"""Worker processes that hold a benchmark in its own virtual environment, seen from our side.

A worker that dies, hangs or prints something that is not a reply is ended and replaced; what it held becomes an
`InfrastructureError` for the episodes concerned, which are then played again and never scored. Other workers go on.
Calls may come from several threads; each worker answers one request at a time, and waiting for one's turn is not the
worker's time. `Worker` alone carries any process that speaks the protocol, those of the sandbox too.
"""

import atexit
import itertools
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from captrain.errors import InfrastructureError, UserError
from captrain.records import code_digest, digest, file_digest

WORKERS = Path(__file__).parent / "workers"
STARTS = 3
"""So many workers in a row that end before they have answered anything mean that none will."""
TAIL = 12
"""Lines of a worker's standard error that are kept for messages."""
WORDS = 24_000
"""Bytes of it that are kept."""
CHUNK = 1 << 16
"""Bytes read at once: as many as a pipe holds."""
REPLY = 1 << 28
"""Bytes of a reply; more is none."""
GRACE = 2.0
"""Seconds that a worker has to end by itself."""


def code_of(script: str) -> str:
    """Digest of all code of ours that plays and scores an episode in this worker: part of what a benchmark is."""
    return digest(
        file_digest(WORKERS / "serving.py", WORKERS / script), code_digest("benchmarks.pool", "benchmarks.simulation")
    )


class Process(Protocol):
    """What a worker needs of its process: `subprocess.Popen`, or one that somebody else has started for us."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Takes requests."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Gives replies; may be the same as `stdin`."""
        ...

    @property
    def stderr(self) -> IO[bytes] | None:
        """Gives last words, if it is there."""
        ...

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """End it at once; nothing happens when it has ended."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...


class Worker:
    """The client of one process: lines of JSON under deadlines. Once `lost` says how it ended, it answers nothing any
    more. It needs no thread, so that hundreds may be open.

    Args:
        name: of the benchmark, for messages.
        process: it speaks the protocol of `workers/serving.py`.
        longest: bytes of a reply; more is none.
    """

    def __init__(self, name: str, process: Process, longest: int = REPLY) -> None:
        self.name, self.process, self.lost, self.started = name, process, "", False
        self.lock = threading.Lock()
        """Held for a request and its answer."""
        self.sessions = self.waiting = 0
        """The pool's, under the pool's lock."""
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        self._err = None if process.stderr is None else process.stderr.fileno()
        for pipe in {self._in, self._out, self._err} - {None}:
            os.set_blocking(pipe, False)
        self._longest = longest
        self._numbers = itertools.count(1)
        self._unsent = memoryview(b"")
        self._heard = bytearray()
        self._words = b""

    def exchange(self, op: str, arguments: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for its reply; the caller holds the lock.

        Raises:
            InfrastructureError: the worker is lost, before or by this.
        """
        if self.gone():
            raise InfrastructureError(f"the {self.name} worker that held this episode {self.lost}")
        number, deadline = next(self._numbers), time.monotonic() + timeout
        # An interrupted request may have left half of itself behind.
        line = json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n"
        self._unsent = memoryview(bytes(self._unsent) + line)
        reply, how = None, ""
        try:
            # What answers an earlier request, whose caller was interrupted, is late and nobody's any more.
            while reply is None or reply["id"] < number:
                line = self._line(deadline)
                reply = _reply(line)
                if reply is None:
                    how = f"printed what is not a reply: {line[:120]!r}" if line else ""
                    break
            else:
                how = f"answered request {reply['id']}, which was not made"
        except TimeoutError:
            how = f"did not answer {op} within {timeout:g} s"
        except OverflowError:
            how = f"printed a line of more than {self._longest} bytes"
        if reply is None or reply["id"] != number:
            self.end(how)
            said = self.said()
            self.shut()
            words = f"; its last words: {said[-1]}" if said else ""
            raise InfrastructureError(f"a {self.name} worker {self.lost}, asked for {op}{words}")
        return reply

    def _line(self, deadline: float) -> bytes:
        """The next line of the process, while requests go out and its standard error is taken away, so that neither
        side ever waits for the other to read; what is left at the end of its output, "" for nothing.

        Raises:
            TimeoutError: there is none by then: a worker that hangs reads nothing, either, and a pipe is soon full.
            OverflowError: it is too long.
        """
        searched = 0
        while (end := self._heard.find(b"\n", searched)) < 0:
            if len(self._heard) > self._longest:
                raise OverflowError
            searched, left = len(self._heard), deadline - time.monotonic()
            ready = self._ready(left) if left > 0 else {}
            if not ready:
                raise TimeoutError
            if self._err in ready:
                self._listen()
            if self._in in ready and self._unsent:
                self._send()
            if ready.get(self._out, 0) & ~select.POLLOUT:
                try:
                    chunk = os.read(self._out, CHUNK)
                except BlockingIOError:
                    continue
                except ConnectionResetError:
                    chunk = b""
                if not chunk:
                    end = len(self._heard)
                    break
                self._heard += chunk
        line = bytes(self._heard[: end + 1])
        del self._heard[: end + 1]
        return line

    def _ready(self, seconds: float) -> dict[int, int]:
        """What can be read or written, waiting so long for anything."""
        wanted = {self._out: select.POLLIN}
        if self._err is not None:
            wanted[self._err] = select.POLLIN
        if self._unsent:
            wanted[self._in] = wanted.get(self._in, 0) | select.POLLOUT
        poll = select.poll()
        for pipe, events in wanted.items():
            poll.register(pipe, events)
        return dict(poll.poll(seconds * 1000))

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._in, self._unsent) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = memoryview(b"")  # The worker has ended, or is being ended; its output says how.

    def _listen(self) -> None:
        """Take away what is in standard error: a full pipe at most, however fast it is filled again."""
        if self._err is not None:
            with suppress(BlockingIOError):
                chunk = os.read(self._err, CHUNK)
                self._words = (self._words + chunk)[-WORDS:]
                self._err = self._err if chunk else None

    def gone(self) -> bool:
        """Whether it is lost, by itself or through us."""
        if not self.lost and self.process.poll() is not None:
            self.end("")
        return bool(self.lost)

    def end(self, how: str) -> None:
        """End the process; the first to say how is believed. "" for one that has ended by itself."""
        if not how:
            try:
                status = self.process.wait(GRACE)
                how = f"died ({'signal' if status < 0 else 'exit status'} {abs(status)})"
            except subprocess.TimeoutExpired:
                how = "closed its standard output"
        self.lost = self.lost or how
        self.process.kill()
        self.process.wait()

    def said(self) -> list[str]:
        """The last lines of standard error of a worker that has ended."""
        self._listen()
        return [line for line in self._words.decode(errors="replace").splitlines() if line.strip()][-TAIL:]

    def dismiss(self) -> None:
        """Ask the process to end: it does at the end of its input, or is terminated if it is at work."""
        self.lost = self.lost or "was ended"
        assert self.process.stdin is not None
        if self.lock.acquire(blocking=False):
            self.process.stdin.close()
            self.lock.release()
        else:
            self.process.terminate()

    def shut(self) -> None:
        """Let go of the pipes of a process that has ended; the caller holds the lock."""
        self._err = None
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _process(name: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A worker's process; `env` is added to its environment.

    Raises:
        UserError: there is no such interpreter.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # Strings hash alike in all workers, so that no order in a benchmark depends on which one plays.
    inherited["PYTHONHASHSEED"] = "0"
    pipe = subprocess.PIPE
    try:
        # Without buffers: what is written and read here goes past them.
        return subprocess.Popen(
            [*command], bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env={**inherited, **env}
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"benchmark {name}: {command[0]} does not start ({error.strerror})", _remedy(name)) from None


def _reply(line: bytes) -> dict[str, Any] | None:
    """A whole reply of the protocol, or None."""
    try:
        reply = json.loads(line)
        whole = isinstance(reply["id"], int) and line.endswith(b"\n")
        if reply["ok"] is True:
            return reply if whole and "result" in reply else None
        told = isinstance(reply["error"]["type"], str) and isinstance(reply["error"]["message"], str)
        return reply if whole and told and reply["ok"] is False else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _remedy(name: str) -> str:
    return (
        f"make a virtual environment for it as its own repository says, and set machine.benchmarks.{name}.python to "
        "the interpreter in it"
    )


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
        self, name: str, command: Sequence[str], *, processes: int, timeout: float, start_timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.command, self.timeout = name, list(command), timeout
        self._start_timeout, self._env = start_timeout, dict(env or {})
        self._workers: list[Worker | None] = [None] * processes
        self._lock = threading.Lock()
        self._failed = 0
        self._refusal = ""
        atexit.register(self.close)

    def call(self, op: str, **arguments: Any) -> Any:
        """A request that belongs to no episode, on the worker that is least busy.

        Raises:
            InfrastructureError: the worker failed, or the benchmark raised.
            UserError: the benchmark cannot be started, or refused the request.
        """
        return self._anywhere(op, arguments, opening=False)[1]

    def session(self, **arguments: Any) -> "Session":
        """Open an episode (op `reset`) on the worker with the fewest open ones; raises as `call` does."""
        return Session(self, *self._anywhere("reset", arguments, opening=True))

    def close(self) -> None:
        """End all workers; what they held is lost."""
        with self._lock:
            workers = [worker for worker in self._workers if worker is not None]
            self._workers[:] = [None] * len(self._workers)
        for worker in workers:
            worker.dismiss()
        deadline = time.monotonic() + GRACE
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.end("was ended")
            with worker.lock:
                worker.shut()

    def _anywhere(self, op: str, arguments: Mapping[str, Any], opening: bool) -> tuple[Worker, Any]:
        """Ask a worker of our choice. One that is lost before it is this request's turn held nothing of it, so that
        another takes its place."""
        while True:
            worker = self._chosen(opening)
            answered = False
            try:
                with worker.lock:
                    if worker.gone() or not self._started(worker):
                        continue
                    answer = self._judged(op, worker.exchange(op, arguments, self.timeout))
                    answered = True
                    return worker, answer
            finally:
                self._release(worker, session=opening and not answered)

    def _chosen(self, opening: bool) -> Worker:
        """The worker with the fewest open episodes, or the least busy one; started rather than waited for, but not
        where one stands idle."""
        with self._lock:
            if self._refusal:
                raise UserError(self._refusal, _remedy(self.name))

            def load(place: int) -> tuple[int, int, bool]:
                worker = self._workers[place]
                if worker is None or worker.gone():
                    return 0, 0, True
                return worker.sessions if opening else 0, worker.waiting, False

            place = min(range(len(self._workers)), key=load)
            worker = self._workers[place]
            if worker is None or worker.lost:
                worker = self._workers[place] = Worker(self.name, _process(self.name, self.command, self._env))
            worker.waiting += 1
            worker.sessions += opening
            return worker

    def _started(self, worker: Worker) -> bool:
        """Whether the worker answers; the first request that it gets is ours, so that no episode is to blame."""
        if worker.started:
            return True
        try:
            worker.exchange("hello", {}, self._start_timeout)
            worker.started = True
        except InfrastructureError:
            said = "".join(f"\n    {line}" for line in worker.said())
            problem = f"benchmark {self.name} does not start: {self.command[0]} {worker.lost}{said}"
        else:
            problem = ""
        with self._lock:
            self._failed = self._failed + 1 if problem else 0
            self._refusal = problem if self._failed >= STARTS else self._refusal
        return worker.started

    def _take(self, worker: Worker) -> None:
        """Get in line for a worker."""
        with self._lock:
            worker.waiting += 1

    def _release(self, worker: Worker, session: bool) -> None:
        """Leave the line, and with `session` give an episode back."""
        with self._lock:
            worker.waiting -= 1
            worker.sessions -= session

    def _judged(self, op: str, reply: Mapping[str, Any]) -> Any:
        """The result in a reply, or its error, raised: ours when the request was, otherwise the benchmark's."""
        if reply["ok"]:
            return reply["result"]
        error = reply["error"]
        if error["type"] == "BadRequest":
            raise UserError(
                f"benchmark {self.name} refused {op}: {error['message']}",
                f"see whether machine.benchmarks.{self.name}.python names the installation that was meant",
            )
        raise InfrastructureError(f"{self.name} raised {error['type']} in {op}: {error['message']}")


class Session:
    """One episode in one worker; `opening` is the worker's reply to `reset`."""

    def __init__(self, pool: Pool, worker: Worker, opening: dict[str, Any]) -> None:
        self._pool, self._worker, self.opening = pool, worker, opening
        self._closed = False

    def call(self, op: str, **arguments: Any) -> Any:
        """A request on this episode; raises as `Pool.call` does."""
        return self._asked(op, arguments, last=False)

    def close(self) -> None:
        """Let the worker drop the episode; nothing happens when it is gone already."""
        if self._closed:
            return
        self._closed = True
        with suppress(InfrastructureError, UserError):
            self._asked("close", {}, last=True)

    def _asked(self, op: str, arguments: Mapping[str, Any], last: bool) -> Any:
        self._pool._take(self._worker)
        try:
            with self._worker.lock:
                named = {"episode": self.opening["episode"], **arguments}
                return self._pool._judged(op, self._worker.exchange(op, named, self._pool.timeout))
        finally:
            self._pool._release(self._worker, session=last)
