"""Opening the world of a rollout's task: which benchmark does it, and how."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache

from captrain.benchmarks.pool import Pool
from captrain.benchmarks.replay import Replay, ReplayCall, Replayed, ToolKind, World
from captrain.benchmarks.servicedesk import ARGUMENTS, MIXES, WRITES, ServiceDesk
from captrain.benchmarks.simulation import pool_of
from captrain.benchmarks.spoken import (
    ContractTask,
    ContractWorld,
    DialogueWorld,
    MilestoneWorld,
    WorkerDialogueWorld,
)
from captrain.benchmarks.toolsandbox import START, instant
from captrain.contract import CheckedEnvironment, tool_call
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message, Rollout, Split, Task, bytes_digest, digest
from captrain.run import Machine

IN_WORKERS = ("tau2", "agentdojo", "bfcl", "toolsandbox")
"""Benchmarks whose workers open worlds."""
NAMES = (*IN_WORKERS, "servicedesk")
BY_HAND = {"toolsandbox": "machine.benchmarks.toolsandbox.python=INTERPRETER in the project"}
"""Settings that name installations which no command of ours makes."""
DOJO = re.compile(r"(banking|slack|travel|workspace)[-/](user_task_\d+)(-injection_task_\d+)?")
BFCL = re.compile(r"multi_turn_(base|miss_func|miss_param|long_context)_\d+")
DESK = re.compile(rf"(?:.*/)?servicedesk-({'|'.join(MIXES)})/\w+/\d+")
DESK_KINDS: dict[str, ToolKind] = {
    tool: "write" if tool in WRITES else "handover" if tool.startswith("transfer") else "read" for tool in ARGUMENTS
}
SPLITS: tuple[Split, ...] = ("discovery", "training", "test")
SIZES = (100, 2000)
"""Tasks of a split among which a log's task is searched: few first, because each has to be made."""
MOST_POOLS = 8
"""Maximum number of pools: one per benchmark and clock, and logs choose the clocks."""
MOST_OPEN = 200
"""Worlds that stay open in case a rollout is asked for again."""
MOST_PLAYED = 100
"""With so many dialogues of a task in memory, its next trial begins anew: a log may have any number of trials."""


class _NoWorld(Exception):
    """No world is known for a rollout, or its benchmark is not installed."""


