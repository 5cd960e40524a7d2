"""Benchmarks and episodes that live in workers, with a simulated user that any policy of ours plays.

The worker hands out the user's prompt when it is the user's turn; that turn is then a one-step episode of the user's
policy, under a key of its own. So workers need neither model nor network, and the user's model and temperature are
part of the benchmark's identity like any other setting.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from captrain.benchmarks.installing import made_installation
from captrain.benchmarks.pool import WORKERS, Pool, Session
from captrain.contract import Policy, RunningEpisode
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message
from captrain.run import Machine


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
        machine: names the installation, where `captrain benchmark install` did not make it.
        name: of the installation.
        settings: its arguments.
        advice: on how the installation is made.
        env: additions to its environment, beside the place of data that lie apart.
        start_timeout: seconds that a start may take.

    Raises:
        UserError: the benchmark is installed nowhere.
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


class WorkerBenchmark:
    """A benchmark that is played and scored in workers.

    Args:
        machine: names the installation, where `captrain benchmark install` did not make it.
        user: who plays the simulated user; None where the worker's own script does.
    """

    package: ClassVar[str]
    """Name of its installation, and of its worker."""
    advice: ClassVar[str]
    """Sentence on how to make the virtual environment of its worker, for those who have none."""

    def __init__(self, machine: Machine | None, user: Policy | None = None) -> None:
        self.machine, self.user = machine, user

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        return pool_of(self.machine, self.package, advice=self.advice)

    def location(self, task: JsonObject) -> JsonObject:
        """Make the worker's arguments for a task.

        Raises:
            UserError: the task is of another world than the one that is installed.
        """
        raise NotImplementedError

    def open(self, task: JsonObject, key: str = "") -> "SimulatedEpisode":
        """Open a task; `key` names the randomness of the simulated user."""
        return SimulatedEpisode(self.pool, self.location(task), self.user, key)

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """Score a record, which is played again in a fresh world."""
        verdict = self.pool.call("evaluate", **self.location(task), messages=messages)
        return {name: verdict[name] for name in ("reward", "success", "parts")}

    def reference(self, task: JsonObject) -> list[Message]:
        """None is known."""
        return []

    def idle(self, task: JsonObject) -> list[Message]:
        """The record of an agent that says nothing to whatever is asked."""
        return self.pool.call("idle", **self.location(task))["messages"]


class Turn:
    """The one turn of a simulated user, as an episode for its policy."""

    def __init__(self, messages: Sequence[Message], tools: list[JsonObject]) -> None:
        self.messages, self.tools = messages, tools

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """The turn is over when the user has spoken."""
        return [], True


class SimulatedEpisode:
    """An episode in a worker.

    Args:
        pool: the benchmark's workers.
        reset: arguments of the worker's `reset`.
        user: who plays the simulated user; None where the worker's own script does.
        key: names the randomness of the user.
    """

    def __init__(self, pool: Pool, reset: JsonObject, user: Policy | None, key: str) -> None:
        self.user, self.key, self.turns = user, key, 0
        self.session: Session = pool.session(**reset, user="scripted" if user is None else "client")
        opening = self.session.opening
        self.tools: list[JsonObject] = opening["tools"]
        self.messages: list[Message] = [{"role": "system", "content": opening["system"]}] if opening["system"] else []
        try:
            self.messages += self._until_agent(opening)[0]
        except BaseException:
            # Nobody else can: there is no episode yet.
            self.close()
            raise

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `captrain.contract.Episode.step`."""
        return self._until_agent(self.session.call("step", role="agent", message=message))

    def close(self) -> None:
        """Let the worker drop the episode."""
        self.session.close()

    def _until_agent(self, observation: JsonObject) -> tuple[list[Message], bool]:
        """The messages up to the agent's next turn, users' turns played, and whether the episode is over."""
        messages: list[Message] = list(observation["messages"])
        while observation["turn"] == "user":
            assert self.user is not None
            self.turns += 1
            tools = observation.get("user_tools") or []
            play = RunningEpisode(f"{self.key}/user/{self.turns}", Turn(observation["user_messages"], tools))
            for _ in self.user.play([play]):
                pass
            reply = play.messages[-1] if play.turns else {}
            names = ("content", "tool_calls") if tools else ("content",)
            reply = {name: reply[name] for name in names if name in reply}
            if play.error or not (reply.get("tool_calls") or (reply.get("content") or "").strip()):
                # A user who says nothing is a fault of the simulation and none of the agent's.
                raise InfrastructureError(f"simulated user: {play.error or 'said nothing'}")
            observation = self.session.call("step", role="user", message={"role": "user", **reply})
            messages += observation["messages"]
        return messages, observation["turn"] is None


def divided(names: Sequence[str], shares: Sequence[float]) -> list[list[str]]:
    """Names divided in the given shares, in order, each part spread evenly over the whole.

    Every name goes to the part that lags most behind its share; equal lists are divided equally.
    """
    parts: list[list[str]] = [[] for _ in shares]
    for count, name in enumerate(names, start=1):
        lag = [share * count - len(part) for share, part in zip(shares, parts, strict=True)]
        parts[lag.index(max(lag))].append(name)
    return parts


def identity_of(user: Policy | None) -> JsonObject:
    """Describe the simulated user for the record: that it follows a script, or its policy, with model and temperature
    where it has any, and the digest of all that decides what it says."""
    if user is None:
        return {"policy": "scripted"}
    settings = {name: getattr(user, name) for name in ("name", "temperature") if hasattr(user, name)}
    return {"policy": type(user).__name__, **settings, "digest": user.digest}
