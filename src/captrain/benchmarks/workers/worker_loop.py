# pyright: reportAttributeAccessIssue=false
"""The loop of a benchmark worker: JSON lines in, JSON lines out, in the benchmark's own environment.

A benchmark's pins conflict with ours, so it runs as a child process in a virtual environment of its own. Only this file
and the workers beside it run there, on the standard library (Python 3.10 or later) and the benchmark.

A request is a line `{"id", "op", ...}`, a reply a line `{"id", "ok", "result" | "error": {"type", "message",
"refused"}}`. Requests are answered one at a time, in the main thread. A `refused` error means that our side asked for
something that does not exist. Any other error is the benchmark's own exception, which must never become a score.

An observation answers `reset` and `step`. It has the new `messages` and `turn`: "agent", "user", or None at the end.
`user_messages` is the prompt of the user whose turn it is, and `user_tools` are the user's tools, if there are any.
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

Message = dict[str, Any]
LONGEST = 2000
"""Characters kept of an error message."""
GRACE = 1.0
"""Seconds that a request may still take after our process is gone."""
PATIENCE = 2.0
"""Seconds of CPU for one call. With wall-clock time a busy machine would change scores."""
DEEPEST, LARGEST, LONGEST_TEXT = 20, 10**15, 100_000
"""Bounds of arguments, beyond which a call is refused: levels of nesting, numbers, characters."""
TIMED = ("tools", "reset", "step", "evaluate")
"""Operations without garbage collection. Replays need it: they build tens of worlds with megabytes in cycles."""
SILENCE = {"role": "assistant", "content": ""}


class BadRequest(Exception):
    """The request asks for something that does not exist, or breaks the protocol."""


def protect() -> TextIO:
    """Reserve standard output for replies: everything else that prints goes to standard error.

    Call it before importing the benchmark, because imports print, too.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return replies


def serve(functions: Iterable[Callable[..., object]], replies: TextIO) -> None:
    """Answer requests until standard input ends, which happens when our process is gone.

    Args:
        functions: the operations, by their names. A request's other fields are their keyword arguments; they return
            JSON. Of two operations with one name the last counts.
        replies: the result of `protect`.
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
                # Collecting garbage in a large world takes long and must not count as a call's time.
                gc.disable()
            result = operations[name](**request)
            # ASCII only: a lone surrogate in a tool result must not break the stream.
            reply = json.dumps({"id": number, "ok": True, "result": result}, allow_nan=False)
        except (Exception, SystemExit) as error:
            # SystemExit, too: a benchmark's command-line code must not end the worker.
            description = {"type": type(error).__name__, "message": str(error)[:LONGEST]}
            # Compare classes, not names: a package may have a BadRequest of its own.
            is_refusal = isinstance(error, BadRequest)
            reply = json.dumps({"id": number, "ok": False, "error": {**description, "refused": is_refusal}})
        gc.enable()
        replies.write(reply + "\n")


def _read(requests: "queue.SimpleQueue[bytes]") -> None:
    """Queue lines. It runs in a thread, so that a worker whose request never ends still notices the end of our process
    and exits."""
    # A private copy: neither the benchmark nor its children may read requests or keep the pipe open.
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

    A subclass has `tools`, `opening()`, which returns the messages before the agent's first, and `take(role, message)`,
    which returns the messages that answer the agent or the user. It ends the episode by setting `turn` to None.
    """

    system = ""
    """The system prompt; "" for none."""
    turn: "str | None" = "agent"
    question: "dict[str, Any]" = {}
    """On the user's turn, the fields of the observation that ask the user."""

    def act(self, role: str, message: Message) -> "list[Message]":
        """Take a message, if it is the role's turn."""
        if role != self.turn:
            raise BadRequest(f"it is the turn of {self.turn}, and not of {role}")
        return self.take(role, message)

    def observation(self, messages: "list[Message]") -> "dict[str, Any]":
        """The observation with new messages."""
        return {"turn": self.turn, "messages": messages, **self.question}

    def close(self) -> None:
        """Release what the episode holds besides memory."""


