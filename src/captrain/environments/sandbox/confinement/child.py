# pyright: reportMissingImports=false
"""Work of a confined process: load an environment that was compiled elsewhere, and answer for it.

The protocol is that of `benchmarks/workers/serving.py`, over one socket. No threads and no open files here, because
none can be had. Whatever happens to this process from its first answer on, the other side believes only what an
environment may say, so that nothing here needs to be safe from the code it runs.
"""

import inspect
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Protocol

from confine import confine, probe

LONGEST = 2000
"""Characters kept of an error message."""
REQUIRED = ("name", "tools", "tasks", "open", "score", "reference")
OPTIONAL = ("about", "size", "idle", "broken", "hint")


class Episode(Protocol):
    """Protocol that an opened task should keep; nothing in it is believed."""

    messages: object

    def step(self, message: dict[str, object]) -> tuple[object, object]:
        """Replies, and whether the episode is over."""
        ...


class Environment(Protocol):
    """Protocol that the file's `Environment` should keep; nothing in it is believed."""

    name: object
    tools: object

    def tasks(self, split: str, count: int) -> Iterable[object]:
        """The first tasks of a split."""
        ...

    def open(self, task: dict[str, object], **options: str) -> Episode:
        """Open a task."""
        ...


def serve(channel: int, code: CodeType, name: str, layers: list[str], server: int) -> None:
    """Confine this process, then answer requests until nobody is left to make them; never returns."""
    # Every process draws alike from a generator that its environment did not seed; forking has reseeded it.
    random.seed(0)
    confine(layers, server)
    operations = Operations(code, name)
    remainder = b""
    while chunk := os.read(channel, 1 << 16):
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            answer = memoryview(reply_line(operations, request.pop("id"), request.pop("op"), request))
            while answer:
                answer = answer[os.write(channel, answer) :]
    os._exit(0)


def reply_line(operations: "Operations", number: int, operation: str, arguments: dict[str, object]) -> bytes:
    """One reply, as a line."""
    try:
        result = getattr(operations, operation)(**arguments)
        return json.dumps({"id": number, "ok": True, "result": result}, allow_nan=False).encode() + b"\n"
    except BaseException as error:  # A SystemExit, too, is the environment's answer.
        fault = {"type": str(type(error).__name__), "message": words(error)}
    return json.dumps({"id": number, "ok": False, "error": fault}).encode() + b"\n"


def words(error: BaseException) -> str:
    """Return what an exception says of itself, so far as it fits, or "" where it cannot."""
    try:
        return str(error)[:LONGEST]
    except BaseException:
        return ""


class Operations:
    """Operations that this process answers. All but `probe` are asked of the environment, and load it first."""

    def __init__(self, code: CodeType, name: str) -> None:
        self._code, self._name = code, name
        self._loaded: Environment | None = None
        self._episode: Episode | None = None
        self._tasks: tuple[tuple[str, int], list[object]] = ("", -1), []

    @property
    def _environment(self) -> Environment:
        if self._loaded is None:
            module = ModuleType(self._name)
            module.__file__ = f"{self._name}.py"
            sys.modules[self._name] = module
            exec(self._code, module.__dict__)
            loaded: Environment = module.__dict__["Environment"]()
            self._loaded = loaded
        return self._loaded

    def probe(self) -> dict[str, bool]:
        """See `confine.probe`."""
        return probe()

    def describe(self) -> dict[str, object]:
        """Return the environment's name, tools and optional methods, or the names that it lacks."""
        environment = self._environment
        missing = [name for name in REQUIRED if not hasattr(environment, name)]
        if missing:
            return {"missing": missing}
        optional = [name for name in OPTIONAL if hasattr(environment, name)]
        keyed = "key" in inspect.signature(environment.open).parameters
        return {
            "missing": [],
            "name": environment.name,
            "tools": environment.tools,
            "optional": optional,
            "keyed": keyed,
            "about": getattr(environment, "about", {}),
        }

    def tasks(self, split: str, count: int, start: int, stop: int) -> list[object]:
        """Some of the tasks: all of them may be too long for a line."""
        if self._tasks[0] != (split, count):
            self._tasks = (split, count), list(self._environment.tasks(split, count))
        return self._tasks[1][start:stop]

    def call(self, name: str, arguments: list[object]) -> object:
        """A method: `score`, `reference`, `size`, `idle`, `broken`, `hint`."""
        method: Callable[..., object] = getattr(self._environment, name)
        return method(*arguments)

    def open(self, task: dict[str, object], more: dict[str, str]) -> dict[str, object]:
        """Open the one episode of this process."""
        episode = self._environment.open(task, **more)
        self._episode = episode
        return {"messages": episode.messages, "tools": getattr(episode, "tools", None)}

    def step(self, message: dict[str, object]) -> list[object]:
        """Take a turn in it."""
        assert self._episode is not None
        replies, is_over = self._episode.step(message)
        return [replies, bool(is_over)]
