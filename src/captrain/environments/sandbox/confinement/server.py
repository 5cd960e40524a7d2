# pyright: reportMissingImports=false
"""The fork server: holds one compiled environment, and forks a confined process for each use of it.

An interpreter without packages runs it as `server.py <socket> <name> <seconds> <modules>`, with the environment's text
on standard input. The server imports all modules that an environment may need, because a confined process cannot import
more. It reports that it runs, compiles the text within the given seconds, and reports errors. A fork then takes about a
millisecond. Requests arrive over the socket, one at a time: `fork` returns a socket to the new process and its pidfd,
and `reap` its exit status. When the other side is gone, the server and its processes end.

A confined process loads the environment and answers requests in the protocol of `benchmarks/workers/worker_loop.py`. It
has no threads and no open files. The other side validates every answer, so nothing in this process needs protection
from the code that it runs.
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
"""Modules that other modules import on first use."""
LONGEST = 2000
"""Most characters of an error message."""
REQUIRED = ("name", "tools", "tasks", "open", "score", "reference")
OPTIONAL = ("about", "size", "idle", "broken", "hint")


def main() -> None:
    """Compile the environment, then fork and reap until the socket closes."""
    control, name = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    source = sys.stdin.buffer.read()
    for module in (*INTERNAL, *sys.argv[4].split()):
        importlib.import_module(module)
    # Discard what environments print.
    sink = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(sink, standard)
    warnings.simplefilter("ignore")
    with suppress(OSError):
        program(os.uname().machine)  # cached for all processes
    tell(control, {"pid": os.getpid()}, [os.pidfd_open(os.getpid())] if hasattr(os, "pidfd_open") else [])
    limit({"AS": LIMITS["AS"], "STACK": LIMITS["STACK"], "CORE": 0})
    # Ends this process if compiling hangs and our owner is gone.
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
            # Forking reseeds `random`; all processes must draw alike.
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
    """Send a line with a reply, and file descriptors."""
    socket.send_fds(control, [json.dumps(reply).encode() + b"\n"], handles or [])


def serve(channel: int, operations: "Operations") -> None:
    """Answer requests until the channel closes; never returns."""
    remainder = b""
    while chunk := os.read(channel, 1 << 16):
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            number, operation = request.pop("id"), request.pop("op")
            try:
                result = getattr(operations, operation)(**request)
                text = json.dumps({"id": number, "ok": True, "result": result}, allow_nan=False)
            except BaseException as error:  # the environment may even raise SystemExit
                fault = {"type": str(type(error).__name__), "message": words(error)}
                text = json.dumps({"id": number, "ok": False, "error": fault})
            answer = memoryview(text.encode() + b"\n")
            while answer:
                answer = answer[os.write(channel, answer) :]
    os._exit(0)


def words(error: BaseException) -> str:
    """Return the beginning of an exception's text; "" if it has none or raises."""
    try:
        return str(error)[:LONGEST]
    except BaseException:
        return ""


class Operations:
    """Operations of a confined process. The first two do not load the environment."""

    def __init__(self, code: CodeType, name: str) -> None:
        self._code, self._name = code, name
        self._episode: Any = None
        self._tasks: tuple[tuple[str, int], list[object]] = ("", -1), []

    def hello(self) -> None:
        """Answer, which shows that this process could apply its layers."""

    def probe(self) -> dict[str, bool]:
        """See `confine.probe`."""
        return probe()

    @cached_property
    def _environment(self) -> Any:
        """The untrusted `Environment` of the file."""
        module = ModuleType(self._name)
        module.__file__ = f"{self._name}.py"
        sys.modules[self._name] = module
        exec(self._code, module.__dict__)
        return module.__dict__.get("Environment", lambda: None)()

    def describe(self) -> dict[str, object]:
        """Return name, tools and optional members, or the missing members."""
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
        """Return a slice of the tasks: all of them might not fit into a line."""
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
        """Take a turn in the episode."""
        replies, is_over = self._episode.step(message)
        return [replies, bool(is_over)]


main()
