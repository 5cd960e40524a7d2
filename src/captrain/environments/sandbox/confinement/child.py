# pyright: reportMissingImports=false
"""What a confined process does: load an environment that was compiled elsewhere, and answer for it.

The protocol is that of `benchmarks/workers/serving.py`, over one socket. No threads and no open files here, because
none can be had. Whatever happens to this process from its first answer on, the other side believes only what an
environment may say, so that nothing here needs to be safe from the code it runs.
"""

import inspect
import json
import os
import random
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from confine import confine, probe

LONGEST = 2000
"""Characters kept of an error message."""
REQUIRED = ("name", "tools", "tasks", "open", "score", "reference")
OPTIONAL = ("about", "idle", "broken", "hint")


def serve(channel: int, code: CodeType, name: str, layers: list[str], server: int) -> None:
    """Confine this process, then answer requests until nobody is left to make them; never returns."""
    # Every process draws alike from a generator that its environment did not seed; forking has reseeded it.
    random.seed(0)
    confine(layers, server)
    operations = Operations(code, name)
    rest = b""
    while chunk := os.read(channel, 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            answer = memoryview(answered(operations, request.pop("id"), request.pop("op"), request))
            while answer:
                answer = answer[os.write(channel, answer) :]
    os._exit(0)


def answered(operations: "Operations", number: int, operation: str, arguments: dict[str, Any]) -> bytes:
    """One reply, as a line."""
    said: dict[str, Any]
    try:
        result = getattr(operations, operation)(**arguments)
        return json.dumps({"id": number, "ok": True, "result": result}, allow_nan=False).encode() + b"\n"
    except BaseException as error:  # A SystemExit, too, is the environment's answer.
        said = {"type": str(type(error).__name__), "message": words(error)}
    return json.dumps({"id": number, "ok": False, "error": said}).encode() + b"\n"


def words(error: BaseException) -> str:
    """What an exception says of itself, if it can."""
    try:
        return str(error)[:LONGEST]
    except BaseException:
        return ""


class Operations:
    """What can be asked of this process. Everything but `probe` is asked of the environment, and loads it first."""

    def __init__(self, code: CodeType, name: str) -> None:
        self._code, self._name = code, name
        self._loaded: Any = None
        self._episode: Any = None
        self._tasks: tuple[tuple[str, int], list[Any]] = ("", -1), []

    @property
    def _environment(self) -> Any:
        if self._loaded is None:
            module = ModuleType(self._name)
            module.__file__ = f"{self._name}.py"
            sys.modules[self._name] = module
            exec(self._code, module.__dict__)
            self._loaded = module.__dict__["Environment"]()
        return self._loaded

    def probe(self) -> dict[str, bool]:
        """See `confine.probe`."""
        return probe()

    def describe(self) -> dict[str, Any]:
        """What the environment is, or what it lacks."""
        environment = self._environment
        missing = [name for name in REQUIRED if not hasattr(environment, name)]
        if missing:
            return {"missing": missing}
        optional = [name for name in OPTIONAL if hasattr(environment, name)]
        keyed = "key" in inspect.signature(environment.open).parameters
        return {
            "missing": [], "name": environment.name, "tools": environment.tools, "optional": optional, "keyed": keyed,
            "about": getattr(environment, "about", {}),
        }  # fmt: skip

    def tasks(self, split: str, count: int, start: int, stop: int) -> list[Any]:
        """Some of the tasks: all of them may be too long for a line."""
        if self._tasks[0] != (split, count):
            self._tasks = (split, count), list(self._environment.tasks(split, count))
        return self._tasks[1][start:stop]

    def call(self, name: str, arguments: list[Any]) -> Any:
        """A method: `score`, `reference`, `idle`, `broken`, `hint`."""
        method: Callable[..., Any] = getattr(self._environment, name)
        return method(*arguments)

    def open(self, task: dict[str, Any], more: dict[str, str]) -> dict[str, Any]:
        """Open the one episode of this process."""
        self._episode = self._environment.open(task, **more)
        return {"messages": self._episode.messages, "tools": getattr(self._episode, "tools", None)}

    def step(self, message: dict[str, Any]) -> list[Any]:
        """Take a turn in it."""
        replies, done = self._episode.step(message)
        return [replies, bool(done)]
