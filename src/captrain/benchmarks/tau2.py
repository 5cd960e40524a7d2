"""tau2-bench: customers of an airline and a shop, played by a simulated user, in tau2's own environment.

The paper's benchmark is 0.2.1-dev, the last version whose tasks are all scored by database and communicated information
alone; 1.0 changed 53 tasks. Users install tau2 from its own repository and name it in `machine.benchmarks.tau2`. The
package called tau2 on the public index is an unrelated project. Nothing starts before it is needed, so a configuration
can be composed and validated without tau2.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, TypedDict

from pydantic import Field

from captrain.benchmarks.listed import Entry, ListedBenchmark
from captrain.benchmarks.pool import workers_code
from captrain.benchmarks.simulation import TaskDict, divided, identity_of
from captrain.contract import Policy
from captrain.errors import UserError
from captrain.records import JsonObject
from captrain.run import Machine

Domain = Literal["airline", "retail", "mock"]


class DomainTasks(TypedDict):
    """Task ids of a domain by tau2's own splits, and why some tasks cannot be played."""

    splits: dict[str, list[str]]
    not_runnable: dict[str, str]


class Tau2(ListedBenchmark):
    """The benchmark.

    Args:
        machine: names the installation.
        domains: the domains to play; their tasks are interleaved in proportion.
        version: the expected version. Another one is refused, because its tasks differ.
        max_steps: of one conversation, as tau2 counts them (messages and rounds of tool results).
        discovery: share of tau2's train split for diagnosis; the rest is for training. The test split is tau2's own.
        user: plays the customer. None: a script that reads the scenario aloud and leaves, for checks only.
    """

    name = package = "tau2"
    title = "tau2-bench"
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
        self.domains, self.version, self.discovery = domains, version, discovery
        self.limits = {"max_steps": max_steps}

    @cached_property
    def _installed(self) -> tuple[str, dict[str, dict[str, str]]]:
        """The installed version, and by domain the hashes of its files."""
        hello = self.pool.call("hello")
        version, hashes = str(hello["version"]), hello["data"]
        if not version.startswith(self.version.replace("-", ".")):
            raise UserError(
                f"benchmark tau2: version {version} is installed where benchmark.version = {self.version}",
                "set benchmark.version to the installed version, or name another environment in "
                "machine.benchmarks.tau2.python: tasks differ between versions",
            )
        if absent := [domain for domain in self.domains if "db" not in hashes[domain]]:
            raise UserError(
                f"benchmark tau2: the data of {', '.join(absent)} are not where tau2 looks for them",
                "set machine.benchmarks.tau2.data to the `data` folder of tau2-bench's repository",
            )
        return version, hashes

    def world(self, kind: str) -> dict[str, str]:
        """See `ListedBenchmark.world`."""
        version, hashes = self._installed
        named = {name: hashes[kind][name] for name in ("tasks", "db", "policy")}
        return {"benchmark": "tau2", "version": version, **named}

    @cached_property
    def about(self) -> JsonObject:
        """Version, hashes, split sizes, tasks that cannot be played, user and reward."""
        version, hashes = self._installed
        sizes = {
            split: {domain: sum(entry["category"] == domain for entry in entries) for domain in self.domains}
            for split, entries in self.splits.items()
        }
        return {
            "benchmark": "tau2",
            "version": version,
            "data": {domain: hashes[domain] for domain in self.domains},
            "splits": sizes,
            "not_runnable": {
                f"tau2/{domain}/{name}": reason
                for domain in self.domains
                for name, reason in self._listing[domain]["not_runnable"].items()
            },
            "user": identity_of(self.user),
            "reward": "database as it should be x everything told; conversations the user did not end score 0",
            **self.limits,
            "worker": workers_code(self.package),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of all domains; an episode has its own domain's. If domains describe a tool differently, as airline
        and retail do, the first domain's description counts."""
        schemas: dict[str, tuple[str, JsonObject]] = {}
        for domain in self.domains:
            for tool in self.pool.call("tools", domain=domain)["tools"]:
                name = tool["function"]["name"]
                first, schema = schemas.setdefault(name, (domain, tool))
                if _without_descriptions(schema) != _without_descriptions(tool):
                    raise UserError(
                        f"benchmark tau2: tool {name} takes other arguments in {domain} than in {first}",
                        f"play them apart: benchmark.domains=[{domain}]",
                    )
        return [tool for _, tool in schemas.values()]

    @cached_property
    def _listing(self) -> dict[str, DomainTasks]:
        self._installed  # noqa: B018  (checks the version before any task is given out)
        return {domain: self.pool.call("list_tasks", domain=domain) for domain in self.domains}

    @cached_property
    def splits(self) -> Mapping[str, Sequence[Entry]]:
        """Tasks by split, domains interleaved in proportion. A domain without splits (mock) is divided in three."""
        places: dict[str, list[tuple[float, Entry]]] = {"discovery": [], "training": [], "test": []}
        for domain in self.domains:
            original = self._listing[domain]["splits"]
            if "train" in original:
                train, test = original["train"], original["test"]
            else:
                train, test = divided(original["base"], (2 / 3, 1 / 3))
            parts = [*divided(train, (self.discovery, 1 - self.discovery)), test]
            for split, names in zip(places, parts, strict=True):
                for index, name in enumerate(names):
                    places[split].append((index / len(names), {"id": f"{domain}/{name}", "category": domain}))
        return {
            split: [entry for _, entry in sorted(listing, key=lambda place: place[0])]
            for split, listing in places.items()
        }

    def data(self, entry: Entry) -> JsonObject:
        """See `ListedBenchmark.data`: tau2 names a task within its domain."""
        return {**super().data(entry), "task": entry["id"].partition("/")[2]}

    def location(self, task: TaskDict) -> dict[str, str]:
        """See `WorkerBenchmark.location`."""
        return {"domain": task["data"]["kind"], **super().location(task)}


def _without_descriptions(schema: JsonObject) -> JsonObject:
    """A tool's schema without descriptions. An argument may be called description, too: its value is an object."""
    return json.loads(
        json.dumps(schema),
        object_hook=lambda part: {k: v for k, v in part.items() if k != "description" or isinstance(v, dict)},
    )
