"""The sandbox: environments that nobody has vouched for, run in processes that can reach nothing.

Our process never runs their code. A fork server (`forkserver`) compiles the file and forks a confined process for every
episode, another one for every score, and one that is kept for what is a function of the task alone. So a score is
computed from what was recorded here, in a process that the episode has never touched. Unseeded draws of `random`, and
hashes of strings, are alike in all of them.

What comes back is believed as little as any input. Whatever goes wrong in there is an `EnvironmentFault` that says
what, and the next process is a fresh one. Not protected: errors of the kernel, timing, memory over all episodes
together, and an environment that scores dishonestly, which is the passport's work.
"""

import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from captrain.contract import CheckedEnvironment, file_fingerprint
from captrain.environments.sandbox.forkserver import ForkServer, Misbehaviour, ask, dismiss, one_line
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import JsonObject, Message, read_bytes

T = TypeVar("T")

Level = Literal["none", "basic", "strong, one layer", "strong"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the weakest to the strongest. strong: nothing that was tried got out, and two layers hold it; one layer: seccomp
alone does; basic: limits of memory and time, in a process of its own."""
LAYERS = ("bubblewrap", "rlimits", "landlock", "seccomp")
SLICE = 64
"""Tasks in a reply."""
REFERENCES, CHARACTERS = 4096, 1 << 26
"""Reference solutions that are kept, and what they and their tasks may take together."""


class _Function(BaseModel):
    name: str


class _Call(_Function):
    arguments: JsonObject | str


class _ToolCall(BaseModel):
    function: _Call


class ChatMessage(BaseModel, frozen=True):
    """A message, in the shape that all of our code counts on."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Tool(BaseModel):
    function: _Function


MESSAGES = TypeAdapter(list[ChatMessage])
TOOLS = TypeAdapter(list[_Tool])
FUNCTIONS: dict[str, tuple[TypeAdapter[Any], str]] = {
    "reference": (MESSAGES, "a list of messages"),
    "idle": (MESSAGES, "a list of messages"),
    "broken": (MESSAGES, "a list of messages"),
    "hint": (TypeAdapter(str), "text"),
}
"""Functions of the task, with the shape of what they return. All but the first are there if a file defines them."""


def _preview(value: object) -> str:
    return one_line(json.dumps(value))


def _shaped(value: T, shape: TypeAdapter[Any], expected: str) -> T:
    """Return a value in the shape that all of our code counts on, as it came."""
    try:
        shape.validate_python(value, strict=True)
    except ValidationError:
        raise Misbehaviour(f"returned what is not {expected} ({_preview(value)})") from None
    return value


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
    server, outer = None, ()
    if "bubblewrap" in layers and shutil.which("bwrap"):
        with suppress(InfrastructureError):  # it is there, and in many containers does not work
            server, outer = ForkServer(b"", "probe", ["bubblewrap"]), ("bubblewrap",)
    try:
        server = server or ForkServer(b"", "probe", [])
    except InfrastructureError as fault:
        remedy = "see whether the interpreter that this environment was made from still runs"
        raise UserError(str(fault), remedy) from None
    applied: tuple[str, ...] = ()
    blocked: dict[str, bool] = {}
    try:
        for layer in layers:
            with suppress(Misbehaviour):  # a process that cannot have its layers ends
                if layer != "bubblewrap":
                    server.ask_fresh("hello", {}, None, [layer])
                    applied += (layer,)
        with suppress(Misbehaviour):
            blocked = server.ask_fresh("probe", {}, None, applied)
    finally:
        server.close()
    level: Level = "basic" if "rlimits" in applied else "none"
    if level == "basic" and "seccomp" in applied and blocked and all(blocked.values()):
        level = "strong" if outer or "landlock" in applied else "strong, one layer"
    return Confinement(level, (*outer, *applied), blocked)


def load_confined(
    path: Path, least: Level, layers: tuple[str, ...] = LAYERS, *, source: bytes | None = None
) -> CheckedEnvironment:
    """Load an environment file in the sandbox; otherwise as `captrain.contract.load_file` gives it.

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
    return CheckedEnvironment(
        ConfinedEnvironment(path, source, activity.layers), str(path), file_fingerprint(path.stem, source)
    )


class ConfinedEnvironment:
    """An environment in the sandbox, as `captrain.contract.Environment`. `idle`, `broken` and `hint` are there if the
    file has them.

    Args:
        path: of the file.
        source: its bytes.
        layers: of confinement.

    Raises:
        EnvironmentFault: the file does not load, or defines no Environment of the contract.
    """

    idle: Callable[[JsonObject], list[Message]]
    broken: Callable[[JsonObject], list[Message]]
    hint: Callable[[JsonObject], str]

    def __init__(self, path: Path, source: bytes, layers: Sequence[str]) -> None:
        self._path, self._source, self._layers = path, source, layers
        self.end: float | None = None
        """Time of `time.monotonic` beyond which nothing is answered any more; None: only each answer has its limit."""
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._server: ForkServer | None = None
        self._optional: list[str] = []
        self._references: dict[str, str] = {}
        try:
            match self._server_of_process().ask_shared("describe", {}, None):
                case {"missing": [*missing]}:
                    raise EnvironmentFault(
                        f"environment file {path} lacks {one_line(', '.join(map(str, missing)))}",
                        "fulfil captrain.contract",
                    )
                case {
                    "name": str(name),
                    "tools": tools,
                    "optional": [*optional],
                    "keyed": bool(keyed),
                    "about": dict(about),
                }:
                    self.name, self.about = one_line(name), about
                    self.tools: list[JsonObject] = _shaped(tools, TOOLS, "a list of tools")
                    self._optional, self._keyed = optional, keyed
                case unexpected:
                    raise Misbehaviour(f"describes itself as {_preview(unexpected)}")
        except BaseException as fault:
            if self._server is not None:
                self._server.close()
            if not isinstance(fault, Misbehaviour):
                raise
            raise EnvironmentFault(
                f"environment file {path} does not load: it {fault}",
                "mend the file, or delete it and run `dvc repro environments`",
            ) from None

    def __getattr__(self, name: str) -> object:
        # Made when asked for: kept, they would keep this object, and its processes, until a garbage collection.
        if name in FUNCTIONS and name in self._optional:
            return partial(self._function, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def size(self, split: str) -> int | None:
        """See `captrain.contract.Environment.size`; None where the file does not say."""
        if "size" not in self._optional:
            return None
        with self.attributing_faults("size", f"split {split}"):
            arguments = {"name": "size", "arguments": [split]}
            size = self._server_of_process().ask_shared("call", arguments, self.end)
            if size is None or (type(size) is int and size >= 0):
                return size
            raise Misbehaviour(f"returned what is no number of tasks ({_preview(size)})")

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """See `captrain.contract.Environment.tasks`."""
        with self.attributing_faults("tasks", f"split {split}"):
            tasks: list[JsonObject] = []
            for start in range(0, count + 1, SLICE):
                arguments = {"split": split, "count": count, "start": start, "stop": start + SLICE}
                batch = self._server_of_process().ask_shared("tasks", arguments, self.end)
                if not isinstance(batch, list):
                    raise Misbehaviour(f"returned what is not a list of tasks ({_preview(batch)})")
                tasks += batch
                if len(batch) < SLICE:
                    break
            return tasks

    def open(self, task: JsonObject, key: str = "") -> "ConfinedEpisode":
        """See `captrain.contract.Environment.open`; the key is for files that take one."""
        with self.attributing_faults("open", task["id"]):
            return ConfinedEpisode(self, task, {"key": key} if self._keyed else {})

    def score(self, task: JsonObject, messages: Sequence[Message]) -> JsonObject:
        """See `captrain.contract.Environment.score`; in a process of its own."""
        with self.attributing_faults("score", task["id"]):
            arguments = {"name": "score", "arguments": [task, list(messages)]}
            return self._server_of_process().ask_fresh("call", arguments, self.end)

    def reference(self, task: JsonObject) -> list[Message]:
        """See `captrain.contract.Environment.reference`; the file is asked once a task."""
        key = json.dumps(task, sort_keys=True)
        text = self._references.get(key)
        if text is None:
            text = json.dumps(self._function("reference", task))
            characters = sum(map(len, [*self._references, *self._references.values()]))
            if len(self._references) >= REFERENCES or characters > CHARACTERS:
                self._references.clear()
            self._references[key] = text
        return json.loads(text)

    def _function(self, name: str, task: JsonObject) -> Any:
        with self.attributing_faults(name, task["id"]):
            arguments = {"name": name, "arguments": [task]}
            return _shaped(self._server_of_process().ask_shared("call", arguments, self.end), *FUNCTIONS[name])

    def _server_of_process(self) -> ForkServer:
        """The fork server in this process of ours: another one if it was lost, or is our parent's."""
        if self._owner != os.getpid():
            # A thread that this process does not have may hold the lock.
            self._lock, self._owner, self._server = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._server is None or self._server.end_reason:
                name = "captrain_environment_" + "".join(sign if sign.isalnum() else "_" for sign in self._path.stem)
                self._server = ForkServer(self._source, name, self._layers)
                weakref.finalize(self, self._server.close)
            return self._server

    @contextmanager
    def attributing_faults(self, operation: str, item: str) -> Iterator[None]:
        """Make a verdict a fault of this environment, in the words of `captrain.contract.CheckedEnvironment`."""
        try:
            yield
        except Misbehaviour as verdict:
            raise EnvironmentFault(
                f"environment {self.name} ({self._path}) {verdict} in {operation} on {item}",
                "mend the environment file; rollouts already whole are kept and a new run goes on from them",
            ) from None


class ConfinedEpisode:
    """An episode in a process of its own, as `captrain.contract.Episode`."""

    def __init__(self, environment: ConfinedEnvironment, task: JsonObject, more: dict[str, str]) -> None:
        self._environment, self._task = environment, task["id"]
        self._worker = environment._server_of_process().worker()
        try:
            match ask(self._worker, "open", {"task": task, "more": more}, environment.end):
                case {"messages": messages, "tools": tools}:
                    self.messages = _shaped(messages, MESSAGES, "a list of messages")
                    self.tools = tools if tools is None else _shaped(tools, TOOLS, "a list of tools")
                case unexpected:
                    raise Misbehaviour(f"returned what is not an episode ({_preview(unexpected)})")
        except BaseException:
            self.close()
            raise

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `captrain.contract.Episode.step`."""
        with self._environment.attributing_faults("step", self._task):
            match ask(self._worker, "step", {"message": message}, self._environment.end):
                case [replies, bool(is_over)]:
                    return _shaped(replies, MESSAGES, "a list of messages"), is_over
                case unexpected:
                    raise Misbehaviour(f"returned what is not messages and whether it is over ({_preview(unexpected)})")

    def close(self) -> None:
        """End its process."""
        dismiss(self._worker)
