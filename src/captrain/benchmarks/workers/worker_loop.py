# pyright: reportAttributeAccessIssue=false
"""The loop of a benchmark worker: JSON lines in, JSON lines out, in the benchmark's own environment.

A benchmark's pins conflict with ours, so it runs as a child process in a virtual environment of its own; this file and
the workers beside it are all that runs there, on the standard library (Python 3.10 or later) and the benchmark alone.
One request a line `{"id", "op", ...}`, one reply a line `{"id", "ok", "result" | "error": {"type", "message",
"refused"}}`; one request at a time, in the main thread. An error that is `refused` says that our side asked for
something that does not exist; any other is the benchmark's own exception, which must never become a score.

An observation, which answers `reset` and `step`, has `messages` that have come and whose `turn` it is: "agent", "user",
or None at the end; a user is asked by `user_messages` and may have `user_tools`.
"""

import gc
import hashlib
import inspect
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

LONGEST = 2000
"""Characters kept of an error message."""
GRACE = 1.0
"""Seconds that a request may still take when nobody is left to read the reply."""
PATIENCE = 2.0
"""Seconds of CPU for one call. By the clock a busy machine would decide a score."""
DEEPEST, LARGEST, LONGEST_TEXT = 20, 10**15, 100_000
"""Bounds of arguments, beyond which a call is refused: levels of nesting, numbers, characters."""
TIMED = ("tools", "reset", "step", "evaluate")
"""Operations of an episode. A replay builds tens of worlds, which leave megabytes in cycles."""
SILENCE = {"role": "assistant", "content": ""}


class BadRequest(Exception):
    """The request asks for something that does not exist, or that is not of the protocol."""


def protect() -> TextIO:
    """Take standard output for replies alone: whatever else prints from now on goes to standard error.

    To be called before the benchmark is imported, because imports print, too.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return replies


def serve(functions: Iterable[Callable[..., object]], replies: TextIO) -> None:
    """Answer requests until the end of standard input, which comes when our process is gone.

    Args:
        functions: the operations, by their names; a request's other fields are their keyword arguments, and they return
            JSON. Of two of one name the last counts.
        replies: what `protect` returned.
    """
    operations = {function.__name__: function for function in functions}
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while line := requests.get():
        number: object = None
        try:
            request = json.loads(line)
            number, name = request.pop("id"), request.pop("op")
            if name not in operations:
                raise BadRequest(f"there is no operation {name!r}")
            try:
                inspect.signature(operations[name]).bind(**request)
            except TypeError as wrong:
                raise BadRequest(f"{name}: {wrong}") from None
            if name in TIMED:
                # To look for cycles in a large world takes long, and must not be in a call's time.
                gc.disable()
            result = operations[name](**request)
            # ASCII throughout: a lone surrogate in a tool result must not break the stream.
            reply = json.dumps({"id": number, "ok": True, "result": result}, allow_nan=False)
        except (Exception, SystemExit) as error:
            # SystemExit, too: a benchmark's command-line code must not end the worker.
            description = {"type": type(error).__name__, "message": str(error)[:LONGEST]}
            # By the class: a package may have exceptions of this name.
            is_refusal = isinstance(error, BadRequest)
            reply = json.dumps({"id": number, "ok": False, "error": {**description, "refused": is_refusal}})
        gc.enable()
        replies.write(reply + "\n")


def _read(requests: "queue.SimpleQueue[bytes]") -> None:
    """Hand on lines. In a thread of its own, so that a worker whose request never ends still notices that our process
    is gone, and ends, too."""
    # A private copy: a benchmark that reads standard input must not eat requests, nor its children keep it open.
    source = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    with open(source, "rb") as lines:
        for line in lines:
            requests.put(line)
    requests.put(b"")
    time.sleep(GRACE)
    os._exit(1)


class Episode:
    """One task being played.

    An episode has `opening()`, the messages before the agent's first, and `take(role, message)`, the messages that
    answer one of the agent or of the user; it closes itself by setting `turn` to None.
    """

    system = ""
    """The system prompt; "" for none."""
    turn: "str | None" = "agent"
    question: "dict[str, Any]" = {}
    """The prompt of a user whose turn it is."""

    def act(self, role: str, message: "dict[str, Any]") -> "list[dict[str, Any]]":
        """Take a message of whoever's turn it is."""
        if role != self.turn:
            raise BadRequest(f"it is the turn of {self.turn}, and not of {role}")
        return self.take(role, message)

    def observation(self, messages: "list[dict[str, Any]]") -> "dict[str, Any]":
        """Report messages that have come."""
        return {"turn": self.turn, "messages": messages, **self.question}

    def close(self) -> None:
        """Let go of what the episode holds beside memory."""


class Episodes:
    """The open episodes of a worker, and the operations on them.

    Args:
        make: an episode of a task, by the fields of a request that name it, and by `user`, which is "client" where our
            side plays the user; raises BadRequest where there is no such task.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.open: dict[str, Any] = {}
        self.count = 0

    def operations(self) -> "list[Callable[..., object]]":
        """For `serve`."""
        return [self.reset, self.step, self.idle, self.close]

    def reset(self, user: str, **task: object) -> "dict[str, Any]":
        """Open a task."""
        episode = self.make(user=user, **task)
        opening = episode.opening()
        self.count += 1
        self.open[str(self.count)] = episode
        about = {"episode": str(self.count), "system": episode.system, "tools": episode.tools}
        return {**about, **episode.observation(opening)}

    def step(self, episode: str, role: str, message: "dict[str, Any]") -> "dict[str, Any]":
        """The agent or the user speaks."""
        return self.open[episode].observation(self.open[episode].act(role, message))

    def idle(self, **task: object) -> "dict[str, Any]":
        """The record of an agent that says nothing to whatever is asked."""
        episode = self.make(user="scripted", **task)
        try:
            messages = list(episode.opening())
            while episode.turn is not None:
                messages += [SILENCE, *episode.take("agent", SILENCE)]
            return {"messages": messages}
        finally:
            episode.close()

    def close(self, episode: str) -> None:
        """Drop an episode."""
        self.open.pop(episode).close()


def call_of(call: "dict[str, Any]") -> "tuple[Any, Any]":
    """Return tool and arguments of a call, which an agent may have written in any form: arguments that are no JSON
    object stay what they are."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return function.get("name"), arguments


def objection(arguments: object) -> str:
    """Explain why arguments are not tried, "" where they are."""
    if not isinstance(arguments, dict):
        return "arguments are no JSON object"
    pending: list[tuple[object, int]] = [(arguments, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > DEEPEST:
            return "arguments are nested too deeply"
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
            return "a number is too large"
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            return "a text is too long"
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending += [(element, depth + 1) for element in inner]
    return ""


@contextmanager
def patience() -> "Iterator[None]":
    """Interrupt what takes too long with a TimeoutError."""

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {PATIENCE:g} s")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def digest(paths: "Iterable[Path]") -> str:
    """Digest of the bytes of files, one after the other."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]
