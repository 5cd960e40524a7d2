"""ToolSandbox: a phone with contacts, messages, reminders and settings, in ToolSandbox's own environment.

Its 129 base scenarios are scored by milestones, 0 to 1; a scenario is passed when the similarity is perfect. 28 of them
ask outside services: they are played where their answers are kept, and are listed as not runnable otherwise. There are
no reference solutions; tasks carry what their milestones check, which is the benchmark's own reference. ToolSandbox is
installed by the user, from its own repository and under its own licence, and found through
`machine.benchmarks.toolsandbox`.

ToolSandbox has no splits. Ours are by families: scenarios that are variants of each other stay together, so that no
variant of a test scenario is ever diagnosed on. The paper evaluates on all 129; numbers on our test split are not its.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from captrain.benchmarks.pool import WORKERS, Pool, code_of
from captrain.benchmarks.simulation import SimulatedEpisode, identity_of, installation
from captrain.config import Machine
from captrain.errors import UserError
from captrain.policies import Policy
from captrain.records import JsonObject, Message

Category = Literal["single_tool_call", "multiple_tool_call", "multiple_user_turn", "insufficient_information"]
ADVICE = "Make a Python 3.11 environment from ToolSandbox's own repository (apple/ToolSandbox), as its README says."
START = "2026-01-15T10:00:00"
"""Instant at which scenarios begin where nothing else is set."""
VARIANT = re.compile(
    r"_(alt|implicit|twice|ambiguous|multiple_user_turn|insufficient_information|wifi_off|cellular_off|low_battery_mode"
    r"|with_\w+|and_\w+|no_\w+)"
)
"""Parts that a scenario's name adds to that of its family."""


def instant(text: str) -> str:
    """Check that a text is an instant, and return it; a ValueError where it is none."""
    datetime.fromisoformat(text)
    if not text.isascii() or not text.isprintable():  # which Python's parser takes at the end
        raise ValueError(f"{text!r} is no instant")
    return text


def family(name: str) -> str:
    """The family of a scenario, by its name: variants share one."""
    return VARIANT.sub("", name)


def split_families(categories: Mapping[str, str], discovery: float, training: float) -> dict[str, list[str]]:
    """Scenarios by split, given the category of each: whole families, taken in the order of the hashes of their names,
    each to the split that lags most behind its share of those categories."""
    families: dict[str, list[str]] = {}
    for name in categories:
        families.setdefault(family(name), []).append(name)
    shares = {"discovery": discovery, "training": training, "test": 1 - discovery - training}
    splits: dict[str, list[str]] = {split: [] for split in shares}
    totals, counts = Counter[str](), {split: Counter[str]() for split in shares}
    for stem in sorted(families, key=lambda stem: hashlib.sha256(stem.encode()).hexdigest()):
        kinds = Counter(categories[name] for name in families[stem])
        totals += kinds
        lags = {
            split: sum(count * (share * totals[kind] - counts[split][kind]) for kind, count in kinds.items())
            for split, share in shares.items()
        }
        behind = max(lags, key=lambda split: lags[split])
        splits[behind] += families[stem]
        counts[behind] += kinds
    return splits


