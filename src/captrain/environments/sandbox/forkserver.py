"""Client of the fork server: starts it, takes over its confined processes, and validates their answers.

The fork server runs `confinement/server.py` in the base interpreter of this virtual environment, under bubblewrap if
that works. It compiles one environment and never runs its code. When the client's process ends, for any reason, the
server and its processes end too. A forked child of the client inherits the server but never uses it.

This module also decides which modules a file can import and how long each step may take. An answer that breaks a limit
is a `Misbehaviour` of the file.
"""

import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_paths
from typing import IO, Any, NotRequired, TypedDict

from captrain.benchmarks import Worker
from captrain.errors import InfrastructureError, UserError

CONFINEMENT = Path(__file__).parent / "confinement"
MODULES = (
    "__future__",
    "abc",
    "array",
    "ast",
    "base64",
    "binascii",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "collections.abc",
    "colorsys",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fnmatch",
    "fractions",
    "functools",
    "graphlib",
    "hashlib",
    "heapq",
    "hmac",
    "html",
    "inspect",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "keyword",
    "logging",
    "math",
    "numbers",
    "operator",
    "os",
    "pathlib",
    "pprint",
    "random",
    "re",
    "secrets",
    "shlex",
    "statistics",
    "string",
    "struct",
    "sys",
    "textwrap",
    "time",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "urllib.parse",
    "uuid",
    "warnings",
    "weakref",
    "zlib",
)
"""The only modules that an environment can import."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "fastapi": ("fastapi", "fastapi.openapi.utils", "pydantic.v1"),
    "pydantic": ("pydantic", "pydantic._internal._dataclasses"),
    "sqlalchemy": ("sqlalchemy.orm", "sqlalchemy.dialects.sqlite.pysqlite"),
    "sqlite3": ("sqlite3",),
}
"""Packages that a file can import if they are installed here and it has a line `PACKAGES = [...]` at its top level.

The listed modules are imported by the package on first use, which a confined process could not do.
"""
START = 30.0
"""Seconds to start the fork server, and to fork."""
SECONDS = 30.0
"""Seconds for a call, and for compiling the file.

Unless the machine is busy, a computing process reaches its limit of processor time (20 s) first.
"""
LAST = 5.0
"""Seconds that the last answer of an examination may take, however few are left: a busy machine may need them."""
TURN = 5.0
"""Seconds of work after which the shared process is replaced, so that it does not reach its limit of processor time."""
DEATHS: dict[int, str] = {
    signal.SIGKILL: "was killed from outside, perhaps for want of memory on this machine",
    signal.SIGXCPU: "used more than 20 s of processor time",
    signal.SIGSYS: "made a system call of another machine",
}


LINE = 1 << 20
"""Maximum number of bytes of a reply."""
DEPTH = 64
"""Maximum number of levels of lists and objects in a reply."""
LONGEST = 300
"""Maximum number of characters of an environment's text in a message."""


class Reply(TypedDict):
    """A reply of the fork server: to a fork or to a wait, or an error."""

    pid: int
    status: int
    error: NotRequired[str]


class Misbehaviour(Exception):
    """An environment misbehaved. The message continues a sentence about it, such as "raised ValueError: ..."."""


def one_line(text: str) -> str:
    """Return a text as one printable line of bounded length."""
    words = " ".join(text.split())
    plain = "".join(sign if sign.isprintable() else "?" for sign in words)
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}..."


def installed_packages() -> list[str]:
    """List the installed `PACKAGES`."""
    return [package for package in PACKAGES if find_spec(package) is not None]


