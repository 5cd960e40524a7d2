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

from captrain.benchmarks.pool import Pool
from captrain.benchmarks.scripted import ScriptedBenchmark
from captrain.benchmarks.simulation import identity_of, pool_of
from captrain.contract import Policy
from captrain.records import JsonObject, Message
from captrain.run import Machine

Category = Literal["single_tool_call", "multiple_tool_call", "multiple_user_turn", "insufficient_information"]
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


class ToolSandbox(ScriptedBenchmark):
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

    name = package = "toolsandbox"
    title = "ToolSandbox"
    advice = "Make a Python 3.11 environment from ToolSandbox's own repository (apple/ToolSandbox), as its README says."
    reward = "similarity to the milestones; passed where it is 1"

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
        super().__init__(machine, categories, discovery, training, user)
        self.clock = clock
        self.answers = None if answers is None else Path(answers).expanduser().absolute()

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        answers = {} if self.answers is None else {"CAPTRAIN_ANSWERS": str(self.answers)}
        env = {"CAPTRAIN_CLOCK": self.clock, **answers}
        return pool_of(self.machine, self.package, advice=self.advice, env=env)

    @cached_property
    def _world(self) -> dict[str, str]:
        """Name of the benchmark and what identifies its data, on which every task depends."""
        return {"benchmark": "toolsandbox", **self.pool.call("hello")["data"]}

    @cached_property
    def _scenarios(self) -> dict[str, JsonObject]:
        scenarios = self.pool.call("list_tasks")["tasks"]
        return {scenario["name"]: scenario for scenario in scenarios if scenario["category"] in self.kinds}

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
    def _splits(self) -> dict[str, list[JsonObject]]:
        runnable = {
            name: scenario["category"] for name, scenario in self._scenarios.items() if name not in self.not_runnable
        }
        splits = split_families(runnable, *self.shares[:2])
        return {split: [{"id": name, **self._scenarios[name]} for name in names] for split, names in splits.items()}

    @cached_property
    def about(self) -> JsonObject:
        """Hash of the installation, clock, split sizes, user, and what is not runnable."""
        return {**super().about, "user": identity_of(self.user), "not_runnable": self.not_runnable}

    def details(self, entry: JsonObject) -> JsonObject:
        """See `ScriptedBenchmark.details`; with what its milestones check."""
        return {**super().details(entry), "milestones": entry["milestones"]}

    def reference(self, task: JsonObject) -> list[Message]:
        """None is known."""
        return []
