# pyright: reportMissingImports=false
"""The fork server: holds one environment, compiled but never run, and starts a confined process for every use of it.

Run by an interpreter without any package, as `server.py <socket> <name> <seconds> <modules>`, the text on standard
input. It imports what an environment may need, since a confined process can import nothing else, says that it is there,
compiles the text within so many seconds, and says what is wrong with it. A fork then takes a millisecond or two. Over
the socket it takes one request at a time: `fork`, which hands over a socket to the new process and a descriptor of it,
and `reap`. It ends when the other side is gone, and all its processes with it.

A confined process loads the environment and answers for it, in the protocol of `benchmarks/workers/worker_loop.py` over
one socket. It has no threads and no open files, because none can be had. Whatever happens to it from its first answer
on, the other side believes only what an environment may say, so that nothing in it needs to be safe from the code it
runs.
"""

import gc
import importlib
import inspect
import json
import os
import random
import signal
import socket
import sys
import warnings
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from confine import LIMITS, confine, limit, probe, program

sys.path.pop(0)

INTERNAL = ("_strptime", "encodings.ascii", "encodings.latin_1", "encodings.unicode_escape")
"""Modules that the others import when they are first used."""
LONGEST = 2000
"""Characters kept of an error message."""
REQUIRED = ("name", "tools", "tasks", "open", "score", "reference")
OPTIONAL = ("about", "size", "idle", "broken", "hint")


def main() -> None:
    """Compile the environment, then start and reap processes until nobody asks for any."""
    control, name = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    source = sys.stdin.buffer.read()
    for module in (*INTERNAL, *sys.argv[4].split()):
        importlib.import_module(module)
    # What an environment prints is nobody's: there is nothing to flood.
    sink = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(sink, standard)
    warnings.simplefilter("ignore")
    with suppress(OSError):
        program(os.uname().machine)  # once for all processes
    tell(control, {"pid": os.getpid()}, [os.pidfd_open(os.getpid())] if hasattr(os, "pidfd_open") else [])
    limit({"AS": LIMITS["AS"], "STACK": LIMITS["STACK"], "CORE": 0})
    # If it takes longer, and nobody is left to end this process, the alarm does.
    signal.alarm(int(float(sys.argv[3])) + 1)
    code, complaint = None, ""
    try:
        code = compile(source, f"{name}.py", "exec", dont_inherit=True)
    except Exception as error:
        complaint = f"{type(error).__name__}: {words(error)}"
    signal.alarm(0)
    gc.collect()
    gc.freeze()
    tell(control, {"error": complaint})
    while code is not None and (request := control.recv(1 << 12)):
        match json.loads(request):
            case {"op": "fork", "layers": list(layers)}:
                start(control, code, name, layers)
            case {"op": "reap", "pid": int(pid)}:
                tell(control, {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
            case _:
                return


def start(control: socket.socket, code: CodeType, name: str, layers: list[str]) -> None:
    """Fork a confined process."""
    local, remote = socket.socketpair()
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        tell(control, {"error": f"no process: {error.strerror}"})
        return
    if pid == 0:
        try:
            os.setsid()
            os.dup2(remote.fileno(), 3)
            os.closerange(4, 1024)
            # Every process draws alike from a generator that its environment did not seed; forking has reseeded it.
            random.seed(0)
            confine(layers, server)
            serve(3, Operations(code, name))
        finally:
            os._exit(1)
    handles = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
    with local, remote:
        tell(control, {"pid": pid}, [local.fileno(), *handles])
    for handle in handles:
        os.close(handle)


def tell(control: socket.socket, reply: dict[str, object], handles: list[int] | None = None) -> None:
    """Send a reply, which is a line, with descriptors."""
    socket.send_fds(control, [json.dumps(reply).encode() + b"\n"], handles or [])


def serve(channel: int, operations: "Operations") -> None:
    """Answer requests until nobody is left to make them; never returns."""
    remainder = b""
    while chunk := os.read(channel, 1 << 16):
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            number, operation = request.pop("id"), request.pop("op")
            try:
                result = getattr(operations, operation)(**request)
                text = json.dumps({"id": number, "ok": True, "result": result}, allow_nan=False)
            except BaseException as error:  # A SystemExit, too, is the environment's answer.
                fault = {"type": str(type(error).__name__), "message": words(error)}
                text = json.dumps({"id": number, "ok": False, "error": fault})
            answer = memoryview(text.encode() + b"\n")
            while answer:
                answer = answer[os.write(channel, answer) :]
    os._exit(0)


def words(error: BaseException) -> str:
    """Return what an exception says of itself, so far as it fits, or "" where it cannot."""
    try:
        return str(error)[:LONGEST]
    except BaseException:
        return ""


class Operations:
    """Operations that a confined process answers. Only the first two do without the environment."""

    def __init__(self, code: CodeType, name: str) -> None:
        self._code, self._name = code, name
        self._episode: Any = None
        self._tasks: tuple[tuple[str, int], list[object]] = ("", -1), []

    def hello(self) -> None:
        """Answer at all: the layers of this process are to be had."""

    def probe(self) -> dict[str, bool]:
        """See `confine.probe`."""
        return probe()

    @cached_property
    def _environment(self) -> Any:
        """The file's `Environment`; nothing in it is believed."""
        module = ModuleType(self._name)
        module.__file__ = f"{self._name}.py"
        sys.modules[self._name] = module
        exec(self._code, module.__dict__)
        return module.__dict__.get("Environment", lambda: None)()

    def describe(self) -> dict[str, object]:
        """Return the environment's name, tools and optional methods, or the names that it lacks."""
        environment = self._environment
        if environment is None:
            return {"missing": ["the class Environment"]}
        missing = [name for name in REQUIRED if not hasattr(environment, name)]
        if missing:
            return {"missing": missing}
        return {
            "name": environment.name,
            "tools": environment.tools,
            "optional": [name for name in OPTIONAL if hasattr(environment, name)],
            "keyed": "key" in inspect.signature(environment.open).parameters,
            "about": getattr(environment, "about", {}),
        }

    def tasks(self, split: str, count: int, start: int, stop: int) -> list[object]:
        """Some of the tasks: all of them may be too long for a line."""
        if self._tasks[0] != (split, count):
            self._tasks = (split, count), list(self._environment.tasks(split, count))
        return self._tasks[1][start:stop]

    def call(self, name: str, arguments: list[object]) -> object:
        """Call a method: `score`, `reference`, `size`, `idle`, `broken`, `hint`."""
        return getattr(self._environment, name)(*arguments)

    def open(self, task: dict[str, object], more: dict[str, str]) -> dict[str, object]:
        """Open the one episode of this process."""
        self._episode = self._environment.open(task, **more)
        return {"messages": self._episode.messages, "tools": getattr(self._episode, "tools", None)}

    def step(self, message: dict[str, object]) -> list[object]:
        """Take a turn in it."""
        replies, is_over = self._episode.step(message)
        return [replies, bool(is_over)]


main()
