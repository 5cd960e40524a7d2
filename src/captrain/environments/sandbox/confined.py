"""The sandbox: runs untrusted environments in processes without files, network or other processes.

captrain's own process never runs their code. A fork server (`forkserver`) compiles the file and forks a confined
process for every episode and for every score. Functions that depend only on the task share one process. So a score is
computed from captrain's record, in a process that the episode never touched. Unseeded `random` and string hashes are
the same in all processes.

Every answer is validated. Each fault becomes an `EnvironmentFault`, and the next call gets a fresh process. The sandbox
does not protect against kernel bugs, timing attacks, or the total memory of many episodes. Dishonest scores are the
task of passports.
"""

import json
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from captrain.contract import CheckedEnvironment, file_fingerprint
from captrain.environments.sandbox.forkserver import Allowance, ForkServer, Misbehaviour, ask, dismiss, one_line
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import JsonObject, Message, read_bytes

T = TypeVar("T")

Level = Literal["none", "basic", "strong, one layer", "strong"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Levels of the sandbox, from weakest to strongest.

basic: a separate process with limits of memory and time. strong, one layer: every attempt to get out failed, and only
seccomp blocks them. strong: two layers block them.
"""
LAYERS = ("bubblewrap", "rlimits", "landlock", "seccomp")
SLICE = 64
"""Maximum number of tasks in a reply."""
REFERENCES, CHARACTERS = 4096, 1 << 26
"""Maximum number of reference solutions in the cache, and of characters of these and their tasks."""


class _Function(BaseModel):
    name: str


class _Call(_Function):
    arguments: JsonObject | str


class _ToolCall(BaseModel):
    function: _Call


class ChatMessage(BaseModel, frozen=True):
    """A chat message in the shape that captrain's code expects."""

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
"""Functions that take a task, with the shape of their results. All but the first are optional."""


def _preview(value: object) -> str:
    return one_line(json.dumps(value))


def _shaped(value: T, shape: TypeAdapter[Any], expected: str) -> T:
    """Return a value unchanged if it has the shape; raise `Misbehaviour` otherwise."""
    try:
        shape.validate_python(value, strict=True)
    except ValidationError:
        raise Misbehaviour(f"returned something that is not {expected} ({_preview(value)})") from None
    return value


@dataclass(frozen=True)
class Confinement:
    """The confinement on this machine. A confined process measures it by trying to get out."""

    level: Level
    layers: tuple[str, ...]
    blocked: Mapping[str, bool]

    def __str__(self) -> str:
        exposed = [name for name, is_blocked in self.blocked.items() if not is_blocked]
        applied = ", ".join(self.layers) or "no layer"
        return f"{self.level} ({applied}{'; exposed: ' if exposed else ''}{', '.join(exposed)})"


@cache
def active_confinement(layers: tuple[str, ...] = LAYERS) -> Confinement:
    """Try each layer once, and measure what they block together.

    Args:
        layers: layers to try, for tests.

    Raises:
        UserError: no process can be started at all.
    """
    server, outer = None, ()
    if "bubblewrap" in layers and shutil.which("bwrap"):
        with suppress(InfrastructureError):  # bwrap is installed, but does not work in many containers
            server, outer = ForkServer(b"", "probe", ["bubblewrap"]), ("bubblewrap",)
    try:
        server = server or ForkServer(b"", "probe", [])
    except InfrastructureError as fault:
        remedy = "check that the interpreter of this virtual environment still runs"
        raise UserError(str(fault), remedy) from None
    applied: tuple[str, ...] = ()
    blocked: dict[str, bool] = {}
    try:
        for layer in layers:
            with suppress(Misbehaviour):  # a process that cannot apply its layers ends
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
    """Load an environment file in the sandbox. See `captrain.contract.load_file`.

    Args:
        path: the file.
        least: required level; the strongest available one is used.
        layers: layers to use, for tests.
        source: its bytes, if they were read before.

    Raises:
        UserError: the file is missing, or the sandbox is weaker than required.
        EnvironmentFault: the file does not load, or defines no valid `Environment`.
    """
    source = read_bytes(path, "run `dvc repro environments` to write it again") if source is None else source
    activity = active_confinement(layers)
    if LEVELS.index(activity.level) < LEVELS.index(least):
        raise UserError(
            f"{path} may run in a sandbox of level `{least}` only, and here it is {activity}",
            "run on Linux 5.13 or later, outside of a container that forbids Landlock and seccomp; or accept what is "
            f"exposed, and set machine.sandbox (--sandbox) to `{activity.level}`",
        )
    return CheckedEnvironment(
        ConfinedEnvironment(path, source, activity.layers), str(path), file_fingerprint(path.stem, source)
    )


class ConfinedEnvironment:
    """An environment in the sandbox (`captrain.contract.Environment`). `idle`, `broken` and `hint` are optional.

    Args:
        path: the file.
        source: its bytes.
        layers: layers of confinement.

    Raises:
        EnvironmentFault: the file does not load, or defines no valid `Environment`.
    """

    def __init__(self, path: Path, source: bytes, layers: Sequence[str]) -> None:
        self._path, self._source, self._layers = path, source, layers
        self.allowance: Allowance | None = None
        """Time that all answers together may take; None limits only each single answer."""
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
                "fix the file, or delete it and run `dvc repro environments`",
            ) from None

    def __getattr__(self, name: str) -> object:
        # Make the partial on each access: a stored one would keep this object and its processes until a garbage
        # collection.
        if name in FUNCTIONS and name in self._optional:
            return partial(self._function, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def size(self, split: str) -> int | None:
        """See `captrain.contract.Environment`; None if the file does not define it."""
        if "size" not in self._optional:
            return None
        with self.attributing_faults("size", f"split {split}"):
            arguments = {"name": "size", "arguments": [split]}
            size = self._server_of_process().ask_shared("call", arguments, self.allowance)
            if size is None or (type(size) is int and size >= 0):
                return size
            raise Misbehaviour(f"returned something that is not a number of tasks ({_preview(size)})")

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """See `captrain.contract.Environment.tasks`."""
        with self.attributing_faults("tasks", f"split {split}"):
            tasks: list[JsonObject] = []
            for start in range(0, count + 1, SLICE):
                arguments = {"split": split, "count": count, "start": start, "stop": start + SLICE}
                batch = self._server_of_process().ask_shared("tasks", arguments, self.allowance)
                if not isinstance(batch, list):
                    raise Misbehaviour(f"returned something that is not a list of tasks ({_preview(batch)})")
                tasks += batch
                if len(batch) < SLICE:
                    break
            return tasks

    def open(self, task: JsonObject, key: str = "") -> "ConfinedEpisode":
        """See `captrain.contract.Environment.open`; the key is passed to files that take one."""
        with self.attributing_faults("open", task["id"]):
            return ConfinedEpisode(self, task, {"key": key} if self._keyed else {})

    def score(self, task: JsonObject, messages: Sequence[Message]) -> JsonObject:
        """See `captrain.contract.Environment.score`; runs in a fresh process."""
        with self.attributing_faults("score", task["id"]):
            arguments = {"name": "score", "arguments": [task, list(messages)]}
            return self._server_of_process().ask_fresh("call", arguments, self.allowance)

    def reference(self, task: JsonObject) -> list[Message]:
        """See `captrain.contract.Environment.reference`; cached."""
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
            return _shaped(self._server_of_process().ask_shared("call", arguments, self.allowance), *FUNCTIONS[name])

    def _server_of_process(self) -> ForkServer:
        """Return the fork server of this process. Start one if it was lost, or belongs to the parent process."""
        if self._owner != os.getpid():
            # A thread of the parent may hold the inherited lock.
            self._lock, self._owner, self._server = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._server is None or self._server.end_reason:
                name = "captrain_environment_" + "".join(sign if sign.isalnum() else "_" for sign in self._path.stem)
                self._server = ForkServer(self._source, name, self._layers)
                weakref.finalize(self, self._server.close)
            return self._server

    @contextmanager
    def attributing_faults(self, operation: str, item: str) -> Iterator[None]:
        """Turn `Misbehaviour` in the block into an `EnvironmentFault` that names operation and task."""
        try:
            yield
        except Misbehaviour as verdict:
            raise EnvironmentFault(
                f"environment {self.name} ({self._path}) {verdict} in {operation} on {item}",
                "fix the environment; finished rollouts are kept, and a new run continues from them",
            ) from None


class ConfinedEpisode:
    """An episode in a process of its own (`captrain.contract.Episode`)."""

    def __init__(self, environment: ConfinedEnvironment, task: JsonObject, more: dict[str, str]) -> None:
        self._environment, self._task = environment, task["id"]
        self._worker = environment._server_of_process().worker()
        try:
            match ask(self._worker, "open", {"task": task, "more": more}, environment.allowance):
                case {"messages": messages, "tools": tools}:
                    self.messages = _shaped(messages, MESSAGES, "a list of messages")
                    self.tools = tools if tools is None else _shaped(tools, TOOLS, "a list of tools")
                case unexpected:
                    raise Misbehaviour(f"returned something that is not an episode ({_preview(unexpected)})")
        except BaseException:
            self.close()
            raise

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `captrain.contract.Episode.step`."""
        with self._environment.attributing_faults("step", self._task):
            match ask(self._worker, "step", {"message": message}, self._environment.allowance):
                case [replies, bool(is_over)]:
                    return _shaped(replies, MESSAGES, "a list of messages"), is_over
                case unexpected:
                    raise Misbehaviour(f"returned something that is not (messages, is over) ({_preview(unexpected)})")

    def close(self) -> None:
        """End its process."""
        dismiss(self._worker)