class Worlds(ExitStack):
    """The worlds of rollouts' tasks; use it in a `with` block, at whose end the workers end.

    Args:
        benchmark: see `open_worlds`.
        target: see `open_worlds`.
        machine: see `open_worlds`.

    Attributes:
        missing: the command or setting that installs a missing benchmark; "" if none was missing.
        trouble: why the last world failed to open; "" if it opened, or if none is known.
    """

    def __init__(self, benchmark: str, target: CheckedEnvironment | None, machine: Machine | None) -> None:
        super().__init__()
        self.benchmark, self.target, self.machine = benchmark, target, machine
        self.missing = self.trouble = ""
        self._pools: dict[tuple[str, ...], Pool | None] = {}
        self._worlds: dict[str, tuple[list[Message], World | None]] = {}
        self._of_task: dict[str, CallWorld] = {}
        """Worlds that all trials of a task share."""
        self._contract_tasks: dict[tuple[str, str], ContractTask] = {}
        """Tasks of our contract, for their other trials."""

    def of(self, rollout: Rollout) -> World | None:
        """The world of a rollout's task, or None. A world that fails to open does not stop the caller."""
        messages, world = self._worlds.pop(rollout.id, (None, None))
        self.trouble = ""
        if messages != rollout.messages:
            try:
                world = self._open(rollout)
            except _NoWorld:
                world = None
            except (UserError, InfrastructureError) as trouble:
                self.trouble = str(trouble)
                return None
        self._worlds[rollout.id] = rollout.messages, world
        if len(self._worlds) > MOST_OPEN:
            self._worlds.pop(next(iter(self._worlds)))
        return world

    def reference(self, rollout: Rollout) -> list[Message]:
        """The reference of a rollout's task as assistant messages: the benchmark's if its world opens, else the
        rollout's own."""
        world = self.of(rollout)
        if isinstance(world, CallWorld) and not rollout.reference and world.reference:
            information = list(world.owed)
            closing: Message = {"role": "assistant", "content": ", ".join(information), "informs": information}
            calls = [call for call in world.reference if call.by == "assistant"]
            return [*(tool_call(call.tool, call.arguments) for call in calls), closing]
        if isinstance(world, DialogueWorld):
            return list(world.solution) or rollout.reference
        return rollout.reference

    def _open(self, rollout: Rollout) -> World:
        environment, _, name = rollout.task.id.partition("/")
        if self.target is not None:
            benchmark = self.target.name
            if benchmark not in IN_WORKERS:
                return self._contract(self.target, rollout, {})
        elif self.benchmark or environment in IN_WORKERS:
            benchmark = self.benchmark or environment
        else:
            forms = (("agentdojo", DOJO, name), ("bfcl", BFCL, name), ("servicedesk", DESK, rollout.task.id))
            benchmark = next((benchmark for benchmark, form, text in forms if form.fullmatch(text)), None)
        if benchmark == "servicedesk" and (match := DESK.fullmatch(rollout.task.id)):
            return self._contract(_desk(match[1]), rollout, DESK_KINDS)
        task_id = str(rollout.task.data.get("task") or name)
        match benchmark:
            case "tau2":
                return self._tau2(rollout)
            case "bfcl":
                return _dialogues(self._pool("bfcl"), rollout, {"task_id": task_id})
            case "agentdojo":
                return self._agentdojo(rollout, task_id)
            case "toolsandbox":
                return self._toolsandbox(rollout, task_id)
            case _:
                raise _NoWorld

    def _tau2(self, rollout: Rollout) -> World:
        data, parts = rollout.task.data, rollout.score.parts if rollout.score else {}
        if "nl_assertion" in rollout.task.facts.graded and parts.get("nl_assertion") != 1.0:
            raise _NoWorld  # a language model judged it, and none is asked here
        location = {"domain": data.get("kind"), "task_id": data.get("task"), "task": data.get("definition")}
        pool, key = self._pool("tau2"), digest(location)
        world = self._of_task.pop(key, None) or CallWorld(pool, location)
        self._of_task[key] = world
        if len(self._of_task) > MOST_OPEN:
            self._of_task.pop(next(iter(self._of_task)))
        return world

    def _agentdojo(self, rollout: Rollout, task_id: str) -> World:
        pool = self._pool("agentdojo")
        if not (name := DOJO.fullmatch(task_id)):
            raise _NoWorld
        location = {"task_id": f"{name[1]}/{name[2]}"}
        if "injections" in rollout.task.data:
            location["injections"] = rollout.task.data["injections"]
        if rollout.environment != "agentdojo":  # a log, which does not name its version
            evidence = {"messages": rollout.messages, "passed": rollout.outcome == "passed"}
            version = _ask(pool, "locate", {**location, **evidence})["version"]
            if version is None:
                raise _NoWorld
            location["version"] = version
        return _dialogues(pool, rollout, location)

    def _toolsandbox(self, rollout: Rollout, task_id: str) -> World:
        """The phone of a scenario at the instant of the rollout. ToolSandbox's own results do not name the instant:
        their world opens only if it returns what the log has."""
        data: dict[str, str] = rollout.task.data.get("world") or {}
        clock = str(data.get("clock") or START)
        try:
            instant(clock)
        except ValueError:
            raise UserError(f"the rollout's clock is no instant: {clock!r}", f"write one such as {START}") from None
        pool = self._pool("toolsandbox", {"CAPTRAIN_CLOCK": clock})
        if data and data != {"benchmark": "toolsandbox", **pool.call("hello")["data"]}:
            raise UserError("the rollout is from another ToolSandbox than the installed one", "install the former")
        about = _ask(pool, "world", {"task_id": task_id})
        if about["messages"] is None:
            raise UserError("no calls are known that meet all milestones of the scenario", "read what it checks")
        location = {"task_id": task_id, "words": [m for m in rollout.messages if m["role"] == "user"]}
        world = MilestoneWorld(pool, location, rollout.messages, about["messages"], about["kinds"])
        if not data and not world.returns(rollout.messages):
            raise UserError("its results differ here: it was played at another instant", "set the clock to it")
        return world

    def _contract(self, target: CheckedEnvironment, rollout: Rollout, kinds: Mapping[str, ToolKind]) -> World:
        if getattr(target.environment, "user", None) is not None:
            raise _NoWorld  # a model plays the user
        name = rollout.task.id.partition("/")[2]
        known = (task for most in SIZES if (task := _tasks(target, most).get(name)))
        is_own = rollout.environment == target.name
        task = rollout.task if is_own else next(known, None)
        if task is None:
            raise _NoWorld
        # A log of the environment itself holds its tasks, and may hold several of one name.
        key = target.name, bytes_digest(task.model_dump_json().encode()) if is_own else name
        shared = self._contract_tasks.pop(key, None)
        if shared is None or len(shared.played) >= MOST_PLAYED:
            shared = ContractTask(target, task, kinds)
        self._contract_tasks[key] = shared
        if len(self._contract_tasks) > MOST_OPEN:
            self._contract_tasks.pop(next(iter(self._contract_tasks)))
        return ContractWorld(shared, rollout.messages, shared.reference_world)

    def _pool(self, benchmark: str, environment: Mapping[str, str] | None = None) -> Pool:
        """The workers of a benchmark with additions to their environment."""
        key = benchmark, *(environment or {}).values()
        if key not in self._pools:
            if len(self._pools) == MOST_POOLS:
                raise UserError(f"the logs ask for more than {MOST_POOLS} kinds of workers", "diagnose them apart")
            self._pools[key] = None
            try:
                self._pools[key] = pool = pool_of(self.machine, benchmark, env=environment)
                self.callback(pool.close)
            except UserError:
                self.missing = BY_HAND.get(benchmark, f"captrain benchmark install {benchmark}")
        pool = self._pools[key]
        if pool is None:
            raise _NoWorld
        return pool


