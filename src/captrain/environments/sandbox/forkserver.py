"""The fork server, seen from our side: how it is started, and the processes that it hands over.

It runs `confinement/server.py` in the interpreter that this environment was made from, under bubblewrap where that
works, holds one environment, and never runs its code. It ends when our process does, however that ends, and takes its
own processes with it. A process of ours that was forked inherits it, but never uses it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from captrain.benchmarks import Worker
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject

CONFINEMENT = Path(__file__).parent / "confinement"
START = 30.0
"""Seconds that the fork server may take to start, and to fork."""
LINE = 1 << 20
"""Bytes of a reply of its processes."""


def interpreter() -> tuple[str, list[Path]]:
    """The interpreter that this environment was made from, which has no package of ours, and the folders that it needs
    beside /usr."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    prefixes = {Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(sys.base_prefix).resolve()}
    return os.path.realpath(base), sorted(prefix for prefix in prefixes if not prefix.is_relative_to("/usr"))


def _bubble(folders: Sequence[Path]) -> list[str]:
    """A command that shows the next one nothing but the interpreter: no network, and no process but its own."""
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
    """A fork server of this process.

    Args:
        source: text of the environment file.
        name: of its module.
        modules: all that it can import.
        bubblewrap: whether to start it under bubblewrap.
        packages: folder that modules beyond the standard library are imported from; None for none.

    Raises:
        InfrastructureError: it does not start.
    """

    def __init__(
        self, source: bytes, name: str, modules: Sequence[str], bubblewrap: bool, packages: Path | None = None
    ) -> None:
        self.bubblewrap, self.end_reason = bubblewrap, ""
        self._owner, self._handle = os.getpid(), -1
        self._lock = threading.RLock()
        self._dropped: deque[int] = deque()
        python, folders = interpreter()
        folders += [packages] if packages else []
        self._control, remote = socket.socketpair()
        # Not -I, which would have the seed of hashes ignored; with nothing else in its environment it is the same.
        variables = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "TZ": "UTC"}
        variables |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
        variables |= {"PYTHONPATH": str(packages)} if packages else {}
        command = _bubble(folders) if bubblewrap else []
        command += [python, "-P", "-s", "-S", "-B", str(CONFINEMENT / "server.py")]
        command += [str(remote.fileno()), name, " ".join(modules)]
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

    def compile(self, seconds: float) -> str:
        """Compile the file; returns what is wrong with it, or "".

        Raises:
            InfrastructureError: the server did not survive it, or takes longer than that.
        """
        return str(self._request({"op": "compile", "seconds": seconds}, seconds)[0]["error"])

    def worker(self, layers: Sequence[str]) -> Worker:
        """A fresh process with these layers of confinement.

        Raises:
            InfrastructureError: the machine has no process to give, or the server is lost.
            UserError: this process has too many files open.
        """
        while self._dropped:
            self.reap(self._dropped.popleft())
        reply, handles = self._request({"op": "fork", "layers": [*layers]}, START)
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

    def reap(self, pid: int) -> int:
        """The exit status of a process that has ended, or is about to."""
        return int(self._request({"op": "reap", "pid": pid}, START)[0]["status"])

    def drop(self, pid: int) -> None:
        """Reap a process that is about to end at the next opportunity: this is called by garbage collections, which
        may come amid a request."""
        self._dropped.append(pid)

    def _request(self, request: Mapping[str, object], seconds: float) -> tuple[JsonObject, list[int]]:
        """The reply to a request, with the descriptors that came along; raises InfrastructureError if there is none."""
        with self._lock:
            if not self.end_reason:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._control.sendall(json.dumps(request).encode())
            return self._answer(seconds)

    def _answer(self, seconds: float) -> tuple[JsonObject, list[int]]:
        if not self.end_reason:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            line, handles = b"", []
            if ready := poll.poll(seconds * 1000):
                with suppress(ConnectionResetError):
                    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                    line, handles, _, _ = socket.recv_fds(self._control, 1 << 14, 2, flags)
            if line:
                return json.loads(line), handles
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

    def forget(self) -> None:
        """Let go of what was inherited, so that the server still sees the end of its own process of ours."""
        self.end_reason = "belongs to another process"
        self._control.close()


SERVERS: "weakref.WeakSet[ForkServer]" = weakref.WeakSet()


def _forget_servers() -> None:
    for server in [*SERVERS]:
        server.forget()


os.register_at_fork(after_in_child=_forget_servers)


def waited(handle: int = -1) -> float:
    """Seconds that a process, or this one, was ready to run and had no processor; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        pid = "self"
        if handle >= 0:
            lines = Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines()
            pid = next((line.split()[1] for line in lines if line.startswith("Pid:")), "")
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
                if self._handle < 0:
                    over = timeout is None
                else:
                    poll = select.poll()
                    poll.register(self._handle, select.POLLIN)
                    over = bool(poll.poll(None if timeout is None else timeout * 1000))
                if not over:
                    raise subprocess.TimeoutExpired(str(self._pid), timeout or 0.0)
                self.status = -int(signal.SIGKILL)
                self._release()
                self.status = self.server.reap(self._pid)
            return self.status

    def kill(self) -> None:
        """See `Process.kill`."""
        with self._lock:
            if self.status is None:
                self.waited = waited(self._handle)
                self._kill()

    terminate = kill

    def _kill(self) -> None:
        if self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        else:
            os.kill(self._pid, signal.SIGKILL)

    def _release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def __del__(self) -> None:
        """An episode that nobody closes ends with its last reference, but not with that of a process which has merely
        inherited it."""
        if self.status is None:
            if os.getpid() == self.owner:
                self._kill()
                self.server.drop(self._pid)
            self._release()


def dismiss(worker: Worker) -> None:
    """End a process that nobody needs any more; nothing happens in a process of ours that has inherited it."""
    child = worker.process
    assert isinstance(child, ConfinedProcess)
    if child.owner == os.getpid():
        with suppress(InfrastructureError):
            worker.end("was ended")
        with worker.lock:
            worker.close_pipes()
