"""The world of a logged rollout's task, opened again: calls played in it, their effect and their score.

Nothing here asks a model: a user's turns are not played, only the calls of user and agent, the agent's texts, and
whether the dialogue came to its end. So a sequence that nobody has ever played can be judged, and what a rollout lacked
is proven by what makes it pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from captrain.benchmarks.pool import WORKERS, Pool
from captrain.benchmarks.simulation import installation
from captrain.config import Machine
from captrain.contract import Target, calls_of
from captrain.errors import UserError
from captrain.records import JsonObject, Message, Rollout

Kind = Literal["read", "write", "handover", "think"]


@dataclass(frozen=True)
class ReplayCall:
    """One tool call to play. `by`: "assistant" or "user" (a user's own tools)."""

    tool: str
    arguments: JsonObject
    by: str = "assistant"


@dataclass(frozen=True)
class Replay:
    """Something to play in a task's world: calls in order, the assistant's texts (for what had to be told), and
    `ended`: the dialogue came to its proper end."""

    calls: tuple[ReplayCall, ...]
    texts: tuple[str, ...] = ()
    ended: bool = True


@dataclass(frozen=True)
class Replayed:
    """What a replay led to.

    results: (calls,) text of each result. failed: (calls,) refused by the tool. changed: (calls,) the state differs
    before and after. parts: named score parts. passed: the check of the task holds.
    """

    results: tuple[str, ...]
    failed: tuple[bool, ...]
    changed: tuple[bool, ...]
    parts: dict[str, float]
    passed: bool


class World(Protocol):
    """The world of one task.

    reference: the gold calls in order, () where there are none. owed: words that the assistant owes the user. kinds:
    what the benchmark declares of its tools; those it declares nothing of are absent.
    """

    reference: tuple[ReplayCall, ...]
    owed: tuple[str, ...]
    kinds: Mapping[str, Kind]

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """Play each replay in a fresh world of the task; a search sends tens at once.

        Raises:
            InfrastructureError: the benchmark's worker failed.
        """
        ...

    def close(self) -> None:
        """Let go of what the world holds outside of this process."""
        ...


class Worlds:
    """The worlds of the tasks that rollouts are of; use it in a `with` block, or `close` it.

    Args:
        benchmark: see `open_worlds`.
        target: see `open_worlds`.
        machine: see `open_worlds`.
    """

    def __init__(self, benchmark: str, target: Target | None, machine: Machine | None) -> None:
        self.benchmark, self.target, self.machine = benchmark, target, machine
        self.missing = ""
        self._pools: dict[str, Pool | None] = {}

    def of(self, rollout: Rollout) -> World | None:
        """The world of a rollout's task; None where none can be opened. Where a package is all that is lacking,
        `missing` then says the command that brings it."""
        benchmark = self.benchmark or rollout.task.id.partition("/")[0]
        if benchmark == "tau2":
            return self._tau2(rollout)
        return None

    def _tau2(self, rollout: Rollout) -> World | None:
        data, parts = rollout.task.data, rollout.score.parts if rollout.score else {}
        if "nl_assertion" in data.get("graded", []) and parts.get("nl_assertion") != 1.0:
            return None  # what a language model has judged cannot be judged again here
        pool = self._pool("tau2", "tau2_replay.py")
        location = {"domain": data.get("kind"), "task_id": data.get("task"), "task": data.get("definition")}
        return pool and _opened(pool, location)

    def _pool(self, benchmark: str, script: str) -> Pool | None:
        """The workers of a benchmark, None where it is not installed."""
        if benchmark not in self._pools:
            try:
                installed = installation(self.machine, benchmark, "")
            except UserError:
                self._pools[benchmark] = None
                self.missing = f"captrain benchmark install {benchmark}"
            else:
                command = [str(Path(installed.python).expanduser()), str(WORKERS / script)]
                data = {f"{benchmark.upper()}_DATA_DIR": str(Path(installed.data).expanduser())} if installed.data else {}
                self._pools[benchmark] = Pool(
                    benchmark, command, processes=installed.processes, timeout=installed.timeout, env=data
                )
        return self._pools[benchmark]

    def reference(self, rollout: Rollout) -> list[Message]:
        """The assistant messages of the reference: the rollout's own, else that of its task in the installed
        benchmark; empty where neither has one."""
        raise NotImplementedError

    def close(self) -> None:
        """Close every world."""
        for pool in self._pools.values():
            if pool is not None:
                pool.close()

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerWorld:
    """A world in a benchmark's worker.

    Args:
        pool: its workers.
        location: of the task, for each request.
        about: what the worker says of it.
    """

    def __init__(self, pool: Pool, location: JsonObject, about: JsonObject) -> None:
        self._pool, self._location = pool, location
        self.reference = tuple(ReplayCall(**call) for call in about["reference"])
        self.owed: tuple[str, ...] = tuple(about["owed"])
        self.kinds: dict[str, Kind] = about["kinds"]

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """See `World.play`."""
        answer = self._pool.call("replay", **self._location, replays=[asdict(replay) for replay in replays])
        return [replayed(entry) for entry in answer["replayed"]]

    def close(self) -> None:
        """See `World.close`: its workers hold many worlds, and go with them all."""


def replayed(entry: JsonObject) -> Replayed:
    """What a worker says that a replay led to."""
    lists = {name: tuple(entry[name]) for name in ("results", "failed", "changed")}
    return Replayed(**lists, parts=entry["parts"], passed=entry["passed"])


def _opened(pool: Pool, location: JsonObject) -> World | None:
    """The world of a task, None where the benchmark has no such task."""
    try:
        return WorkerWorld(pool, location, pool.call("world", **location))
    except UserError:
        return None


PROPER = ("", "user_stop", "agent_stop")
"""Endings by which somebody has closed a dialogue, or none is known."""


def logged_replay(rollout: Rollout) -> Replay:
    """A rollout as it was played: its calls of user and assistant, the assistant's texts, and whether it ended as a
    dialogue should (its score says it, or why it ended)."""
    calls = [
        ReplayCall(tool, arguments, message["role"])
        for message in rollout.messages
        if message["role"] in ("assistant", "user")
        for tool, arguments in calls_of(message)
    ]
    spoken = [message.get("content") for message in rollout.messages if message["role"] == "assistant"]
    parts = rollout.score.parts if rollout.score else {}
    ended = parts["ended"] == 1.0 if "ended" in parts else rollout.task.data.get("ending", "") in PROPER
    return Replay(
        tuple(calls),
        tuple(text for text in spoken if isinstance(text, str) and text.strip()),
        ended and not rollout.truncated,
    )


def open_worlds(benchmark: str = "", *, target: Target | None = None, machine: Machine | None = None) -> Worlds:
    """Worlds for rollouts of logs, or of a project. Nothing is started before a world is asked for.

    Args:
        benchmark: "tau2", "agentdojo", "bfcl" or "servicedesk"; "" where each rollout's own environment and task id
            tell.
        target: an environment of our contract (a project's benchmark, an environment file), whose tasks the rollouts
            are of; it goes before `benchmark`.
        machine: names installations that `captrain benchmark install` has not made.

    Raises:
        UserError: there is no such benchmark.
    """
    return Worlds(benchmark, target, machine)