class ToolSandbox:
    """The benchmark.

    Args:
        machine: names the installation.
        categories: of scenarios.
        clock: the instant at which every scenario begins (UTC); scenario data are relative to it.
        discovery: share of the scenarios for diagnosis.
        training: share of the scenarios for training; the rest is the test split.
        answers: folder that keeps the answers of outside services; with it, and RAPID_API_KEY in the environment for
            those that are not kept yet, all scenarios are played. None: those that ask are left out.
        user: who plays the user; None: a script that leaves after the agent's first words, for checks only.

    Raises:
        UserError: the shares leave nothing to test on.
    """

    name = "toolsandbox"

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        categories: Annotated[list[Category], Field(min_length=1)],
        clock: Annotated[str, AfterValidator(instant)] = START,
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.35,
        training: Annotated[float, Field(gt=0, lt=1)] = 0.2,
        answers: Annotated[str, Field(min_length=1)] | None = None,
        user: Policy | None = None,
    ) -> None:
        if discovery + training >= 1:
            raise UserError(
                f"benchmark.discovery + benchmark.training = {discovery + training:g} leaves no scenario to test on",
                "lower one of them",
            )
        self.machine, self.categories, self.clock = machine, categories, clock
        self.discovery, self.training, self.user = discovery, training, user
        self.answers = None if answers is None else Path(answers).expanduser().absolute()

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        installed = installation(self.machine, "toolsandbox", ADVICE)
        return Pool(
            "toolsandbox",
            [str(Path(installed.python).expanduser()), str(WORKERS / "toolsandbox_worker.py")],
            processes=installed.processes,
            timeout=installed.timeout,
            env={
                "CAPTRAIN_CLOCK": self.clock,
                **({} if self.answers is None else {"CAPTRAIN_ANSWERS": str(self.answers)}),
            },
        )

    @cached_property
    def _world(self) -> dict[str, str]:
        """Name of the benchmark and what identifies its data, on which every task depends."""
        return {"benchmark": "toolsandbox", **self.pool.call("hello")["data"]}

    @cached_property
    def _scenarios(self) -> dict[str, JsonObject]:
        scenarios = self.pool.call("list_tasks")["tasks"]
        return {scenario["name"]: scenario for scenario in scenarios if scenario["category"] in self.categories}

    @cached_property
    def not_runnable(self) -> dict[str, str]:
        """Scenarios that cannot be played here, with the reason; they are in no split."""
        if self.answers is not None:
            return {}
        return {
            name: f"needs benchmark.answers: {', '.join(scenario['external'])}"
            for name, scenario in self._scenarios.items()
            # Where information is missing the point is not to reach the tool.
            if scenario["external"] and scenario["category"] != "insufficient_information"
        }

    @cached_property
    def _splits(self) -> dict[str, list[str]]:
        runnable = {
            name: scenario["category"] for name, scenario in self._scenarios.items() if name not in self.not_runnable
        }
        return split_families(runnable, self.discovery, self.training)

    @cached_property
    def about(self) -> JsonObject:
        """Hash of the installation, clock, split sizes, user, and what is not runnable."""
        return {
            **self._world,
            "splits": {split: len(names) for split, names in self._splits.items()},
            "user": identity_of(self.user),
            "reward": "similarity to the milestones; passed where it is 1",
            "not_runnable": self.not_runnable,
            "worker": code_of("toolsandbox_worker.py"),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of all scenarios; an episode has its own."""
        return self.pool.call("tools")["tools"]

    def size(self, split: str) -> int:
        """Count the tasks of a split."""
        return len(self._splits[split])

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """The first `count` tasks of a split."""
        return [
            {
                "id": f"toolsandbox/{name}",
                "split": split,
                "data": {
                    "kind": self._scenarios[name]["category"],
                    "task": name,
                    "milestones": self._scenarios[name]["milestones"],
                    "world": self._world,
                },
            }
            for name in self._splits[split][:count]
        ]

    def _location(self, task: JsonObject) -> dict[str, str]:
        if task["data"]["world"] != self._world:
            raise UserError(
                f"task {task['id']} is of another ToolSandbox, or another clock, than what is installed and set",
                "run `dvc repro rollouts`, or name its environment in machine.benchmarks.toolsandbox.python",
            )
        return {"task_id": task["data"]["task"]}

    def open(self, task: JsonObject, key: str = "") -> SimulatedEpisode:
        """Open a task; `key` names the randomness of the simulated user."""
        return SimulatedEpisode(self.pool, self._location(task), self.user, key)

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """The similarity of the record, which is played again in a fresh world."""
        return self.pool.call("evaluate", **self._location(task), messages=messages)

    def reference(self, task: JsonObject) -> list[Message]:
        """None is known."""
        return []

    def idle(self, task: JsonObject) -> list[Message]:
        """The opening, to which nobody says anything."""
        return self.pool.call("idle", **self._location(task))["messages"]
