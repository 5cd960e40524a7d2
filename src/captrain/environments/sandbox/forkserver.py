"""The fork server, seen from our side: how it is started, the processes that it hands over, and what these answer.

It runs `confinement/server.py` in the interpreter that this environment was made from, under bubblewrap where that
works, holds one environment, and never runs its code. It ends when our process does, however that ends, and takes its
own processes with it. A process of ours that was forked inherits it, but never uses it. What an environment file can
import is decided here, and how long anything may take. An answer is believed within bounds only; all else is a
`Misbehaviour` of the file.
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
from typing import IO, Any

from captrain.benchmarks import Worker
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject

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
"""All that an environment can import."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "fastapi": ("fastapi", "fastapi.openapi.utils", "pydantic.v1"),
    "pydantic": ("pydantic", "pydantic._internal._dataclasses"),
    "sqlalchemy": ("sqlalchemy.orm", "sqlalchemy.dialects.sqlite.pysqlite"),
    "sqlite3": ("sqlite3",),
}
"""Packages that a file can import besides, where they are installed beside this one, if it says so: `PACKAGES = [...]`,
names, at its top level. The modules are those that are imported when they are first used: no process could read them
then."""
START = 30.0
"""Seconds that the fork server may take to start, and to fork."""
SECONDS = 30.0
"""That a call, or compiling the file, may take. What computes is ended by its limit of processor time (20 s) before, on
a machine that is not busy; this is for what waits."""
TURN = 5.0
"""Seconds of work after which the process kept for functions of the task is replaced, long before its limit of
processor time could end it."""
DEATHS: dict[int, str] = {
    signal.SIGKILL: "was killed from outside, perhaps for want of memory on this machine",
    signal.SIGXCPU: "used more than 20 s of processor time",
    signal.SIGSYS: "made a system call of another machine",
}


LINE = 1 << 20
"""Bytes of a reply."""
DEPTH = 64
"""Levels of lists and objects in it."""
LONGEST = 300
"""Characters of what an environment says, in a message."""


class Misbehaviour(Exception):
    """Behaviour of an environment that did not answer as it should: "raised ValueError: ..."."""


def one_line(text: str) -> str:
    """Return what an environment says as a line of a message: printable, without breaks, of bounded length."""
    words = " ".join(text.split())
    plain = "".join(sign if sign.isprintable() else "?" for sign in words)
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}..."


def installed_packages() -> list[str]:
    """List those of `PACKAGES` that there are."""
    return [package for package in PACKAGES if find_spec(package) is not None]


def interpreter() -> tuple[str, list[Path]]:
    """Find the interpreter that this environment was made from, which has no package of ours, and the folders that it
    needs beside /usr."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    prefixes = {Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(sys.base_prefix).resolve()}
    return os.path.realpath(base), sorted(prefix for prefix in prefixes if not prefix.is_relative_to("/usr"))


def _bubble(folders: Sequence[Path]) -> list[str]:
    """Make a command that shows the next one nothing but the interpreter: no network, and no process but its own."""
    command = "bwrap --unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
    command += " --new-session --cap-drop ALL --ro-bind /usr /usr --dev-bind /dev/null /dev/null"
    # Where the loader finds libraries that lie in no folder of its own.
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
    """The fork server of one environment in one process of ours, and the process that is kept for functions of a task.

    Args:
        source: text of the environment file.
        name: of its module.
        layers: of confinement: "bubblewrap" for the server, all others for its processes.

    Raises:
        InfrastructureError: it does not start.
        Misbehaviour: the file does not compile, or needs a package that is not there.
    """

    def __init__(self, source: bytes, name: str, layers: Sequence[str]) -> None:
        self._layers, self.end_reason = [layer for layer in layers if layer != "bubblewrap"], ""
        self._owner, self._handle = os.getpid(), -1
        self._lock, self._turn = threading.RLock(), threading.Lock()
        self._shared: Worker | None = None
        self._worked, self._received = 0.0, b""
        self.dropped: deque[int] = deque()
        """Processes that ended with their last reference. They are reaped at the next opportunity: a garbage collection
        may take that reference amid a request."""
        # Only a line of this form asks for packages, so that this process parses no code.
        line = re.search(rb"(?m)^PACKAGES = \[([a-z0-9_\"', ]*)\]\s*$", source)
        packages = re.findall(r"\w+", line[1].decode()) if line else []
        if absent := [package for package in packages if package not in installed_packages()]:
            raise Misbehaviour(f"needs {', '.join(absent)}, which the sandbox does not have")
        modules = [*MODULES, *(module for package in packages for module in PACKAGES[package])]
        python, folders = interpreter()
        # Not -I, which would have the seed of hashes ignored; with nothing else in its environment it is the same.
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
            complaint = self._answer(SECONDS)[0]["error"]
        except InfrastructureError:
            raise Misbehaviour(f"ended the process that compiled it, or took it more than {SECONDS:g} s") from None
        if complaint:
            self.close()
            raise Misbehaviour(f"raised {one_line(complaint)}")

    def worker(self, layers: Sequence[str] | None = None) -> Worker:
        """Start a fresh process with the layers of confinement, or with those that are named.

        Raises:
            InfrastructureError: the machine has no process to give, or the server is lost.
            UserError: this process has too many files open.
        """
        with suppress(IndexError):  # of an empty one, which other threads empty, too
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
                "too many files are open for one more process in the sandbox, which takes two",
                "raise the limit (`ulimit -n`), or play fewer episodes at once (machine.batch)",
            )
        return Worker("sandbox", ConfinedProcess(self, reply["pid"], *handles), LINE)

    def ask_shared(self, op: str, arguments: Mapping[str, object], end: float | None) -> object:
        """Ask the process that is kept, or the next one; returns and raises as `ask`."""
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
                return ask(worker, op, arguments, end)
            finally:
                self._worked += time.monotonic() - began

    def ask_fresh(
        self, op: str, arguments: Mapping[str, object], end: float | None, layers: Sequence[str] | None = None
    ) -> Any:
        """Ask a fresh process, once; returns and raises as `ask` and `worker`."""
        worker = self.worker(layers)
        try:
            return ask(worker, op, arguments, end)
        finally:
            dismiss(worker)

    def reap(self, pid: int) -> int:
        """Return the exit status of a process that has ended, or is about to."""
        return int(self._request({"op": "reap", "pid": pid})[0]["status"])

    def _request(self, request: Mapping[str, object]) -> tuple[JsonObject, list[int]]:
        """Return the reply to a request, with the descriptors that came along."""
        with self._lock:
            if not self.end_reason:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._control.sendall(json.dumps(request).encode())
            return self._answer(START)

    def _answer(self, seconds: float) -> tuple[JsonObject, list[int]]:
        """Wait for a reply, which is a line: what is read at once may hold less, or the next one as well; raises
        InfrastructureError if there is none."""
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
        """End it, and all its processes; nothing happens in a process that has inherited it."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._control.fileno() < 0:
                return
            self.end_reason = self.end_reason or "was ended"
            self._control.close()
            # Its end is bubblewrap's end; it would survive that of bubblewrap.
            if self._handle >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                os.close(self._handle)
            else:
                self._process.kill()
            self._process.wait()
            self._shared = None  # it knows this server, too: neither would go before a garbage collection


