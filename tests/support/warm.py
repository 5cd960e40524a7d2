"""Python processes that have their libraries at once: forks of one process that has imported them.

A stage imports torch, transformers and TRL for seconds, and DVC starts a process for each; a test that plays twenty
stages through DVC would spend more on that than on all they do. What runs is what would run otherwise: the same script
or module, in a process of its own, with its own folder, environment and streams. Nothing of captrain is imported yet.
Who asks for a process waits for it and ends with it; whoever is ended before takes it along.

    python warm.py SOCKET              serves
    python warm.py SOCKET WORDS [...]  has the server run what `python WORDS [...]` would
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
"""Script of a command: one that is to be isolated (-I) gets a plain interpreter, without the warm libraries."""
ADDRESS = "socket"
EXECUTABLE = "PYTHON_EXEC"
"""Names what these processes start further ones with, if they are to be such, too; `torch.distributed.run` reads it."""
FOLDER = "CAPTRAIN_TESTS_WARM"
"""Names the folder of the server's commands to the workers of xdist, which share one."""


def warm_commands() -> Path:
    """Folder of the commands `python`, `dvc` and `captrain`, whose processes have their libraries at once."""
    return Path(os.environ[FOLDER])


class Process:
    """A script at work. pid: of the process itself, so that it can be killed."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")

    def alive(self) -> bool:
        """True until the process has ended."""
        return not select.select([self.connection], [], [], 0)[0]

    def wait(self) -> int:
        """Its exit status; below zero the signal that ended it."""
        with self.connection, self.connection.makefile("rb") as answer:
            return int(answer.readline())


def start(server: Path, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Process:
    """Have a server run what Python would; streams are those of this process."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(server))
    request = json.dumps([list(words), str(folder), dict(environment)]).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", STREAMS))
    connection.sendmsg([len(request).to_bytes(8, "big")], [rights])
    connection.sendall(request)
    return Process(connection)


class Server:
    """The process that is forked, and the folder of the commands `python`, `dvc` and `captrain` to put in front of
    PATH. It imports when it is asked for the first time, and ends with the process that started it."""

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
        """End it; what its processes took is then counted among what this one's children took."""
        self.process.communicate()


def serve(address: Path) -> list[str]:
    """Take requests until standard input ends. Returns in the processes that are to run something: what."""
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
            running.pop(pid).close()  # whoever asked for it is gone
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
    """Tell the clients of those that have ended how they did."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if connection := running.pop(ended[0], None):
                with contextlib.suppress(BrokenPipeError), connection:
                    connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())


def receive(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """Receive an order: what to run, where, in which environment and with which streams."""
    length, descriptors, _, _ = socket.recv_fds(connection, 8, len(STREAMS))
    with connection.makefile("rb") as text:
        words, folder, environment = json.loads(text.read(int.from_bytes(length, "big")))
    return words, folder, environment, descriptors


def take_place(words: list[str], folder: str, environment: dict[str, str], descriptors: list[int]) -> list[str]:
    """Put this process where a client wants it; returns what it is to run."""
    os.setpgid(0, 0)
    atexit._clear()  # the libraries' own handlers go through all of the memory
    for number, descriptor in zip(STREAMS, descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return words


def become(words: list[str]) -> None:
    """Do as the interpreter does with these words: a script, -P and a script, or -m and a module, after -u or not."""
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
    # To take everything down would copy the memory that is shared with the server.
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