def interpreter() -> tuple[str, list[Path]]:
    """Return the base interpreter of this virtual environment, without packages, and its folders outside of /usr."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    prefixes = {Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(sys.base_prefix).resolve()}
    return os.path.realpath(base), sorted(prefix for prefix in prefixes if not prefix.is_relative_to("/usr"))


def _bubble(folders: Sequence[Path]) -> list[str]:
    """Return a bubblewrap command in which only the interpreter is visible: no other files, network or processes."""
    command = "bwrap --unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
    command += " --new-session --cap-drop ALL --ro-bind /usr /usr --dev-bind /dev/null /dev/null"
    # The dynamic loader needs this file to find libraries in other folders.
    command += " --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache"
    arguments = command.split()
    for place in (Path("/lib"), Path("/lib64")):
        if place.is_symlink():
            arguments += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            arguments += ["--ro-bind", str(place), str(place)]
    for folder in (*folders, CONFINEMENT):
        arguments += ["--ro-bind", str(folder), str(folder)]
    return [*arguments, "--remount-ro", "/", "--chdir", "/", "--"]


class ForkServer:
    """The fork server of one environment, and its shared process for functions of a task.

    Args:
        source: text of the environment file.
        name: name of its module.
        layers: layers of confinement: "bubblewrap" for the server, all others for its processes.

    Raises:
        InfrastructureError: the server does not start.
        Misbehaviour: the file does not compile, or needs a package that is missing.
    """

    def __init__(self, source: bytes, name: str, layers: Sequence[str]) -> None:
        self._layers, self.end_reason = [layer for layer in layers if layer != "bubblewrap"], ""
        self._owner, self._handle = os.getpid(), -1
        self._lock, self._turn = threading.RLock(), threading.Lock()
        self._shared: Worker | None = None
        self._worked, self._received = 0.0, b""
        self.dropped: deque[int] = deque()
        """Processes to reap before the next fork. Garbage collection killed them, perhaps during a request."""
        # Use a regular expression, so that this process never parses the code.
        line = re.search(rb"(?m)^PACKAGES = \[([a-z0-9_\"', ]*)\]\s*$", source)
        packages = re.findall(r"\w+", line[1].decode()) if line else []
        if absent := [package for package in packages if package not in installed_packages()]:
            raise Misbehaviour(f"needs {', '.join(absent)}, which the sandbox does not have")
        modules = [*MODULES, *(module for package in packages for module in PACKAGES[package])]
        python, folders = interpreter()
        # Not -I, which ignores PYTHONHASHSEED. With no other variables the effect is the same.
        variables = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "TZ": "UTC"}
        variables |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
        if packages:
            folders.append(Path(get_paths()["purelib"]))
            variables["PYTHONPATH"] = str(folders[-1])
        self._control, remote = socket.socketpair()
        command = _bubble(folders) if "bubblewrap" in layers else []
        command += [python, "-P", "-s", "-S", "-B", str(CONFINEMENT / "server.py")]
        command += [str(remote.fileno()), name, str(SECONDS), " ".join(modules)]
        with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as words:
            text.write(source)
            text.seek(0)
            try:
                with remote:
                    self._process = subprocess.Popen(
                        command,
                        stdin=text,
                        stdout=subprocess.DEVNULL,
                        stderr=words,
                        env=variables,
                        cwd="/",
                        pass_fds=[remote.fileno()],
                        start_new_session=True,
                    )
                _, handles = self._answer(START)
            except (OSError, InfrastructureError) as fault:
                words.seek(0)
                lines = words.read().decode(errors="replace").split("\n")
                reason = next((line for line in reversed(lines) if line.strip()), str(fault))
                raise InfrastructureError(f"the sandbox does not start: {reason}") from None
        self._handle = handles[0] if handles else -1
        SERVERS.add(self)
        try:
            complaint = self._answer(SECONDS)[0].get("error")
        except InfrastructureError:
            raise Misbehaviour(f"ended the process that compiled it, or took it more than {SECONDS:g} s") from None
        if complaint:
            self.close()
            raise Misbehaviour(f"raised {one_line(complaint)}")

    def worker(self, layers: Sequence[str] | None = None) -> Worker:
        """Start a fresh confined process.

        Args:
            layers: its layers; None for those of the server.

        Raises:
            InfrastructureError: the machine has no process left, or the server is lost.
            UserError: this process has too many open files.
        """
        with suppress(IndexError):  # empty; other threads reap, too
            while True:
                self.reap(self.dropped.popleft())
        reply, handles = self._request({"op": "fork", "layers": self._layers if layers is None else [*layers]})
        if "error" in reply:
            raise InfrastructureError(f"the sandbox cannot fork: {reply['error']}")
        if len(handles) < 1 + (self._handle >= 0):
            for handle in handles:
                os.close(handle)
            self.reap(reply["pid"])
            raise UserError(
                "too many files are open for another process in the sandbox, which needs two",
                "raise the limit (`ulimit -n`), or play fewer episodes at once (machine.batch)",
            )
        return Worker("sandbox", ConfinedProcess(self, reply["pid"], *handles), LINE)

    def ask_shared(self, op: str, arguments: Mapping[str, object], allowance: "Allowance | None") -> object:
        """Ask the shared process, or a new one in its place; see `ask`."""
        with self._turn:
            worker = self._shared
            if worker is not None and (self._worked > TURN or worker.has_ended()):
                dismiss(worker)
                worker = None
            if worker is None:
                worker = self._shared = self.worker()
                self._worked = 0.0
            began = time.monotonic()
            try:
                return ask(worker, op, arguments, allowance)
            finally:
                self._worked += time.monotonic() - began

    def ask_fresh(
        self,
        op: str,
        arguments: Mapping[str, object],
        allowance: "Allowance | None",
        layers: Sequence[str] | None = None,
    ) -> Any:
        """Ask a fresh process once; see `ask` and `worker`."""
        worker = self.worker(layers)
        try:
            return ask(worker, op, arguments, allowance)
        finally:
            dismiss(worker)

    def reap(self, pid: int) -> int:
        """Wait for a process that is ending, and return its exit status."""
        return int(self._request({"op": "reap", "pid": pid})[0]["status"])

    def _request(self, request: Mapping[str, object]) -> tuple[Reply, list[int]]:
        """Send a request, and return the reply and its file descriptors."""
        with self._lock:
            if not self.end_reason:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._control.sendall(json.dumps(request).encode())
            return self._answer(START)

    def _answer(self, seconds: float) -> tuple[Reply, list[int]]:
        """Wait for one reply line. Return it with its file descriptors, or raise an InfrastructureError."""
        end, handles = time.monotonic() + seconds, list[int]()
        while not self.end_reason:
            line, newline, following = self._received.partition(b"\n")
            if newline:
                self._received = following
                return json.loads(line), handles
            poll, chunk = select.poll(), b""
            poll.register(self._control, select.POLLIN)
            if ready := poll.poll(max(0.0, end - time.monotonic()) * 1000):
                with suppress(ConnectionResetError):
                    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                    chunk, more, _, _ = socket.recv_fds(self._control, 1 << 14, 2, flags)
                    handles += more
            self._received += chunk
            if not chunk:
                self.end_reason = "died" if ready else f"did not answer within {seconds:g} s"
                self.close()
        raise InfrastructureError(f"the sandbox's fork server {self.end_reason}")

    def close(self) -> None:
        """End the server and its processes. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._control.fileno() < 0:
                return
            self.end_reason = self.end_reason or "was ended"
            self._control.close()
            # Kill the server and not bubblewrap, because bubblewrap ends with the server, but not the reverse.
            if self._handle >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                os.close(self._handle)
            else:
                self._process.kill()
            self._process.wait()
            self._shared = None  # breaks a reference cycle


