"""tau2-bench: customers at an airline and a shop, played by a simulated user, in tau2's own environment.

The paper's benchmark is 0.2.1-dev, the last version in which every task is scored by database and information told
alone; 1.0 changed 53 tasks. tau2 is installed by the user, from its own repository, and found through
`machine.benchmarks.tau2`; the package called tau2 on the public index is an unrelated project. Nothing is started
before it is needed, so that a configuration composes and validates without it.
"""

import json
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from captrain.benchmarks.pool import workers_code
from captrain.benchmarks.simulation import SimulatedEpisode, WorkerBenchmark, divided, identity_of
from captrain.contract import Policy, tool_call
from captrain.errors import UserError
from captrain.records import JsonObject, Message
from captrain.run import Machine

Domain = Literal["airline", "retail", "mock"]


class Tau2(WorkerBenchmark):
    """The benchmark.

    Args:
        machine: names the installation.
        domains: which domains; tasks of several are interleaved in proportion.
        version: the installation expected; another one is refused, because its tasks are others.
        max_steps: of one conversation, as tau2 counts them (messages and rounds of tool results).
        discovery: share of tau2's train split for diagnosis; the rest is for training. The test split is tau2's own.
        user: who plays the customer; None: a script that reads the scenario aloud and then leaves, for checks only.
    """

    name = package = "tau2"
    advice = (
        "Make a virtual environment from tau2-bench's own repository (sierra-research/tau2-bench), as its README says; "
        "the package called tau2 on the public index is something else."
    )

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        domains: Annotated[list[Domain], Field(min_length=1)],
        version: Literal["0.2.1-dev", "1.0"] = "0.2.1-dev",
        max_steps: Annotated[int, Field(ge=2)] = 50,
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.62,
        user: Policy | None = None,
    ) -> None:
        super().__init__(machine, user)
        self.domains, self.version, self.max_steps, self.discovery = domains, version, max_steps, discovery

    @cached_property
    def _hello(self) -> JsonObject:
        hello = self.pool.call("hello")
        if not str(hello["version"]).startswith(self.version.replace("-", ".")):
            raise UserError(
                f"benchmark tau2: version {hello['version']} is installed where benchmark.version = {self.version}",
                "set benchmark.version to what is installed, or name another environment in "
                "machine.benchmarks.tau2.python: tasks differ between versions",
            )
        if absent := [domain for domain in self.domains if "db" not in hello["data"][domain]]:
            raise UserError(
                f"benchmark tau2: the data of {', '.join(absent)} are not where tau2 looks for them",
                "set machine.benchmarks.tau2.data to the `data` folder of tau2-bench's repository",
            )
        return hello

    def _world(self, domain: str) -> dict[str, str]:
        """Return what a task of the domain depends on: another world, another task."""
        data = self._hello["data"][domain]
        return {
            "benchmark": "tau2",
            "version": self._hello["version"],
            **{k: data[k] for k in ("tasks", "db", "policy")},
        }

    @cached_property
    def about(self) -> JsonObject:
        """Version, hashes, split sizes, what is not runnable, user and reward."""
        return {
            "benchmark": "tau2",
            "version": self._hello["version"],
            "data": {domain: self._hello["data"][domain] for domain in self.domains},
            "splits": {name: {d: len(ids) for d, ids in parts.items()} for name, parts in self._splits.items()},
            "not_runnable": {
                f"tau2/{domain}/{name}": reason
                for domain in self.domains
                for name, reason in self._tasks_of_domains[domain]["not_runnable"].items()
            },
            "user": identity_of(self.user),
            "reward": "database as it should be x everything told; conversations the user did not end score 0",
            "max_steps": self.max_steps,
            "worker": workers_code(self.package),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of all domains; an episode has its own domain's. Where domains word the same tool differently, as
        airline and retail do, the first domain's wording stands."""
        schemas: dict[str, tuple[str, JsonObject]] = {}
        for domain in self.domains:
            for tool in self.pool.call("tools", domain=domain)["tools"]:
                name = tool["function"]["name"]
                first, schema = schemas.setdefault(name, (domain, tool))
                if _unworded(schema) != _unworded(tool):
                    raise UserError(
                        f"benchmark tau2: tool {name} takes other arguments in {domain} than in {first}",
                        f"play them apart: benchmark.domains=[{domain}]",
                    )
        return [tool for _, tool in schemas.values()]

    @cached_property
    def _tasks_of_domains(self) -> JsonObject:
        self._hello  # noqa: B018  (the version is checked before any task is given out)
        return {domain: self.pool.call("list_tasks", domain=domain) for domain in self.domains}

    @cached_property
    def _splits(self) -> dict[str, dict[str, list[str]]]:
        """Split -> domain -> task ids. A domain without splits of its own (mock) is divided in three."""
        splits: dict[str, dict[str, list[str]]] = {"discovery": {}, "training": {}, "test": {}}
        for domain in self.domains:
            original = self._tasks_of_domains[domain]["splits"]
            train, test = original.get("train"), original.get("test")
            if train is None:
                train, test = divided(original["base"], (2 / 3, 1 / 3))
            parts = divided(train, (self.discovery, 1 - self.discovery))
            splits["discovery"][domain], splits["training"][domain] = parts
            splits["test"][domain] = list(test)
        return splits

    def size(self, split: str) -> int:
        """Count the tasks of a split."""
        return sum(map(len, self._splits[split].values()))

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """The first `count` tasks of a split, domains interleaved in proportion."""
        places = [
            (index / len(ids), domain, name)
            for domain, ids in self._splits[split].items()
            for index, name in enumerate(ids)
        ]
        return [
            {
                "id": f"tau2/{domain}/{name}",
                "split": split,
                "data": {"kind": domain, "task": name, "world": self._world(domain)},
            }
            for _, domain, name in sorted(places, key=lambda place: place[0])[:count]
        ]

    def location(self, task: JsonObject) -> JsonObject:
        """See `WorkerBenchmark.location`."""
        data = task["data"]
        if data["world"] != self._world(data["kind"]):
            raise UserError(
                f"task {task['id']} is of tau2 {data['world']['version']} with other data than what is installed",
                "run `dvc repro rollouts`, or name the environment that it was made with in machine.benchmarks.tau2",
            )
        return {"domain": data["kind"], "task_id": data["task"]}

    def open(self, task: JsonObject, key: str = "") -> SimulatedEpisode:
        """Open a task; `key` names the randomness of the simulated user."""
        return SimulatedEpisode(self.pool, {**self.location(task), "max_steps": self.max_steps}, self.user, key)

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """1 if the user ended the conversation, the database is right and everything was told; from the record."""
        return self.pool.call("evaluate", **self.location(task), messages=messages, max_steps=self.max_steps)

    def reference(self, task: JsonObject) -> list[Message]:
        """The gold actions, then a message that tells what has to be told; empty where tau2 gives no actions."""
        gold = self.pool.call("reference", **self.location(task))
        if gold["actions"] is None:
            return []
        messages = [tool_call(action["name"], action["arguments"]) for action in gold["actions"]]
        for message, action in zip(messages, gold["actions"], strict=True):
            if action["compare"] is not None:
                message["tool_calls"][0]["compare"] = action["compare"]
        closing = ", ".join(gold["informs"]) or "Done."
        return [*messages, {"role": "assistant", "content": closing, "informs": gold["informs"]}]


def _unworded(schema: JsonObject) -> JsonObject:
    """A tool's schema without its descriptions. An argument may be called description, too; it is then an object."""
    return json.loads(
        json.dumps(schema),
        object_hook=lambda part: {k: v for k, v in part.items() if k != "description" or isinstance(v, dict)},
    )
