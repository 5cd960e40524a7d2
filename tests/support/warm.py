"""Python processes that start with their libraries loaded: forks of one process that has imported them.

Importing torch, transformers and TRL takes seconds, and DVC starts a process for each stage. A test with twenty stages
would spend more time on imports than on work. A fork runs the same script or module as a fresh process would, with its
own folder, environment and streams. Nothing of captrain is imported yet. The client waits for its process and ends
with it; if the client is killed, so is the process.

    python warm.py SOCKET              starts the server
    python warm.py SOCKET WORDS [...]  runs `python WORDS [...]` in a fork of the server
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARIES = (
    "dvc.cli", "dvc.repo", "dvc.commands.repro", "hydra", "matplotlib.pyplot", "pandas", "pydantic", "rich.table",
    "scipy.stats", "statsmodels.stats.multitest", "torch", "transformers.models.qwen3.modeling_qwen3", "peft",
    "trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "typer",
)  # fmt: skip
STREAMS = (0, 1, 2)
COMMAND = """#!/bin/sh
if [ "$1" = -I ]; then exec {python} "$@"; fi
exec {python} -I -S {client} {address} {script} "$@"
"""
"""Script of a command. With -I (isolated) it runs a plain interpreter without warm libraries."""
ADDRESS = "socket"
EXECUTABLE = "PYTHON_EXEC"
"""Environment variable with the interpreter for child processes; `torch.distributed.run` reads it."""
FOLDER = "CAPTRAIN_TESTS_WARM"
"""Environment variable that tells xdist's workers the folder of the shared server's commands."""


def warm_commands() -> Path:
    """Return the folder of the commands `python`, `dvc` and `captrain`, which run in warm processes."""
    return Path(os.environ[FOLDER])


class Process:
    """A running script. pid: process id of the script itself."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")

    def alive(self) -> bool:
        """Return True until the process has ended."""
        return not select.select([self.connection], [], [], 0)[0]

    def wait(self) -> int:
        """Wait and return the exit status; negative for a signal."""
        with self.connection, self.connection.makefile("rb") as answer:
            return int(answer.readline())


def start(server: Path, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Process:
    """Have a server run Python with these arguments, on the streams of this process."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(server))
    request = json.dumps([list(words), str(folder), dict(environment)]).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", STREAMS))
    connection.sendmsg([len(request).to_bytes(8, "big")], [rights])
    connection.sendall(request)
    return Process(connection)


class Server:
    """The process that is forked, and a folder with the commands `python`, `dvc` and `captrain` for PATH.

    It imports the libraries at the first request, and ends with the process that started it.
    """

    def __init__(self, folder: Path) -> None:
        self.address = folder / ADDRESS
        for name in ("python", "dvc", "captrain"):
            script = "" if name == "python" else Path(sys.executable).with_name(name)
            path = folder / name
            path.write_text(COMMAND.format(python=sys.executable, client=__file__, address=self.address, script=script))
            path.chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, __file__, str(self.address)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
        os.environ[FOLDER] = str(folder)
        while not self.address.exists():
            assert self.process.poll() is None, "the server of warm processes does not start"
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop the server. Its processes' CPU time then counts as that of this process's children."""
        self.process.communicate()


def serve(address: Path) -> list[str]:
    """Serve requests until standard input ends. In a fork it returns the arguments to run."""
    running: dict[int, socket.socket] = {}
    ended, wakes = socket.socketpair()
    for end in (ended, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address.with_suffix(".new")))
    listener.listen(16)
    address.with_suffix(".new").rename(address)
    while sys.stdin not in (ready := select.select([sys.stdin, listener, ended, *running.values()], [], [])[0]):
        if ended in ready:
            ended.recv(4096)
            answer(running)
        for pid in [pid for pid, connection in running.items() if connection in ready]:
            running.pop(pid).close()  # the client is gone
            os.killpg(pid, signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            request = receive(connection)
            for name in LIBRARIES:
                importlib.import_module(name)
            gc.freeze()
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, ended, wakes, connection, *running.values()):
                    other.close()
                return take_place(*request)
            for descriptor in request[-1]:
                os.close(descriptor)
            connection.sendall(pid.to_bytes(8, "big"))
            running[pid] = connection
    answer(running)
    sys.exit()


def answer(running: dict[int, socket.socket]) -> None:
    """Tell the clients of ended processes their exit status."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if connection := running.pop(ended[0], None):
                with contextlib.suppress(BrokenPipeError), connection:
                    connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())


def receive(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """Receive a request: arguments, folder, environment and streams."""
    length, descriptors, _, _ = socket.recv_fds(connection, 8, len(STREAMS))
    with connection.makefile("rb") as text:
        words, folder, environment = json.loads(text.read(int.from_bytes(length, "big")))
    return words, folder, environment, descriptors


def take_place(words: list[str], folder: str, environment: dict[str, str], descriptors: list[int]) -> list[str]:
    """Set up this process as a client asked, and return the arguments to run."""
    os.setpgid(0, 0)
    atexit._clear()  # the libraries' handlers would touch all memory
    for number, descriptor in zip(STREAMS, descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return words


def become(words: list[str]) -> None:
    """Act as the interpreter does: optionally -u, then a script, -P and a script, or -m and a module."""
    words = words[words[0] == "-u" :]
    sys.executable = os.environ.get(EXECUTABLE, sys.executable)
    kind, status = words[0], 0
    sys.argv = words[1:] if kind in ("-P", "-m") else words
    folder = {"-P": [], "-m": [os.getcwd()]}.get(kind, [str(Path(words[0]).resolve().parent)])
    sys.path[:1] = [*folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if kind == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(sys.argv[0]).absolute()), run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    # A normal exit would copy the memory that is shared with the server.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        become(serve(Path(sys.argv[1])))
    else:
        status = start(Path(sys.argv[1]), sys.argv[2:], Path.cwd(), os.environ).wait()
        if status < 0:
            os.kill(os.getpid(), -status)
        sys.exit(status)
