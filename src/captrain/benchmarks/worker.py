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
    """Protocol of a worker's process: `subprocess.Popen`, or one that somebody else has started for us."""

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
        reply, reason = None, ""
        try:
            # What answers an earlier request, whose caller was interrupted, is late and nobody's any more.
            while reply is None or reply["id"] < number:
                line = self._line(deadline)
                reply = _reply(line)
                if reply is None:
                    reason = f"printed what is not a reply: {line[:120]!r}" if line else ""
                    break
            else:
                reason = f"answered request {reply['id']}, which was not made"
        except TimeoutError:
            reason = f"did not answer {op} within {timeout:g} s"
        except OverflowError:
            reason = f"printed a line of more than {self._longest} bytes"
        if reply is None or reply["id"] != number:
            self.end(reason)
            lines = self.last_words()
            self.close_pipes()
            words = f"; its last words: {lines[-1]}" if lines else ""
            raise InfrastructureError(f"a {self.name} worker {self.end_reason}, asked for {op}{words}")
        return reply

    def _line(self, deadline: float) -> bytes:
        """The next line of the process, while requests go out and its standard error is taken away, so that neither
        side ever waits for the other to read; what is left at the end of its output, "" for nothing.

        Raises:
            TimeoutError: there is none by then: a worker that hangs reads nothing, either, and a pipe is soon full.
            OverflowError: it is too long.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            if len(self._received) > self._longest:
                raise OverflowError
            searched, seconds = len(self._received), deadline - time.monotonic()
            ready = self._ready_pipes(seconds) if seconds > 0 else {}
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
                    end = len(self._received)
                    break
                self._received += chunk
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def _ready_pipes(self, seconds: float) -> dict[int, int]:
        """Poll for pipes that can be read or written, waiting so long for any: descriptor -> events."""
        interest = {self._out: select.POLLIN}
        if self._err is not None:
            interest[self._err] = select.POLLIN
        if self._unsent:
            interest[self._in] = interest.get(self._in, 0) | select.POLLOUT
        poll = select.poll()
        for pipe, events in interest.items():
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

    def dismiss(self) -> None:
        """Ask the process to end: it does at the end of its input, or is terminated if it is at work."""
        self.end_reason = self.end_reason or "was ended"
        assert self.process.stdin is not None
        if self.lock.acquire(blocking=False):
            self.process.stdin.close()
            self.lock.release()
        else:
            self.process.terminate()

    def close_pipes(self) -> None:
        """Let go of the pipes of a process that has ended; the caller holds the lock."""
        self._err = None
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _reply(line: bytes) -> JsonObject | None:
    """A whole reply of the protocol, or None."""
    try:
        reply = json.loads(line)
        whole = isinstance(reply["id"], int) and line.endswith(b"\n")
        if reply["ok"] is True:
            return reply if whole and "result" in reply else None
        has_texts = isinstance(reply["error"]["type"], str) and isinstance(reply["error"]["message"], str)
        return reply if whole and has_texts and reply["ok"] is False else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
