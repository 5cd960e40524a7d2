"""The host of an environment file: its fork server, the processes that this gives, and what they answer.

What the file can import is decided here, and how long anything may take. An answer is believed within bounds only;
all else is a `Verdict` on the file.
"""

import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_paths
from typing import Any

from captrain.benchmarks import Worker
from captrain.environments.sandbox.forkserver import ConfinedProcess, ForkServer, dismiss
from captrain.environments.sandbox.replies import Misbehaviour, bounded, one_line
from captrain.errors import InfrastructureError

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


def start_server(source: bytes, name: str, bubblewrap: bool) -> ForkServer:
    """A fork server with an environment.

    Raises:
        InfrastructureError: it does not start.
        Verdict: the file does not compile.
    """
    packages = required_packages(source)
    if absent := [package for package in packages if package not in installed_packages()]:
        raise Misbehaviour(f"needs {', '.join(absent)}, which the sandbox does not have")
    modules = [*MODULES, *(module for package in packages for module in PACKAGES[package])]
    server = ForkServer(source, name, modules, bubblewrap, Path(get_paths()["purelib"]) if packages else None)
    try:
        complaint = server.compile(SECONDS)
    except InfrastructureError:
        raise Misbehaviour(f"ended the process that compiled it, or took it more than {SECONDS:g} s") from None
    if complaint:
        server.close()
        raise Misbehaviour(f"raised {one_line(complaint)}")
    return server


def installed_packages() -> list[str]:
    """Those of `PACKAGES` that there are."""
    return [package for package in PACKAGES if find_spec(package) is not None]


def required_packages(source: bytes) -> list[str]:
    """The packages that a file says it needs. Only a line of this form counts, so that this process parses no code."""
    line = re.search(rb"(?m)^PACKAGES = \[([a-z0-9_\"', ]*)\]\s*$", source)
    return re.findall(r"\w+", line[1].decode()) if line else []


class Host:
    """The fork server of one environment in one process of ours, and the process kept for functions of the task.

    Raises:
        InfrastructureError: the fork server does not start.
        Verdict: the file does not compile.
    """

    def __init__(self, path: Path, source: bytes, layers: Sequence[str]) -> None:
        self._layers = [layer for layer in layers if layer != "bubblewrap"]
        self._worker: Worker | None = None
        self._worked = 0.0
        self._lock = threading.Lock()
        name = "captrain_environment_" + "".join(sign if sign.isalnum() else "_" for sign in path.stem)
        self.server = start_server(source, name, "bubblewrap" in layers)

    def fresh(self) -> Worker:
        """A process that nobody has used."""
        return self.server.worker(self._layers)

    def ask_shared(self, op: str, arguments: Mapping[str, object], end: float | None = None) -> object:
        """Ask the process that is kept, or the next one; returns and raises as `ask`."""
        with self._lock:
            if self._worker is not None and (self._worked > TURN or self._worker.has_ended()):
                dismiss(self._worker)
                self._worker = None
            if self._worker is None:
                self._worker, self._worked = self.fresh(), 0.0
            began = time.monotonic()
            try:
                return ask(self._worker, op, arguments, end)
            finally:
                self._worked += time.monotonic() - began

    def ask_fresh(self, op: str, arguments: Mapping[str, object], end: float | None = None) -> Any:
        """Ask a fresh process, once; returns and raises as `ask`."""
        worker = self.fresh()
        try:
            return ask(worker, op, arguments, end)
        finally:
            dismiss(worker)


def ask(worker: Worker, op: str, arguments: Mapping[str, object], end: float | None = None) -> Any:
    """Ask a process for an answer, and return it as far as any answer can be believed.

    Args:
        worker: the process.
        op: what is asked of it.
        arguments: of the operation.
        end: of `time.monotonic`, beyond which no answer is waited for, however long one alone may take.

    Raises:
        Verdict: it raised, did not answer, or not with JSON within bounds.
        InfrastructureError: the fork server is lost.
    """
    patience = SECONDS if end is None else min(SECONDS, end - time.monotonic())
    if patience <= 0:
        raise Misbehaviour("took as long as it may in all")
    try:
        with worker.lock:
            reply = worker.exchange(op, arguments, patience)
    except InfrastructureError:
        child = worker.process
        assert isinstance(child, ConfinedProcess)
        if child.server.end_reason:
            raise InfrastructureError(f"the sandbox's fork server {child.server.end_reason}") from None
        reason = worker.end_reason
        if reason.startswith("did not answer") and child.waited > patience / 2:
            # Whose fault that is, nobody can tell; the verdict stays, and says so.
            reason += f"; it waited {child.waited:.0f} s for a processor: run again when this machine has less to do"
        raise Misbehaviour(DEATHS.get(-(child.status or 0), reason) if reason.startswith("died") else reason) from None
    if not reply["ok"]:
        kind, message = one_line(reply["error"]["type"]), one_line(reply["error"]["message"])
        out = "ran out of memory (512 MiB)"
        raise Misbehaviour(out if kind == "MemoryError" else f"raised {kind}{': ' if message else ''}{message}")
    return bounded(reply["result"])
