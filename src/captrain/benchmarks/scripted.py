"""Benchmarks in workers that come without splits: what BFCL, AgentDojo and ToolSandbox share.

Tasks lie in scenarios, whose forms are never divided: no form of a test scenario is diagnosed on. The scenarios of each
stratum are divided in the same shares, in an order that only their names decide.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from captrain.benchmarks.pool import workers_code
from captrain.benchmarks.simulation import WorkerBenchmark, divided
from captrain.contract import Policy
from captrain.errors import UserError
from captrain.records import JsonObject, Message
from captrain.run import Machine


class ScriptedBenchmark(WorkerBenchmark):
    """A benchmark, to be named by its class.

    Args:
        machine: names the installation, where `captrain benchmark install` did not make it.
        kinds: of tasks that are played.
        discovery: share of the scenarios for diagnosis.
        training: share of the scenarios for training; the rest is the test split.
        user: see `WorkerBenchmark`.

    Raises:
        UserError: the shares leave nothing to test on.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """Name of the benchmark as its makers write it."""
    reward: ClassVar[str]
    """Meaning of a reward of 1."""
    stratified: ClassVar[bool] = False
    """True where each kind of tasks is divided by itself; else scenarios have a form of each kind."""

    def __init__(
        self,
        machine: Machine | None,
        kinds: Sequence[str],
        discovery: float,
        training: float,
        user: Policy | None = None,
    ) -> None:
        super().__init__(machine, user)
        if discovery + training >= 1:
            raise UserError(
                f"benchmark.discovery + benchmark.training = {discovery + training:g} leaves no scenario to test on",
                "lower one of them",
            )
        self.kinds, self.shares = kinds, (discovery, training, 1 - discovery - training)

    @cached_property
    def _world(self) -> dict[str, str]:
        """Names of the benchmark, its version and its data, on all of which every task depends."""
        hello = self.pool.call("hello")
        return {"benchmark": self.name, "version": str(hello["version"]), **hello["data"]}

    @cached_property
    def _splits(self) -> dict[str, list[JsonObject]]:
        """Tasks by split; the forms of a scenario lie together, and the strata are interleaved in proportion."""
        strata: dict[str, dict[str, list[JsonObject]]] = {}
        for entry in self.pool.call("list_tasks")["tasks"]:
            if entry["category"] in self.kinds:
                stratum = strata.setdefault(entry["category"] if self.stratified else "", {})
                stratum.setdefault(str(entry["scenario"]), []).append(entry)
        places: dict[str, list[tuple[float, str, list[JsonObject]]]] = {"discovery": [], "training": [], "test": []}
        for stratum, scenarios in strata.items():
            order = sorted(scenarios, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
            for split, names in zip(places, divided(order, self.shares), strict=True):
                places[split] += [(index / len(names), stratum, scenarios[name]) for index, name in enumerate(names)]
        return {
            split: [entry for *_, entries in sorted(listing, key=lambda place: place[:2]) for entry in entries]
            for split, listing in places.items()
        }

    @cached_property
    def about(self) -> JsonObject:
        """Version, data, sizes of the splits."""
        return {
            **self._world,
            "splits": {split: len(entries) for split, entries in self._splits.items()},
            "reward": self.reward,
            "worker": workers_code(self.package),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of all tasks; an episode has its own."""
        return self.pool.call("tools")["tools"]

    def size(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(self._splits[split])

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """The first `count` tasks of a split."""
        return [
            {
                "id": f"{self.name}/{entry['id']}",
                "split": split,
                "data": {**self.details(entry), "world": self._world},
            }
            for entry in self._splits[split][:count]
        ]

    def details(self, entry: JsonObject) -> JsonObject:
        """Say of a task which it is, and of which kind."""
        return {"kind": entry["category"], "task": entry["id"]}

    def location(self, task: JsonObject) -> JsonObject:
        """See `WorkerBenchmark.location`."""
        if task["data"]["world"] != self._world:
            raise UserError(
                f"task {task['id']} is of another {self.title} than what is installed and set",
                f"run `dvc repro rollouts`, or name its environment in machine.benchmarks.{self.name}.python",
            )
        return {"task_id": task["data"]["task"]}

    def reference(self, task: JsonObject) -> list[Message]:
        """The gold calls, and the messages without a call that close turns."""
        return self.pool.call("reference", **self.location(task))["messages"]
