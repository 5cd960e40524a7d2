# pyright: reportMissingImports=false
"""The fork server: holds one environment, compiled but never run, and starts a confined process for every use of it.

Run by an interpreter without any package, as `server.py <socket> <name> <modules>`, the text on standard input. It
imports what an environment may need, since a confined process can import nothing else; a fork then takes a millisecond
or two. Over the socket it takes one request at a time: `compile`, `fork`, which hands over a socket to the new process
and a descriptor of it, and `reap`. It ends when the other side is gone, and all its processes with it.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import CodeType

sys.path.insert(0, str(Path(__file__).parent))

from child import serve, words
from confine import LIMITS, limit
from seccomp import program

sys.path.pop(0)

INTERNAL = ("_strptime", "encodings.ascii", "encodings.latin_1", "encodings.unicode_escape")
"""Modules that the others import when they are first used."""


def main() -> None:
    """See the module."""
    control, name, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3].split()
    source = sys.stdin.buffer.read()
    for module in (*INTERNAL, *modules):
        importlib.import_module(module)
    # What an environment prints is nobody's: there is nothing to flood.
    sink = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(sink, standard)
    warnings.simplefilter("ignore")
    with suppress(OSError):
        program(os.uname().machine)  # once for all processes
    handles = [os.pidfd_open(os.getpid())] if hasattr(os, "pidfd_open") else []
    tell(control, {"pid": os.getpid()}, handles)
    code = None
    while request := control.recv(1 << 12):
        match json.loads(request):
            case {"op": "compile", "seconds": int(seconds) | float(seconds)}:
                limit({"AS": LIMITS["AS"], "STACK": LIMITS["STACK"], "CORE": 0})
                # If it takes longer, and nobody is left to end this process, the alarm does.
                signal.alarm(int(seconds) + 1)
                code, complaint = compile_source(source, name)
                signal.alarm(0)
                gc.collect()
                gc.freeze()
                tell(control, {"error": complaint})
            case {"op": "fork", "layers": list(layers)} if code is not None:
                start(control, code, name, layers)
            case {"op": "reap", "pid": int(pid)}:
                tell(control, {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
            case _:
                return


def compile_source(source: bytes, name: str) -> tuple[CodeType | None, str]:
    """The code, or what is wrong with its text."""
    try:
        return compile(source, f"{name}.py", "exec", dont_inherit=True), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {words(error)}"


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
            serve(3, code, name, layers, server)
        finally:
            os._exit(1)
    handles = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
    with local, remote:
        tell(control, {"pid": pid}, [local.fileno(), *handles])
    for handle in handles:
        os.close(handle)


def tell(control: socket.socket, reply: dict[str, object], handles: list[int] | None = None) -> None:
    """Send a reply, with descriptors."""
    socket.send_fds(control, [json.dumps(reply).encode()], handles or [])


main()