class Episodes:
    """The open episodes of a worker, and the operations on them.

    Args:
        make: opens an episode. Its arguments are the fields of a request that name the task, and `user`, which is
            "client" if our side plays the user. It raises BadRequest if there is no such task.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.open: dict[str, Any] = {}
        self.count = 0

    def operations(self) -> "list[Callable[..., object]]":
        """The operations, for `serve`."""
        return [self.reset, self.step, self.idle, self.close]

    def reset(self, user: str, **task: object) -> "dict[str, Any]":
        """Open a task."""
        episode = self.make(user=user, **task)
        opening = episode.opening()
        self.count += 1
        self.open[str(self.count)] = episode
        about = {"episode": str(self.count), "system": episode.system, "tools": episode.tools}
        return {**about, **episode.observation(opening)}

    def step(self, episode: str, role: str, message: Message) -> "dict[str, Any]":
        """Take a message of the agent or the user."""
        return self.open[episode].observation(self.open[episode].act(role, message))

    def idle(self, **task: object) -> "dict[str, Any]":
        """The record of an agent that answers everything with an empty message."""
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


class ScriptedEpisode(Episode):
    """An episode with a scripted user, which can be replayed call by call.

    A subclass has `result(tool, arguments)`, which returns the text that answers a call of any form and whether the
    call was refused; `state()`, equal in equal worlds; and `score(messages)` of the episode so far.
    """

    outcomes: "list[tuple[str, bool, bool]] | None" = None
    """In a replay: result of each call, whether it was refused, and whether it changed the world."""
    before: object = None
    """In a replay: the state before the next call."""

    def results(self, message: Message) -> "list[Message]":
        """The tool messages that answer the calls of a message, in order."""
        replies = []
        for call in message.get("tool_calls") or []:
            tool, arguments = call_of(call)
            content, is_refused = self.result(tool, arguments)
            if self.outcomes is not None:
                before, self.before = self.before, self.state()
                self.outcomes.append((content, is_refused, self.before != before))
            identity = call.get("id") if isinstance(call.get("id"), str) else ""
            replies.append({"role": "tool", "tool_call_id": identity, "name": str(tool), "content": content})
        return replies


def replaying(make: Callable[..., Any]) -> Callable[..., object]:
    """The operation `replay` of scripted episodes.

    Args:
        make: opens an episode; a log may tell more about a task's world than its id.
    """

    def replay(dialogues: "list[list[Message]]", **task: object) -> "dict[str, Any]":
        """Play assistant messages, each dialogue in a fresh world; return the outcome of each call, and the score."""
        replayed = []
        for messages in dialogues:
            episode = make(**task)
            episode.opening()
            episode.outcomes, episode.before = [], episode.state()
            for message in messages:
                if episode.turn is not None:
                    episode.take("agent", message)
            score = episode.score(messages)
            replayed.append({"calls": episode.outcomes, "parts": score["parts"], "passed": score["success"]})
        return {"replayed": replayed}

    return replay


def calling(calls: "Iterable[tuple[str, Any]]") -> Message:
    """An assistant message with calls, given as (tool, arguments)."""
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def batches(calls: "list[tuple[str, Any]]", rounds: int) -> "list[Message]":
    """Assistant messages with one call each, or with as few as possible if there are more calls than rounds."""
    size = -(-len(calls) // rounds) or 1
    return [calling(calls[start : start + size]) for start in range(0, len(calls), size)]


def listed_once(schemas: "Iterable[Message]") -> "dict[str, Any]":
    """Result of the operation `tools`: the first schema of each name."""
    merged: dict[str, Message] = {}
    for schema in schemas:
        merged.setdefault(schema["function"]["name"], schema)
    return {"tools": list(merged.values())}


def call_of(call: "dict[str, Any]") -> "tuple[Any, Any]":
    """Tool and arguments of a call, which an agent may have written in any form. Arguments that are not a JSON object
    are returned as they are."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return function.get("name"), arguments


def objection(arguments: object) -> str:
    """The reason to refuse arguments, or ""."""
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
    """Raise a TimeoutError in a block that uses more than PATIENCE seconds of CPU."""

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
    """Digest of the files' bytes, one after the other."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]
