"""Benchmarks and episodes that live in workers, with a simulated user that any policy can play.

On the user's turn the worker returns the user's prompt. That turn is then a one-step episode of the user's policy,
under a key of its own. So workers need no model and no network. The user's model and temperature are part of the
benchmark's identity like any other setting.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypedDict

from captrain.benchmarks.installing import made_installation
from captrain.benchmarks.pool import WORKERS, Observation, Pool
from captrain.contract import Policy, RunningEpisode
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message, Split
from captrain.run import Machine


class TaskDict(TypedDict):
    """A task as the environment contract passes it. `data` is the benchmark's own."""

    id: str
    split: Split
    data: JsonObject


class ScoreDict(TypedDict):
    """A score as the environment contract passes it."""

    reward: float
    success: bool
    parts: dict[str, float]


def pool_of(
    machine: Machine | None,
    name: str,
    *settings: str,
    advice: str = "",
    env: Mapping[str, str] | None = None,
    start_timeout: float = 120.0,
) -> Pool:
    """Make the workers of a benchmark, which start on first use.

    Args:
        machine: names the installation, unless `captrain benchmark install` made it.
        name: of the installation.
        settings: arguments of the worker's script.
        advice: how to make the installation.
        env: additions to the worker's environment.
        start_timeout: seconds that a start may take.

    Raises:
        UserError: the benchmark is not installed.
    """
    installed = machine.benchmarks.get(name) if machine is not None else None
    if installed is None or not installed.python:
        installed = made_installation(name)
    if installed is None:
        raise UserError(
            f"benchmark {name} is not installed: machine.benchmarks.{name}.python names no interpreter",
            f"{advice} Then set machine.benchmarks.{name}.python to the interpreter in it",
        )
    data = {f"{name.upper()}_DATA_DIR": str(Path(installed.data).expanduser())} if installed.data else {}
    return Pool(
        name,
        [str(Path(installed.python).expanduser()), str(WORKERS / f"{name}_worker.py"), *settings],
        processes=installed.processes,
        timeout=installed.timeout,
        start_timeout=start_timeout,
        env={**data, **(env or {})},
    )


def require_test_share(discovery: float, training: float) -> None:
    """Raise a UserError if the shares of discovery and training leave no tasks for the test split."""
    if discovery + training >= 1:
        raise UserError(
            f"benchmark.discovery + benchmark.training = {discovery + training:g} leaves nothing to test on",
            "lower one of them",
        )


class WorkerBenchmark:
    """A benchmark that is played and scored in workers.

    Args:
        machine: names the installation, unless `captrain benchmark install` made it.
        user: plays the simulated user. None: the worker's own script does.
    """

    package: ClassVar[str]
    """Name of its installation and of its worker."""
    advice: ClassVar[str]
    """Sentence that says how to make the worker's virtual environment."""
    limits: Mapping[str, int] = {}
    """Limits of an episode, sent when it is opened and when it is scored."""

    def __init__(self, machine: Machine | None, user: Policy | None = None) -> None:
        self.machine, self.user = machine, user

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        return pool_of(self.machine, self.package, advice=self.advice)

    def location(self, task: TaskDict) -> dict[str, str]:
        """Arguments that name a task to the worker.

        Raises:
            UserError: the task comes from another version than the installed one.
        """
        raise NotImplementedError

    def open(self, task: TaskDict, key: str = "") -> "SimulatedEpisode":
        """Open a task; `key` names the randomness of the simulated user."""
        return SimulatedEpisode(self.pool, {**self.location(task), **self.limits}, self.user, key)

    def score(self, task: TaskDict, messages: list[Message]) -> ScoreDict:
        """Score a record by replaying it in a fresh world."""
        return self.pool.call("evaluate", **self.location(task), **self.limits, messages=messages)

    def reference(self, task: TaskDict) -> list[Message]:
        """No reference is known."""
        return []

    def idle(self, task: TaskDict) -> list[Message]:
        """The record of an agent that answers everything with an empty message."""
        return self.pool.call("idle", **self.location(task))["messages"]


class UserTurn:
    """One turn of a simulated user, as an episode for the user's policy."""

    def __init__(self, messages: Sequence[Message], tools: list[JsonObject]) -> None:
        self.messages, self.tools = messages, tools

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """End the turn: the user has spoken."""
        return [], True


class SimulatedEpisode:
    """An episode in a worker.

    Args:
        pool: the benchmark's workers.
        reset: arguments of the worker's `reset`.
        user: plays the simulated user. None: the worker's own script does.
        key: names the randomness of the user.
    """

    def __init__(self, pool: Pool, reset: Mapping[str, object], user: Policy | None, key: str) -> None:
        self.user, self.key, self.turns = user, key, 0
        self.session = pool.session(**reset, user="scripted" if user is None else "client")
        opening = self.session.opening
        self.tools = opening["tools"]
        self.messages: list[Message] = [{"role": "system", "content": opening["system"]}] if opening["system"] else []
        try:
            self.messages += self._until_agent(opening)[0]
        except BaseException:
            # The caller has no episode yet that it could close.
            self.close()
            raise

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `captrain.contract.Episode.step`."""
        return self._until_agent(self.session.call("step", role="agent", message=message))

    def close(self) -> None:
        """Let the worker drop the episode."""
        self.session.close()

    def _until_agent(self, observation: Observation) -> tuple[list[Message], bool]:
        """Play the user's turns until the agent's next; return the new messages and whether the episode is over."""
        messages = list(observation["messages"])
        while observation["turn"] == "user":
            assert self.user is not None
            self.turns += 1
            tools = observation.get("user_tools") or []
            play = RunningEpisode(
                f"{self.key}/user/{self.turns}", UserTurn(observation.get("user_messages", []), tools)
            )
            for _ in self.user.play([play]):
                pass
            reply = play.messages[-1] if play.turns else {}
            names = ("content", "tool_calls") if tools else ("content",)
            reply = {name: reply[name] for name in names if name in reply}
            if play.error or not (reply.get("tool_calls") or (reply.get("content") or "").strip()):
                # A silent user is a fault of the simulation, not of the agent.
                raise InfrastructureError(f"simulated user: {play.error or 'said nothing'}")
            observation = self.session.call("step", role="user", message={"role": "user", **reply})
            messages += observation["messages"]
        return messages, observation["turn"] is None


def divided(names: Sequence[str], shares: Sequence[float]) -> list[list[str]]:
    """Divide names by the given shares, in order, each part spread evenly over the whole.

    Every name goes to the part that lags most behind its share. Equal lists are divided equally.
    """
    parts: list[list[str]] = [[] for _ in shares]
    for count, name in enumerate(names, start=1):
        lag = [share * count - len(part) for share, part in zip(shares, parts, strict=True)]
        parts[lag.index(max(lag))].append(name)
    return parts


def identity_of(user: Policy | None) -> dict[str, str | float]:
    """Identity of the simulated user for the record: its policy, model, temperature and digest, or "scripted"."""
    if user is None:
        return {"policy": "scripted"}
    settings = {name: getattr(user, name) for name in ("name", "temperature") if hasattr(user, name)}
    return {"policy": type(user).__name__, **settings, "digest": user.digest}
