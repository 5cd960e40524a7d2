"""The worlds of the tasks that rollouts are of: which benchmark opens each, and how."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

from captrain.benchmarks.pool import Pool
from captrain.benchmarks.replay import Kind, Replay, ReplayCall, Replayed, World
from captrain.benchmarks.servicedesk import ARGUMENTS, MIXES, WRITES, ServiceDesk
from captrain.benchmarks.simulation import pool_of
from captrain.benchmarks.spoken import ContractWorld, MilestoneWorld, SpokenWorld, WorkerDialogues
from captrain.benchmarks.toolsandbox import START, instant
from captrain.contract import CheckedEnvironment, tool_call
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message, Rollout, Split, Task
from captrain.run import Machine

IN_WORKERS = ("tau2", "agentdojo", "bfcl", "toolsandbox")
"""Benchmarks whose workers open worlds."""
NAMES = (*IN_WORKERS, "servicedesk")
BY_HAND = {"toolsandbox": "machine.benchmarks.toolsandbox.python=INTERPRETER in the project"}
"""Settings that name what no command of ours installs."""
DOJO = re.compile(r"(banking|slack|travel|workspace)[-/](user_task_\d+)(-injection_task_\d+)?")
BFCL = re.compile(r"multi_turn_(base|miss_func|miss_param|long_context)_\d+")
DESK = re.compile(rf"(?:.*/)?servicedesk-({'|'.join(MIXES)})/\w+/\d+")
DESK_KINDS: dict[str, Kind] = {
    tool: "write" if tool in WRITES else "handover" if tool.startswith("transfer") else "read" for tool in ARGUMENTS
}
SPLITS: tuple[Split, ...] = ("discovery", "training", "test")
SIZES = (100, 2000)
"""Tasks of a split that one named by a log is looked for among: few first, since each has to be made."""
MOST_POOLS = 8
"""Kinds of workers at once, of benchmarks and of clocks: logs say of which instant they are."""
MOST_OPEN = 200
"""Worlds that stay open for when a rollout is asked for again."""


class Worlds:
    """The worlds of the tasks that rollouts are of; to be used in a `with` block.

    Args:
        benchmark: see `open_worlds`.
        target: see `open_worlds`.
        machine: see `open_worlds`.

    Attributes:
        missing: the command or setting that brings a package without which a world could not be opened; "" where none
            was.
        trouble: why the world that was asked for last failed to open; "" where it opened, or there is none.
    """

    def __init__(self, benchmark: str, target: CheckedEnvironment | None, machine: Machine | None) -> None:
        self.benchmark, self.target, self.machine = benchmark, target, machine
        self.missing = self.trouble = ""
        self._pools: dict[tuple[str, ...], Pool | None] = {}
        self._worlds: dict[str, tuple[list[Message], World | None]] = {}

    def of(self, rollout: Rollout) -> World | None:
        """The world of a rollout's task; None where none can be opened: one that fails to is no reason to stop."""
        messages, world = self._worlds.pop(rollout.id, (None, None))
        self.trouble = ""
        if messages != rollout.messages:
            try:
                world = self._open(rollout)
            except (UserError, InfrastructureError) as trouble:
                self.trouble = str(trouble)
                return None
        self._worlds[rollout.id] = rollout.messages, world
        if len(self._worlds) > MOST_OPEN:
            self._worlds.pop(next(iter(self._worlds)))
        return world

    def reference(self, rollout: Rollout) -> list[Message]:
        """The assistant messages of the reference of a rollout's task: those of its benchmark, where its world can be
        opened, else the rollout's own; empty where there are none."""
        match self.of(rollout):
            case WorkerWorld() as world if not rollout.reference and world.reference:
                information = list(world.owed)
                closing: Message = {"role": "assistant", "content": ", ".join(information), "informs": information}
                calls = [call for call in world.reference if call.by == "assistant"]
                return [*(tool_call(call.tool, call.arguments) for call in calls), closing]
            case SpokenWorld() as world:
                return list(world.solution) or rollout.reference
            case _:
                return rollout.reference

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            if pool is not None:
                pool.close()

    def _open(self, rollout: Rollout) -> World | None:
        """Open a world in the benchmark that a rollout is of; None for none that is known here."""
        environment, _, name = rollout.task.id.partition("/")
        if self.target is not None:
            benchmark = self.target.name if self.target.name in IN_WORKERS else ""
        elif self.benchmark or environment in IN_WORKERS:
            benchmark = self.benchmark or environment
        else:
            forms = (("agentdojo", DOJO, name), ("bfcl", BFCL, name), ("servicedesk", DESK, rollout.task.id))
            benchmark = next((benchmark for benchmark, form, text in forms if form.fullmatch(text)), None)
        match benchmark:
            case "tau2":
                return self._tau2(rollout)
            case "agentdojo" | "bfcl":
                return self._dialogues(benchmark, rollout)
            case "toolsandbox":
                return self._toolsandbox(rollout)
            case "servicedesk":
                match = DESK.fullmatch(rollout.task.id)
                return self._contract(_desk(match[1]), rollout, DESK_KINDS) if match else None
            case _:
                return None if self.target is None else self._contract(self.target, rollout, {})

    def _tau2(self, rollout: Rollout) -> World | None:
        data, parts = rollout.task.data, rollout.score.parts if rollout.score else {}
        if "nl_assertion" in rollout.task.facts.graded and parts.get("nl_assertion") != 1.0:
            return None  # what a language model has judged cannot be judged again here
        location = {"domain": data.get("kind"), "task_id": data.get("task"), "task": data.get("definition")}
        pool = self._pool("tau2")
        about = _asked(pool, "world", location) if pool else None
        return None if about is None or pool is None else WorkerWorld(pool, location, about)

    def _dialogues(self, benchmark: str, rollout: Rollout) -> World | None:
        pool = self._pool(benchmark)
        if pool is None:
            return None
        location: JsonObject = {"task_id": str(rollout.task.data.get("task") or rollout.task.id.partition("/")[2])}
        if benchmark == "agentdojo":
            if not (name := DOJO.fullmatch(location["task_id"])):
                return None
            location["task_id"] = f"{name[1]}/{name[2]}"
            location |= {k: v for k, v in rollout.task.data.items() if k == "injections"}
            if rollout.environment != benchmark:  # a log, which does not say of which version it is
                evidence: JsonObject = {"messages": rollout.messages, "passed": rollout.outcome == "passed"}
                match = _asked(pool, "locate", {**location, **evidence})
                if match is None or match["version"] is None:
                    return None
                location["version"] = match["version"]
        answer = _asked(pool, "reference", location)
        return WorkerDialogues(pool, location, rollout.messages, answer["messages"]) if answer else None

    def _toolsandbox(self, rollout: Rollout) -> World | None:
        """The phone of a scenario at the instant at which the rollout was played; ToolSandbox's own results do not say
        which, so that of these a world is opened where it returns what the log has."""
        data: JsonObject = rollout.task.data.get("world") or {}
        clock = str(data.get("clock") or START)
        try:
            instant(clock)
        except ValueError:
            raise UserError(f"the rollout's clock is no instant: {clock!r}", f"write one such as {START}") from None
        pool = self._pool("toolsandbox", {"CAPTRAIN_CLOCK": clock})
        if pool is None:
            return None
        if data and data != {"benchmark": "toolsandbox", **pool.call("hello")["data"]}:
            raise UserError("the rollout is of another ToolSandbox than the installed one", "install the one it is of")
        location: JsonObject = {"task_id": str(rollout.task.data.get("task") or rollout.task.id.partition("/")[2])}
        about = _asked(pool, "world", location)
        if about is None:
            return None
        if about["messages"] is None:
            raise UserError("no calls are known that meet all milestones of the scenario", "read what it checks")
        location["words"] = [message for message in rollout.messages if message["role"] == "user"]
        world = MilestoneWorld(pool, location, rollout.messages, about["messages"], about["kinds"])
        if not data and not world.returns(rollout.messages):
            raise UserError(
                "its results come out otherwise here: it was played at another instant", "set the clock to it"
            )
        return world

    def _contract(self, target: CheckedEnvironment, rollout: Rollout, kinds: dict[str, Kind]) -> World | None:
        if getattr(target.environment, "user", None) is not None:
            return None  # a model plays the user
        task: Task | None = rollout.task
        if rollout.environment != target.name:
            name = rollout.task.id.partition("/")[2]
            task = next(filter(None, (_tasks(target, most).get(name) for most in SIZES)), None)
        return ContractWorld(target, task, rollout.messages, kinds) if task else None

    def _pool(self, benchmark: str, environment: dict[str, str] | None = None) -> Pool | None:
        """The workers of a benchmark, in an environment of their own, None where it is not installed."""
        key = benchmark, *(environment or {}).values()
        if key not in self._pools:
            if len(self._pools) == MOST_POOLS:
                raise UserError(f"the logs ask for more than {MOST_POOLS} kinds of workers", "diagnose them apart")
            try:
                self._pools[key] = pool_of(self.machine, benchmark, env=environment)
            except UserError:
                self._pools[key] = None
                self.missing = BY_HAND.get(benchmark, f"captrain benchmark install {benchmark}")
        return self._pools[key]


