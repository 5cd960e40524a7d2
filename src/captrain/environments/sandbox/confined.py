"""The sandbox: environments that nobody has vouched for, run in processes that can reach nothing.

Our process never runs their code. A fork server (`captrain.environments.sandbox`) compiles the file and forks a
confined process for every episode, another one for every score, and one that is kept for what is a function of the
task alone. So a score is computed from what was recorded here, in a process that the episode has never touched.
Unseeded draws of `random`, and hashes of strings, are alike in all of them.

What comes back is believed as little as any input (`captrain.environments.sandbox`). Whatever goes wrong in there is an
`EnvironmentFault` that says what, and the next process is a fresh one. Not protected: errors of the kernel, timing,
memory over all episodes together, and an environment that scores dishonestly, which is the passport's work.
"""

import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, get_args

from captrain.benchmarks import Worker
from captrain.contract import Target, file_fingerprint
from captrain.environments.sandbox.forkserver import ForkServer, dismiss
from captrain.environments.sandbox.host import SECONDS, Host, ask, start_server
from captrain.environments.sandbox.replies import Misbehaviour, messages_of, one_line, preview, text_of, tools_of
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import JsonObject, Message, read_bytes

Level = Literal["none", "basic", "strong, one layer", "strong"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the weakest to the strongest. strong: nothing that was tried got out, and two layers hold it; one layer: seccomp
alone does; basic: limits of memory and time, in a process of its own."""
LAYERS = ("bubblewrap", "rlimits", "landlock", "seccomp")
SLICE = 64
"""Tasks in a reply."""
REFERENCES = 4096
"""Reference solutions that are kept."""
SHAPES: dict[str, Callable[[object], object]] = {"idle": messages_of, "broken": messages_of, "hint": text_of}
"""Functions of the task that a file may define."""


@dataclass(frozen=True)
class Confinement:
    """Confinement of environments on this machine, as found out by a confined process that tried to get out."""

    level: Level
    layers: tuple[str, ...]
    blocked: Mapping[str, bool]

    def __str__(self) -> str:
        exposed = [name for name, is_blocked in self.blocked.items() if not is_blocked]
        applied = ", ".join(self.layers) or "no layer"
        return f"{self.level} ({applied}{'; exposed: ' if exposed else ''}{', '.join(exposed)})"


@cache
def active_confinement(layers: tuple[str, ...] = LAYERS) -> Confinement:
    """Find out, once, what confinement there is, by trying each layer, and what it blocks.

    Args:
        layers: those to try, for tests; the default is all.

    Raises:
        UserError: not even a process of its own.
    """
    server = _bare_server(layers)
    try:
        applied = tuple(
            layer for layer in layers if layer != "bubblewrap" and _try_layers(server, [layer], "hello") is not None
        )
        blocked = (_try_layers(server, applied, "probe") or {}).get("result", {})
    finally:
        server.close()
    outer = ("bubblewrap",) if server.bubblewrap else ()
    level: Level = "basic" if "rlimits" in applied else "none"
    if level == "basic" and "seccomp" in applied and blocked and all(blocked.values()):
        level = "strong" if outer or "landlock" in applied else "strong, one layer"
    return Confinement(level, (*outer, *applied), blocked)


def _bare_server(layers: Sequence[str]) -> ForkServer:
    """A fork server without an environment, under bubblewrap if that is there and works."""
    if "bubblewrap" in layers and shutil.which("bwrap"):
        try:
            return start_server(b"", "probe", bubblewrap=True)
        except InfrastructureError:
            pass
    try:
        return start_server(b"", "probe", bubblewrap=False)
    except InfrastructureError as fault:
        remedy = "see whether the interpreter that this environment was made from still runs"
        raise UserError(str(fault), remedy) from None


def _try_layers(server: ForkServer, layers: Sequence[str], op: str) -> JsonObject | None:
    """The reply of a process with these layers, None where they are not to be had; `hello` is none of its operations,
    and refused."""
    worker = server.worker(layers)
    try:
        with worker.lock:
            return worker.exchange(op, {}, SECONDS)
    except InfrastructureError:
        return None
    finally:
        dismiss(worker)


def load_confined(path: Path, least: Level, layers: tuple[str, ...] = LAYERS, *, source: bytes | None = None) -> Target:
    """An environment file in the sandbox; otherwise as `captrain.contract.load_file` gives it.

    Args:
        path: of the file.
        least: level of confinement that there must be; the strongest that is to be had is used.
        layers: those to use, for tests; the default is all.
        source: its bytes, where somebody has read them; None: they are read now.

    Raises:
        UserError: the file is missing, or the confinement is weaker than that.
        EnvironmentFault: the file does not load, or defines no Environment of the contract.
    """
    source = read_bytes(path, "run `dvc repro environments` to write it again") if source is None else source
    activity = active_confinement(layers)
    if LEVELS.index(activity.level) < LEVELS.index(least):
        raise UserError(
            f"{path} may run in a sandbox of level `{least}` only, and here it is {activity}",
            "run on Linux 5.13 or later, outside of a container that forbids Landlock and seccomp; or, where what is "
            f"exposed may be exposed, set machine.sandbox (--sandbox) to `{activity.level}`",
        )
    return Target(ConfinedEnvironment(path, source, activity.layers), str(path), file_fingerprint(path.stem, source))


class ConfinedEnvironment:
    """An environment in the sandbox, as `captrain.contract.Environment`. `about`, `size`, `idle`, `broken`, `hint` and
    the `key` of `open` are there if the file has them.

    Args:
        path: of the file.
        source: its bytes.
        layers: of confinement.

    Raises:
        EnvironmentFault: the file does not load, or defines no Environment of the contract.
    """

    name: str
    tools: list[JsonObject]
    about: JsonObject
    size: Callable[[str], int | None]
    idle: Callable[[JsonObject], list[Message]]
    broken: Callable[[JsonObject], list[Message]]
    hint: Callable[[JsonObject], str]
    open: "Callable[..., ConfinedEpisode]"

    def __init__(self, path: Path, source: bytes, layers: Sequence[str]) -> None:
        self._path, self._source, self._layers = path, source, layers
        self.end: float | None = None
        """Time of `time.monotonic` beyond which nothing is answered any more; None: only each answer has its limit."""
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._host: Host | None = None
        self._references: dict[str, str] = {}
        self._optional: list[str] = []
        try:
            self._describe(self._host_of_process().ask_shared("describe", {}))
        except BaseException as fault:
            if self._host is not None:
                self._host.server.close()
            if not isinstance(fault, Misbehaviour):
                raise
            raise EnvironmentFault(
                f"environment file {path} does not load: it {fault}",
                "mend the file, or delete it and run `dvc repro environments`",
            ) from None

    def _describe(self, description: object) -> None:
        """Take over what the file defines."""
        match description:
            case {"missing": [*missing]} if missing:
                raise EnvironmentFault(
                    f"environment file {self._path} lacks {one_line(', '.join(map(str, missing)))}",
                    "fulfil captrain.contract",
                )
            case {"name": str(name), "tools": tools, "optional": [*optional], "keyed": bool(keyed), "about": about}:
                self.name, self.tools = one_line(name), tools_of(tools)
            case unexpected:
                raise Misbehaviour(f"describes itself as {preview(unexpected)}")
        if not isinstance(about, dict):
            raise Misbehaviour(f"says of itself what is not an object: {preview(about)}")
        self._optional = [candidate for candidate in ("about", "size", *SHAPES) if candidate in optional]
        self._about, self._keyed = about, keyed

    def __getattr__(self, name: str) -> object:
        # Made when asked for: kept, they would keep this object, and its processes, until a garbage collection.
        if name == "open":
            return self._open_keyed if self._keyed else self._open
        if name != "_optional" and name in self._optional:
            functions = {"about": self._about, "size": self._size}
            return functions[name] if name in functions else partial(self._function, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """See `captrain.contract.Environment.tasks`."""
        with self.attributing_faults("tasks", f"split {split}"):
            tasks: list[JsonObject] = []
            for start in range(0, count + 1, SLICE):
                arguments = {"split": split, "count": count, "start": start, "stop": start + SLICE}
                batch = self._host_of_process().ask_shared("tasks", arguments, self.end)
                if not isinstance(batch, list):
                    raise Misbehaviour(f"returned what is not a list of tasks ({preview(batch)})")
                tasks += batch
                if len(batch) < SLICE:
                    break
            return tasks

    def score(self, task: JsonObject, messages: Sequence[Message]) -> JsonObject:
        """See `captrain.contract.Environment.score`; in a process of its own."""
        with self.attributing_faults("score", task["id"]):
            arguments = {"name": "score", "arguments": [task, list(messages)]}
            return self._host_of_process().ask_fresh("call", arguments, self.end)

    def reference(self, task: JsonObject) -> list[Message]:
        """See `captrain.contract.Environment.reference`; the file is asked once a task."""
        key = json.dumps(task, sort_keys=True)
        text = self._references.get(key)
        if text is None:
            text = json.dumps(self._function("reference", task))
            if len(self._references) >= REFERENCES:
                self._references.clear()
            self._references[key] = text
        return json.loads(text)

    def _open(self, task: JsonObject) -> "ConfinedEpisode":
        return self._start_episode(task, {})

    def _open_keyed(self, task: JsonObject, key: str) -> "ConfinedEpisode":
        return self._start_episode(task, {"key": key})

    def _start_episode(self, task: JsonObject, more: dict[str, str]) -> "ConfinedEpisode":
        with self.attributing_faults("open", task["id"]):
            return ConfinedEpisode(self, self._host_of_process().fresh(), task, more)

    def _function(self, name: str, task: JsonObject) -> object:
        shape = SHAPES.get(name, messages_of)
        with self.attributing_faults(name, task["id"]):
            return shape(self._host_of_process().ask_shared("call", {"name": name, "arguments": [task]}, self.end))

    def _size(self, split: str) -> int | None:
        with self.attributing_faults("size", f"split {split}"):
            size = self._host_of_process().ask_shared("call", {"name": "size", "arguments": [split]}, self.end)
            if size is None or (type(size) is int and size >= 0):
                return size
            raise Misbehaviour(f"returned what is no number of tasks ({preview(size)})")

    def _host_of_process(self) -> Host:
        """The host in this process of ours: another one if it was lost, or is our parent's."""
        if self._owner != os.getpid():
            # A thread that this process does not have may hold the lock.
            self._lock, self._owner, self._host = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._host is None or self._host.server.end_reason:
                self._host = Host(self._path, self._source, self._layers)
                weakref.finalize(self, self._host.server.close)
            return self._host

    @contextmanager
    def attributing_faults(self, operation: str, item: str) -> Iterator[None]:
        """Make a verdict a fault of this environment, in the words of `captrain.contract.Target`."""
        try:
            yield
        except Misbehaviour as verdict:
            raise EnvironmentFault(
                f"environment {self.name} ({self._path}) {verdict} in {operation} on {item}",
                "mend the environment file; rollouts already whole are kept and a new run goes on from them",
            ) from None


class ConfinedEpisode:
    """An episode in a process of its own, as `captrain.contract.Episode`."""

    def __init__(
        self, environment: ConfinedEnvironment, worker: Worker, task: JsonObject, more: dict[str, str]
    ) -> None:
        self._environment, self._worker, self._task = environment, worker, task["id"]
        try:
            match ask(worker, "open", {"task": task, "more": more}, environment.end):
                case {"messages": messages, "tools": tools}:
                    self.messages = messages_of(messages)
                    self.tools = None if tools is None else tools_of(tools)
                case unexpected:
                    raise Misbehaviour(f"returned what is not an episode ({preview(unexpected)})")
        except BaseException:
            self.close()
            raise

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `captrain.contract.Episode.step`."""
        with self._environment.attributing_faults("step", self._task):
            match ask(self._worker, "step", {"message": message}, self._environment.end):
                case [replies, bool(is_over)]:
                    return messages_of(replies), is_over
                case unexpected:
                    raise Misbehaviour(f"returned what is not messages and whether it is over ({preview(unexpected)})")

    def close(self) -> None:
        """End its process."""
        dismiss(self._worker)