class CallWorld:
    """A world whose worker plays sequences of calls.

    Args:
        pool: the benchmark's workers.
        location: names the task in each request.
    """

    def __init__(self, pool: Pool, location: Mapping[str, object]) -> None:
        self._pool, self._location = pool, location
        self._known: dict[tuple[bool, tuple[str, ...], bool], Replayed] = {}
        """Outcomes of the reference and of an agent without a call, which every trial of the task asks for."""
        about = _ask(pool, "world", location)
        self.reference = tuple(ReplayCall(**call) for call in about["reference"])
        self.owed: tuple[str, ...] = tuple(about["owed"])
        self.kinds: dict[str, ToolKind] = about["kinds"]

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """See `captrain.benchmarks.World.play`."""
        keys = [self._key(replay) for replay in replays]
        is_new = [key is None or key not in self._known for key in keys]
        # `asdict` would copy every value before it is written.
        written = [
            {**vars(replay), "calls": [{"tool": c.tool, "arguments": c.arguments, "by": c.by} for c in replay.calls]}
            for replay, is_played in zip(replays, is_new, strict=True)
            if is_played
        ]
        answer = self._pool.call("replay", **self._location, replays=written) if written else {"replayed": []}
        fresh = (
            Replayed(tuple(e["results"]), tuple(e["failed"]), tuple(e["changed"]), e["parts"], e["passed"])
            for e in answer["replayed"]
        )
        outcomes = [
            next(fresh) if is_played or key is None else self._known[key]
            for key, is_played in zip(keys, is_new, strict=True)
        ]
        self._known |= {key: outcome for key, outcome in zip(keys, outcomes, strict=True) if key is not None}
        return outcomes

    def passes(self, replay: Replay) -> bool:
        """See `captrain.benchmarks.World.passes`."""
        return self.play([replay])[0].passed

    def _key(self, replay: Replay) -> tuple[bool, tuple[str, ...], bool] | None:
        is_shared = not replay.calls or replay.calls == self.reference
        return (bool(replay.calls), replay.texts, replay.ended) if is_shared else None


def _ask(pool: Pool, operation: str, location: Mapping[str, object]) -> JsonObject:
    """A worker's answer about a task. Raises _NoWorld if the benchmark has no such task."""
    try:
        return pool.call(operation, **location)
    except UserError as refusal:
        if "does not start" in str(refusal):
            raise
        raise _NoWorld from None


def _dialogues(pool: Pool, rollout: Rollout, location: Mapping[str, object]) -> World:
    solution: list[Message] = _ask(pool, "reference", location)["messages"]
    return WorkerDialogueWorld(pool, location, rollout.messages, solution)


@cache
def _tasks(target: CheckedEnvironment, most: int) -> dict[str, Task]:
    """Tasks of an environment by id: at most so many of each split."""
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
    """Worlds for the rollouts of logs or of a project. Nothing starts before a world is asked for.

    Args:
        benchmark: "tau2", "agentdojo", "bfcl", "toolsandbox" or "servicedesk"; "" if each rollout's environment and
            task id tell.
        target: an environment of our contract (a project's benchmark, an environment file) that the rollouts' tasks
            belong to; it overrides `benchmark`.
        machine: names installations that `captrain benchmark install` did not make.

    Raises:
        UserError: there is no such benchmark.
    """
    if benchmark and benchmark not in NAMES:
        raise UserError(f"captrain cannot replay in benchmark {benchmark!r}", f"choose one of {', '.join(NAMES)}")
    return Worlds(benchmark, target, machine)
