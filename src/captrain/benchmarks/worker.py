"""The client of one worker process: requests and replies as JSON lines, with deadlines.

It works with every process that speaks the protocol: those of benchmarks (`captrain.benchmarks.pool`) and those of the
sandbox. A process that hangs or fills its pipes cannot delay the caller beyond the deadline.
"""

import itertools
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from captrain.errors import InfrastructureError

TAIL = 12
"""Lines of a worker's standard error that messages quote at most."""
WORDS = 24_000
"""Bytes of standard error that are kept."""
CHUNK = 1 << 16
"""Bytes read at once: the capacity of a pipe."""
REPLY = 1 << 28
"""Default maximum of a reply's bytes."""
GRACE = 2.0
"""Seconds that a worker has to end by itself."""


class Process(Protocol):
    """Protocol of a worker's process: `subprocess.Popen`, or a process that somebody else started for us.

    `stdin` takes requests and `stdout`, which may be the same object, gives replies. `stderr` is optional.
    """

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """Kill it; does nothing if it has ended."""


@dataclass(frozen=True)
class Reply:
    """Reply to request `id`.

    result: the operation's JSON result. error: type of the exception, "" for none. message: its text. refused: the
    request was wrong, not the benchmark.
    """

    id: int
    result: Any = None
    error: str = ""
    message: str = ""
    refused: bool = False


class _Lost(Exception):
    """The worker cannot be talked to any more. The text says why; "" if the exit status says it."""


class Worker:
    """The client of one process. Once `end_reason` is set, the process answers no more.

    It needs no thread, so hundreds may be open.

    Args:
        name: of the benchmark, for messages.
        process: speaks the protocol of `workers/worker_loop.py`.
        longest: maximum of a reply's bytes.
    """

    def __init__(self, name: str, process: Process, longest: int = REPLY) -> None:
        self.name, self.process, self.end_reason, self.ready = name, process, "", False
        self.lock = threading.Lock()
        """Held for a request and its answer."""
        self.sessions = self.requests = 0
        """The pool's counters, guarded by the pool's lock."""
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        self._err = None if process.stderr is None else process.stderr.fileno()
        for pipe in {self._in, self._out, self._err} - {None}:
            os.set_blocking(pipe, False)
        self._longest = longest
        self._numbers = itertools.count(1)
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._words = b""

    def exchange(self, op: str, arguments: Mapping[str, object], timeout: float) -> Reply:
        """Send a request and wait for its reply; the caller holds the lock.

        Raises:
            InfrastructureError: the worker is lost, before or by this request.
        """
        if self.has_ended():
            raise InfrastructureError(f"the {self.name} worker that held this episode {self.end_reason}")
        number, deadline = next(self._numbers), time.monotonic() + timeout
        # An interrupted request may have left its second half unsent: it goes first.
        line = json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n"
        self._unsent = memoryview(bytes(self._unsent) + line)
        try:
            reply = self._reply(deadline)
            # Replies to earlier requests, whose caller was interrupted, are dropped.
            while reply.id < number:
                reply = self._reply(deadline)
            if reply.id > number:
                raise _Lost(f"answered request {reply.id}, which was not made")
            return reply
        except TimeoutError:
            self.end(f"did not answer {op} within {timeout:g} s")
        except _Lost as loss:
            self.end(str(loss))
        lines = self.last_words()
        self.close_pipes()
        words = f"; its last words: {lines[-1]}" if lines else ""
        raise InfrastructureError(f"a {self.name} worker {self.end_reason}, asked for {op}{words}")

    def _reply(self, deadline: float) -> Reply:
        """The next reply of the process.

        Raises:
            TimeoutError: there is none before the deadline.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            if len(self._received) > self._longest:
                raise _Lost(f"printed a line of more than {self._longest} bytes")
            searched = len(self._received)
            self._transfer(deadline - time.monotonic())
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return _parsed(line)

    def _transfer(self, seconds: float) -> None:
        """Wait until a pipe is ready, then send and receive what is possible.

        Requests go out and standard error is emptied meanwhile, so that neither side waits for the other to read.

        Raises:
            TimeoutError: no pipe is ready, or no time is left. A process that never stops printing is always ready.
        """
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._err is not None:
            poll.register(self._err, select.POLLIN)
        if self._unsent:
            poll.register(self._in, select.POLLOUT | (select.POLLIN if self._in == self._out else 0))
        ready = dict(poll.poll(seconds * 1000)) if seconds > 0 else {}
        if not ready:
            raise TimeoutError
        if self._err in ready:
            self._listen()
        if self._in in ready and self._unsent:
            self._send()
        if ready.get(self._out, 0) & ~select.POLLOUT:
            self._receive()

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._in, self._unsent) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = memoryview(b"")  # the worker has ended or is being ended; its output says how

    def _receive(self) -> None:
        try:
            chunk = os.read(self._out, CHUNK)
        except BlockingIOError:
            return
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise _Lost(f"printed what is not a reply: {bytes(self._received[:120])!r}" if self._received else "")
        self._received += chunk

    def _listen(self) -> None:
        """Empty standard error, of at most one full pipe, however fast it fills again."""
        if self._err is not None:
            with suppress(BlockingIOError):
                chunk = os.read(self._err, CHUNK)
                self._words = (self._words + chunk)[-WORDS:]
                self._err = self._err if chunk else None

    def has_ended(self) -> bool:
        """True if the worker is lost, by itself or because we ended it."""
        if not self.end_reason and self.process.poll() is not None:
            self.end("")
        return bool(self.end_reason)

    def end(self, reason: str) -> None:
        """Kill the process; the first reason is kept. "" for a process that ended by itself."""
        if not reason:
            try:
                status = self.process.wait(GRACE)
                reason = f"died ({'signal' if status < 0 else 'exit status'} {abs(status)})"
            except subprocess.TimeoutExpired:
                reason = "closed its standard output"
        self.end_reason = self.end_reason or reason
        self.process.kill()
        self.process.wait()

    def last_words(self) -> list[str]:
        """The last lines of standard error of an ended worker."""
        self._listen()
        return [line for line in self._words.decode(errors="replace").splitlines() if line.strip()][-TAIL:]

    def close_pipes(self) -> None:
        """Close the pipes of an ended process; the caller holds the lock."""
        self._err = None
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _parsed(line: bytes) -> Reply:
    with suppress(ValueError, RecursionError):
        match json.loads(line):
            case {"id": int(number), "ok": True, "result": result}:
                return Reply(number, result)
            case {"id": int(number), "ok": False, "error": {"type": str(kind), "message": str(message)} as error}:
                return Reply(number, None, kind, message, bool(error.get("refused")))
    raise _Lost(f"printed what is not a reply: {line[:120]!r}")