SERVERS: "weakref.WeakSet[ForkServer]" = weakref.WeakSet()


def _forget_servers() -> None:
    """Close the inherited sockets in a forked child, so that each server still notices the end of its owner."""
    for server in [*SERVERS]:
        server.end_reason = "belongs to another process"
        server._control.close()


os.register_at_fork(after_in_child=_forget_servers)


def waited(handle: int) -> float:
    """Return the seconds that a process waited for a processor; 0 if the system does not report them."""
    with suppress(OSError, ValueError, IndexError):
        pid = Path(f"/proc/self/fdinfo/{handle}").read_text(encoding="utf-8").partition("Pid:")[2].split()[0]
        return _waited(pid)
    return 0.0


def waited_here() -> float:
    """Return the seconds that this thread waited for a processor; 0 if the system does not report them."""
    with suppress(OSError, ValueError, IndexError):
        return _waited("thread-self")
    return 0.0


def _waited(process: str) -> float:
    return int(Path(f"/proc/{process}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


class ConfinedProcess:
    """A process of the fork server (`captrain.benchmarks.worker.Process`).

    Args:
        server: its parent, which reaps it.
        pid: its id in the server's namespace.
        channel: socket for requests and replies.
        handle: pidfd; -1 if the system has none. Then the server has no namespace, and `pid` is valid here too.
    """

    def __init__(self, server: ForkServer, pid: int, channel: int, handle: int = -1) -> None:
        self.server, self.status = server, None
        self.waited = 0.0
        """Seconds that it waited for a processor. Set when it is killed."""
        self.owner, self._pid, self._handle = os.getpid(), pid, handle
        self._lock = threading.Lock()
        self.stdin: IO[bytes] | None = os.fdopen(channel, "r+b", buffering=0)
        self.stdout: IO[bytes] | None = self.stdin
        self.stderr: IO[bytes] | None = None

    def poll(self) -> int | None:
        """See `Process.poll`."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """See `Process.wait`; raises InfrastructureError if the server is lost."""
        with self._lock:
            if self.status is None:
                over = timeout is None
                if self._handle >= 0:
                    poll = select.poll()
                    poll.register(self._handle, select.POLLIN)
                    over = bool(poll.poll(None if timeout is None else timeout * 1000))
                if not over:
                    raise subprocess.TimeoutExpired(str(self._pid), timeout or 0.0)
                self.status = -int(signal.SIGKILL)
                if self._handle >= 0:
                    os.close(self._handle)
                self.status = self.server.reap(self._pid)
            return self.status

    def kill(self) -> None:
        """See `Process.kill`."""
        with self._lock, suppress(ProcessLookupError):
            if self.status is None and self._handle >= 0:
                self.waited = waited(self._handle)
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.status is None:
                os.kill(self._pid, signal.SIGKILL)

    terminate = kill

    def __del__(self) -> None:
        """Kill the process if it was not closed, unless this is a forked child of its owner."""
        if self.status is None:
            if os.getpid() == self.owner:
                self.kill()
                self.server.dropped.append(self._pid)
            if self._handle >= 0:
                os.close(self._handle)


def dismiss(worker: Worker) -> None:
    """End a process. Does nothing in a forked child."""
    child = worker.process
    assert isinstance(child, ConfinedProcess)
    if child.owner == os.getpid():
        with suppress(InfrastructureError):
            worker.end("was ended")
        with worker.lock:
            worker.close_pipes()


class Allowance:
    """Seconds that all answers of a file may take.

    Time in which its processes waited for a processor does not count, so that a busy machine does not fail an honest
    file. Nor does the time in which an answer was there, and captrain waited for a processor to read it.
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds


def ask(worker: Worker, op: str, arguments: Mapping[str, object], allowance: Allowance | None = None) -> Any:
    """Ask a process, and return its validated answer.

    JSON parsers accept values that cannot be written again: infinite numbers, lone surrogates, thousands of levels.
    They are refused here, so that no other code has to check for them.

    Args:
        worker: the process.
        op: the operation.
        arguments: of the operation.
        allowance: time that all answers share; None: only this answer is limited.

    Raises:
        Misbehaviour: it raised, or did not answer with JSON within the limits.
        InfrastructureError: the fork server is lost.
    """
    patience = SECONDS if allowance is None else min(SECONDS, max(LAST, allowance.left))
    if allowance is not None and allowance.left <= 0:
        raise Misbehaviour("used up the time of its examination (environments.seconds)")
    child = worker.process
    assert isinstance(child, ConfinedProcess)
    before, here, began = child.waited or waited(child._handle), waited_here(), time.monotonic()
    try:
        with worker.lock:
            reply = worker.exchange(op, arguments, patience)
    except InfrastructureError:
        if child.server.end_reason:
            raise InfrastructureError(f"the sandbox's fork server {child.server.end_reason}") from None
        reason, idle = worker.end_reason, child.waited - before
        if reason.startswith("did not answer") and idle > max(1.0, patience / 2):
            # The reason may be a busy machine, so the message says so.
            reason += f"; it waited {idle:.0f} s for a processor: run it again when this machine is less busy"
        raise Misbehaviour(DEATHS.get(-(child.status or 0), reason) if reason.startswith("died") else reason) from None
    finally:
        if allowance is not None:
            idle = max(0.0, (child.waited or waited(child._handle)) - before) + waited_here() - here
            allowance.left -= max(0.0, time.monotonic() - began - idle)
    if reply.error:
        kind, message = one_line(reply.error), one_line(reply.message)
        out = "ran out of memory (512 MiB)"
        raise Misbehaviour(out if kind == "MemoryError" else f"raised {kind}{': ' if message else ''}{message}")
    pending: list[tuple[object, int]] = [(reply.result, 0)]
    while pending:
        element, depth = pending.pop()
        if depth > DEPTH:
            raise Misbehaviour(f"returned more than {DEPTH} levels of lists and objects")
        if isinstance(element, dict):
            pending += [(part, depth + 1) for pair in element.items() for part in pair]
        elif isinstance(element, list):
            pending += [(part, depth + 1) for part in element]
        elif isinstance(element, float) and not math.isfinite(element):
            raise Misbehaviour(f"returned the number {element}, which is not JSON")
        elif isinstance(element, int) and element.bit_length() > 63:
            raise Misbehaviour("returned a number beyond 64 bits")
        elif isinstance(element, str) and not element.isascii():
            try:
                element.encode()
            except UnicodeEncodeError:
                raise Misbehaviour("returned text that is not Unicode") from None
    return reply.result