class WorkerWorld:
    """A world whose benchmark's worker plays calls.

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
        """See `captrain.benchmarks.World.play`."""
        answer = self._pool.call("replay", **self._location, replays=[asdict(replay) for replay in replays])
        return [
            Replayed(tuple(e["results"]), tuple(e["failed"]), tuple(e["changed"]), e["parts"], e["passed"])
            for e in answer["replayed"]
        ]


def _asked(pool: Pool, operation: str, location: JsonObject) -> JsonObject | None:
    """A worker's answer about a task, None where the benchmark has no such task."""
    try:
        return pool.call(operation, **location)
    except UserError as refusal:
        if "does not start" in str(refusal):
            raise
        return None


@cache
def _tasks(target: CheckedEnvironment, most: int) -> dict[str, Task]:
    """The tasks of an environment by id, so many of each split at most."""
    tasks: list[Task] = []
    for split in SPLITS:
        size = target.size(split)
        tasks += target.tasks(split, most if size is None else min(size, most))
    return {task.id: task for task in tasks}


@cache
def _desk(mix: str) -> CheckedEnvironment:
    return CheckedEnvironment(ServiceDesk(mix=mix), "captrain.benchmarks.servicedesk", "")  # pyright: ignore[reportArgumentType]


def open_worlds(
    benchmark: str = "", *, target: CheckedEnvironment | None = None, machine: Machine | None = None
) -> Worlds:
    """Worlds for rollouts of logs, or of a project. Nothing is started before a world is asked for.

    Args:
        benchmark: "tau2", "agentdojo", "bfcl", "toolsandbox" or "servicedesk"; "" where each rollout's own environment
            and task id tell.
        target: an environment of our contract (a project's benchmark, an environment file), whose tasks the rollouts
            are of; it goes before `benchmark`.
        machine: names installations that `captrain benchmark install` has not made.

    Raises:
        UserError: there is no such benchmark.
    """
    if benchmark and benchmark not in NAMES:
        raise UserError(f"no world of benchmark {benchmark!r} can be opened", f"there are {', '.join(NAMES)}")
    return Worlds(benchmark, target, machine)
