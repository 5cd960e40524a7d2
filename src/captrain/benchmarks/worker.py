"""The client of one worker process: requests and replies as lines of JSON, under deadlines.

It carries any process that speaks the protocol, those of benchmarks (`captrain.benchmarks.pool`) and those of the
sandbox. Neither a process that hangs nor one that fills its pipes can hold the caller up for longer than was said.
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
from typing import IO, Protocol

from captrain.errors import InfrastructureError
from captrain.records import JsonObject

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


class Process(Protocol):
    """Protocol of a worker's process: `subprocess.Popen`, or one that somebody else has started for us. `stdin` takes
    requests and `stdout`, which may be the same, gives replies; `stderr` gives last words, if it is there."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """End it at once; nothing happens when it has ended."""


class _Lost(Exception):
    """The worker cannot be spoken to any more; its text says why, "" where the process tells by its end."""


class Worker:
    """The client of one process: lines of JSON under deadlines. Once `end_reason` says how it ended, it answers nothing
    any more. It needs no thread, so that hundreds may be open.

    Args:
        name: of the benchmark, for messages.
        process: it speaks the protocol of `workers/worker_loop.py`.
        longest: bytes of a reply; more is none.
    """

    def __init__(self, name: str, process: Process, longest: int = REPLY) -> None:
        self.name, self.process, self.end_reason, self.ready = name, process, "", False
        self.lock = threading.Lock()
        """Held for a request and its answer."""
        self.sessions = self.requests = 0
        """The pool's, under the pool's lock."""
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

    def exchange(self, op: str, arguments: Mapping[str, object], timeout: float) -> JsonObject:
        """Send a request and wait for its reply; the caller holds the lock.

        Raises:
            InfrastructureError: the worker is lost, before or by this.
        """
        if self.has_ended():
            raise InfrastructureError(f"the {self.name} worker that held this episode {self.end_reason}")
        number, deadline = next(self._numbers), time.monotonic() + timeout
        # An interrupted request may have left half of itself behind.
        line = json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n"
        self._unsent = memoryview(bytes(self._unsent) + line)
        try:
            reply = self._reply(deadline)
            # What answers an earlier request, whose caller was interrupted, is late and nobody's any more.
            while reply["id"] < number:
                reply = self._reply(deadline)
            if reply["id"] > number:
                raise _Lost(f"answered request {reply['id']}, which was not made")
            return reply
        except TimeoutError:
            self.end(f"did not answer {op} within {timeout:g} s")
        except _Lost as loss:
            self.end(str(loss))
        lines = self.last_words()
        self.close_pipes()
        words = f"; its last words: {lines[-1]}" if lines else ""
        raise InfrastructureError(f"a {self.name} worker {self.end_reason}, asked for {op}{words}")

    def _reply(self, deadline: float) -> JsonObject:
        """The next reply of the process, while requests go out and its standard error is taken away, so that neither
        side ever waits for the other to read.

        Raises:
            TimeoutError: there is none by then: a worker that hangs reads nothing, either, and a pipe is soon full.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            if len(self._received) > self._longest:
                raise _Lost(f"printed a line of more than {self._longest} bytes")
            searched, seconds = len(self._received), deadline - time.monotonic()
            poll = select.poll()
            poll.register(self._out, select.POLLIN)
            if self._err is not None:
                poll.register(self._err, select.POLLIN)
            if self._unsent:
                poll.register(self._in, select.POLLOUT | (select.POLLIN if self._in == self._out else 0))
            # One that never stops printing always has something to be read.
            ready = dict(poll.poll(seconds * 1000)) if seconds > 0 else {}
            if not ready:
                raise TimeoutError
            if self._err in ready:
                self._listen()
            if self._in in ready and self._unsent:
                try:
                    self._unsent = self._unsent[os.write(self._in, self._unsent) :]
                except BlockingIOError:
                    pass
                except (BrokenPipeError, ConnectionResetError):
                    self._unsent = memoryview(b"")  # The worker has ended, or is being ended; its output says how.
            if ready.get(self._out, 0) & ~select.POLLOUT:
                try:
                    chunk = os.read(self._out, CHUNK)
                except BlockingIOError:
                    continue
                except ConnectionResetError:
                    chunk = b""
                if not chunk:
                    raise _Lost(f"printed what is not a reply: {bytes(self._received[:120])!r}" * bool(self._received))
                self._received += chunk
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        try:
            match json.loads(line):
                case {"id": int(), "ok": True, "result": _} as reply:
                    return reply
                case {"id": int(), "ok": False, "error": {"type": str(), "message": str()}} as reply:
                    return reply
        except (ValueError, RecursionError):
            pass
        raise _Lost(f"printed what is not a reply: {line[:120]!r}")

    def _listen(self) -> None:
        """Take away what is in standard error: a full pipe at most, however fast it is filled again."""
        if self._err is not None:
            with suppress(BlockingIOError):
                chunk = os.read(self._err, CHUNK)
                self._words = (self._words + chunk)[-WORDS:]
                self._err = self._err if chunk else None

    def has_ended(self) -> bool:
        """True if it is lost, by itself or through us."""
        if not self.end_reason and self.process.poll() is not None:
            self.end("")
        return bool(self.end_reason)

    def end(self, reason: str) -> None:
        """End the process; the first reason stays. "" for one that has ended by itself."""
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
        """The last lines of standard error of a worker that has ended."""
        self._listen()
        return [line for line in self._words.decode(errors="replace").splitlines() if line.strip()][-TAIL:]

    def close_pipes(self) -> None:
        """Let go of the pipes of a process that has ended; the caller holds the lock."""
        self._err = None
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