SERVERS: "weakref.WeakSet[ForkServer]" = weakref.WeakSet()


def _forget_servers() -> None:
    """Let go of what was inherited, so that a server still sees the end of its own process of ours."""
    for server in [*SERVERS]:
        server.end_reason = "belongs to another process"
        server._control.close()


os.register_at_fork(after_in_child=_forget_servers)


def waited(handle: int) -> float:
    """Tell for how many seconds of its life a process was ready to run and had no processor; 0 where the system does
    not tell."""
    with suppress(OSError, ValueError, IndexError):
        pid = Path(f"/proc/self/fdinfo/{handle}").read_text().partition("Pid:")[2].split()[0]
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class ConfinedProcess:
    """A process that the fork server started, as `captrain.benchmarks.worker.Process`.

    Args:
        server: its parent, which knows how it ended.
        pid: as the server counts.
        channel: socket for requests and replies.
        handle: of the process; -1 where the system has none, and the server's process ids are ours.
    """

    def __init__(self, server: ForkServer, pid: int, channel: int, handle: int = -1) -> None:
        self.server, self.status = server, None
        self.waited = 0.0
        """See `waited`; of one that was ended from here."""
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
        """See `Process.wait`; raises InfrastructureError, too, if the server is lost and does not tell."""
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
        """End an episode that nobody closes with its last reference, but not that of a process of ours which has merely
        inherited it."""
        if self.status is None:
            if os.getpid() == self.owner:
                self.kill()
                self.server.dropped.append(self._pid)
            if self._handle >= 0:
                os.close(self._handle)


def dismiss(worker: Worker) -> None:
    """End a process that nobody needs any more; nothing happens in a process of ours that has inherited it."""
    child = worker.process
    assert isinstance(child, ConfinedProcess)
    if child.owner == os.getpid():
        with suppress(InfrastructureError):
            worker.end("was ended")
        with worker.lock:
            worker.close_pipes()


def ask(worker: Worker, op: str, arguments: Mapping[str, object], end: float | None = None) -> Any:
    """Ask a process for an answer, and return it as far as any answer can be believed.

    JSON readers take more than JSON, and more than can be written again: numbers that are not finite, halves of
    characters, thousands of levels. What has passed here, nothing of ours can stumble over.

    Args:
        worker: the process.
        op: what is asked of it.
        arguments: of the operation.
        end: of `time.monotonic`, beyond which no answer is waited for, however long one alone may take.

    Raises:
        Misbehaviour: it raised, did not answer, or not with JSON within bounds.
        InfrastructureError: the fork server is lost.
    """
    patience = SECONDS if end is None else min(SECONDS, end - time.monotonic())
    if patience <= 0:
        raise Misbehaviour("took as long as it may in all")
    child = worker.process
    assert isinstance(child, ConfinedProcess)
    before = child.waited or waited(child._handle)
    try:
        with worker.lock:
            reply = worker.exchange(op, arguments, patience)
    except InfrastructureError:
        if child.server.end_reason:
            raise InfrastructureError(f"the sandbox's fork server {child.server.end_reason}") from None
        reason, idle = worker.end_reason, child.waited - before
        if reason.startswith("did not answer") and idle > max(1.0, patience / 2):
            # Whose fault that is, nobody can tell; the verdict stays, and says so.
            reason += f"; it waited {idle:.0f} s for a processor: run again when this machine has less to do"
        raise Misbehaviour(DEATHS.get(-(child.status or 0), reason) if reason.startswith("died") else reason) from None
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
