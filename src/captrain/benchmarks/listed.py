"""Benchmarks whose workers list all tasks, and how tasks without splits are divided.

Tasks belong to scenarios. All variants of a scenario go to one split, so that no variant of a test scenario is used for
diagnosis. The scenarios of each stratum are divided by the same shares, in an order that depends only on their names.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, NotRequired, TypedDict

from captrain.benchmarks.pool import workers_code
from captrain.benchmarks.simulation import TaskDict, WorkerBenchmark, divided, require_test_share
from captrain.contract import Policy
from captrain.errors import UserError
from captrain.records import JsonObject, Message, Split
from captrain.run import Machine


class Entry(TypedDict):
    """A task in the worker's list.

    external: outside services that it asks. milestones: what its milestones check.
    """

    id: str
    category: str
    scenario: NotRequired[str | int]
    external: NotRequired[list[str]]
    milestones: NotRequired[list[JsonObject]]


class ListedBenchmark(WorkerBenchmark):
    """A benchmark with finite splits of listed tasks."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Name of the benchmark as its authors write it."""

    @cached_property
    def splits(self) -> Mapping[str, Sequence[Entry]]:
        """Tasks by split."""
        raise NotImplementedError

    def world(self, kind: str) -> dict[str, str]:
        """Name, version and data hashes that tasks of a kind depend on."""
        raise NotImplementedError

    def data(self, entry: Entry) -> JsonObject:
        """The data of a task."""
        checks = {"milestones": entry["milestones"]} if "milestones" in entry else {}
        return {"kind": entry["category"], "task": entry["id"], **checks, "world": self.world(entry["category"])}

    def size(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(self.splits[split])

    def tasks(self, split: Split, count: int) -> list[TaskDict]:
        """The first `count` tasks of a split."""
        return [
            {"id": f"{self.name}/{entry['id']}", "split": split, "data": self.data(entry)}
            for entry in self.splits[split][:count]
        ]

    def location(self, task: TaskDict) -> dict[str, str]:
        """See `WorkerBenchmark.location`."""
        data = task["data"]
        if data["world"] != self.world(data["kind"]):
            raise UserError(
                f"task {task['id']} is from another version of {self.title}, or other data, than installed and set",
                f"run `dvc repro rollouts`, or name the environment that it was made with in "
                f"machine.benchmarks.{self.package}.python",
            )
        return {"task_id": data["task"]}

    def reference(self, task: TaskDict) -> list[Message]:
        """Assistant messages of the gold solution: calls, and messages without calls that close turns."""
        return self.pool.call("reference", **self.location(task))["messages"]


class DividedBenchmark(ListedBenchmark):
    """A benchmark without splits of its own.

    Args:
        machine: names the installation, unless `captrain benchmark install` made it.
        kinds: categories of tasks to play.
        discovery: share of the scenarios for diagnosis.
        training: share of the scenarios for training; the rest is the test split.
        user: see `WorkerBenchmark`.

    Raises:
        UserError: the shares leave no test tasks.
    """

    reward: ClassVar[str]
    """Meaning of a reward of 1."""
    stratified: ClassVar[bool] = False
    """True if each kind of tasks is divided by itself. Otherwise every scenario has a variant of each kind."""

    def __init__(
        self,
        machine: Machine | None,
        kinds: Sequence[str],
        discovery: float,
        training: float,
        user: Policy | None = None,
    ) -> None:
        super().__init__(machine, user)
        require_test_share(discovery, training)
        self.kinds, self.shares = kinds, (discovery, training, 1 - discovery - training)

    @cached_property
    def _world(self) -> dict[str, str]:
        return {"benchmark": self.name, **self.pool.call("hello")["data"]}

    def world(self, kind: str) -> dict[str, str]:
        """See `ListedBenchmark.world`: all kinds share one world."""
        return self._world

    @cached_property
    def splits(self) -> Mapping[str, Sequence[Entry]]:
        """Tasks by split. Variants of a scenario are neighbours, and strata are interleaved in proportion."""
        strata: dict[str, dict[str, list[Entry]]] = {}
        entries: list[Entry] = self.pool.call("list_tasks")["tasks"]
        for entry in entries:
            if entry["category"] in self.kinds:
                stratum = strata.setdefault(entry["category"] if self.stratified else "", {})
                stratum.setdefault(str(entry.get("scenario")), []).append(entry)
        places: dict[str, list[tuple[float, str, list[Entry]]]] = {"discovery": [], "training": [], "test": []}
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
            "splits": {split: len(entries) for split, entries in self.splits.items()},
            "reward": self.reward,
            "worker": workers_code(self.package),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of all tasks; an episode has its own."""
        return self.pool.call("tools")["tools"]
