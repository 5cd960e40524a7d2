"""BFCL's multi-turn categories: files, messages, trades, trips and cars, asked for over several turns.

800 tasks: 200 scenarios, each with its plain form (`base`) and three variants: a tool that comes late (`miss_func`), a
value that the user says late (`miss_param`), long results (`long_context`). The user's turns are a script, and the
score is BFCL's own: after every turn the world must be as gold leaves it, and what gold's calls returned must have been
seen.
`captrain benchmark install bfcl` makes the environment that its worker runs in (the package `bfcl-eval`, Apache-2.0).

BFCL has no splits. Ours keep the variants of a scenario together, so that no form of a test scenario is diagnosed on;
numbers on our test split are not the leaderboard's, which are over all tasks of a category.
"""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from captrain.benchmarks.pool import WORKERS, Pool, code_of
from captrain.benchmarks.simulation import SimulatedEpisode, divided, installation
from captrain.config import Machine
from captrain.errors import UserError
from captrain.records import JsonObject, Message

Category = Literal["base", "miss_func", "miss_param", "long_context"]
ADVICE = "Run `captrain benchmark install bfcl`, or make an environment with `pip install --no-deps bfcl-eval mpmath`."


class Bfcl:
    """The benchmark.

    Args:
        machine: names the installation, where `captrain benchmark install` did not make it.
        categories: of tasks.
        discovery: share of the scenarios for diagnosis.
        training: share of the scenarios for training; the rest is the test split.

    Raises:
        UserError: the shares leave nothing to test on.
    """

    name = "bfcl"

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        categories: Annotated[list[Category], Field(min_length=1)],
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.4,
        training: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    ) -> None:
        if discovery + training >= 1:
            raise UserError(
                f"benchmark.discovery + benchmark.training = {discovery + training:g} leaves no scenario to test on",
                "lower one of them",
            )
        self.machine, self.categories = machine, categories
        self.discovery, self.training = discovery, training

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        installed = installation(self.machine, "bfcl", ADVICE)
        return Pool(
            "bfcl",
            [str(Path(installed.python).expanduser()), str(WORKERS / "bfcl_worker.py")],
            processes=installed.processes,
            timeout=installed.timeout,
        )

    @cached_property
    def _world(self) -> dict[str, str]:
        """What every task depends on."""
        hello = self.pool.call("hello")
        return {"benchmark": "bfcl", "version": str(hello["version"]), **hello["data"]}

    @cached_property
    def _splits(self) -> dict[str, list[JsonObject]]:
        """Tasks by split; the forms of a scenario lie together, in the order of the categories."""
        scenarios: dict[str, list[JsonObject]] = {}
        for entry in self.pool.call("list_tasks")["tasks"]:
            if entry["category"] in self.categories:
                scenarios.setdefault(str(entry["scenario"]), []).append(entry)
        order = sorted(scenarios, key=lambda number: hashlib.sha256(number.encode()).hexdigest())
        shares = (self.discovery, self.training, 1 - self.discovery - self.training)
        parts = zip(("discovery", "training", "test"), divided(order, shares), strict=True)
        return {split: [entry for number in numbers for entry in scenarios[number]] for split, numbers in parts}

    @cached_property
    def about(self) -> JsonObject:
        """Version, data, sizes of the splits."""
        return {
            **self._world,
            "splits": {split: len(entries) for split, entries in self._splits.items()},
            "reward": "1 where every turn leaves the world as gold does and has seen what gold sees",
            "worker": code_of("bfcl_worker.py"),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of all tasks; an episode has its own."""
        return self.pool.call("tools")["tools"]

    def size(self, split: str) -> int:
        """How many tasks a split has."""
        return len(self._splits[split])

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """The first `count` tasks of a split."""
        return [
            {
                "id": f"bfcl/{entry['id']}",
                "split": split,
                "data": {"kind": entry["category"], "task": entry["id"], "world": self._world},
            }
            for entry in self._splits[split][:count]
        ]

    def _location(self, task: JsonObject) -> dict[str, str]:
        if task["data"]["world"] != self._world:
            raise UserError(
                f"task {task['id']} is of another version of BFCL than what is installed",
                "run `dvc repro rollouts`, or name its environment in machine.benchmarks.bfcl.python",
            )
        return {"task_id": task["data"]["task"]}

    def open(self, task: JsonObject) -> SimulatedEpisode:
        """Open a task; the user is a script, the same for everyone."""
        return SimulatedEpisode(self.pool, self._location(task), None, "")

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """BFCL's verdict on the record, which is played again in a fresh world."""
        verdict = self.pool.call("evaluate", **self._location(task), messages=messages)
        return {name: verdict[name] for name in ("reward", "success", "parts")}

    def reference(self, task: JsonObject) -> list[Message]:
        """The gold calls, each turn closed by a message without a call."""
        return self.pool.call("reference", **self._location(task))["messages"]

    def idle(self, task: JsonObject) -> list[Message]:
        """The record of an agent that says nothing to whatever is asked."""
        return self.pool.call("idle", **self._location(task))["messages"]
