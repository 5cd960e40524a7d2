"""ToolSandbox: a phone with contacts, messages, reminders and settings, in ToolSandbox's own environment.

Milestones score its 129 base scenarios from 0 to 1; a scenario passes if the similarity is perfect. 28 scenarios ask
outside services. They are played if the services' answers are kept, and are listed as not runnable otherwise. There are
no reference solutions. Tasks carry what their milestones check, which is the benchmark's own reference. Users install
ToolSandbox from its own repository, under its own licence, and name it in `machine.benchmarks.toolsandbox`.

ToolSandbox has no splits. Ours go by families: variants of a scenario stay together, so that no variant of a test
scenario is used for diagnosis. The paper evaluates on all 129 scenarios; numbers on our test split are not comparable.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from captrain.benchmarks.listed import DividedBenchmark, Entry
from captrain.benchmarks.pool import Pool
from captrain.benchmarks.simulation import TaskDict, identity_of, pool_of
from captrain.contract import Policy
from captrain.records import JsonObject, Message
from captrain.run import Machine

Category = Literal["single_tool_call", "multiple_tool_call", "multiple_user_turn", "insufficient_information"]
START = "2026-01-15T10:00:00"
"""Default instant at which scenarios begin."""
VARIANT = re.compile(
    r"_(alt|implicit|twice|ambiguous|multiple_user_turn|insufficient_information|wifi_off|cellular_off|low_battery_mode"
    r"|with_\w+|and_\w+|no_\w+)"
)
"""Parts of a scenario's name that its family's name lacks."""


def instant(text: str) -> str:
    """Check that a text is an ISO instant, and return it.

    Raises:
        ValueError: it is not.
    """
    datetime.fromisoformat(text)
    if not text.isascii() or not text.isprintable():  # Python's parser accepts such characters at the end
        raise ValueError(f"{text!r} is not an instant")
    return text


def family(name: str) -> str:
    """The family of a scenario, by its name: variants share one."""
    return VARIANT.sub("", name)


def split_families(categories: Mapping[str, str], discovery: float, training: float) -> dict[str, list[str]]:
    """Divide scenarios into splits by whole families.

    Families are taken in the order of the hashes of their names. Each goes to the split that lags most behind its share
    of the family's categories.

    Args:
        categories: scenario -> category.
        discovery: share of the discovery split.
        training: share of the training split.
    """
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


class ToolSandbox(DividedBenchmark):
    """The benchmark.

    Args:
        machine: names the installation.
        categories: of scenarios.
        clock: the instant at which every scenario begins (UTC); scenario data are relative to it.
        discovery: share of the scenarios for diagnosis.
        training: share of the scenarios for training; the rest is the test split.
        answers: folder with answers of outside services. With it, and with RAPID_API_KEY in the environment for missing
            answers, all scenarios are played. None: scenarios that ask services are left out.
        user: plays the user. None: a script that leaves after the agent's first message, for checks only.

    Raises:
        UserError: the shares leave no test tasks.
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
        self._environment = {"CAPTRAIN_CLOCK": clock}
        if answers is not None:
            self._environment["CAPTRAIN_ANSWERS"] = str(Path(answers).expanduser().absolute())

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        return pool_of(self.machine, self.package, advice=self.advice, env=self._environment)

    @cached_property
    def _scenarios(self) -> dict[str, Entry]:
        entries: list[Entry] = self.pool.call("list_tasks")["tasks"]
        return {entry["id"]: entry for entry in entries if entry["category"] in self.kinds}

    @cached_property
    def not_runnable(self) -> dict[str, str]:
        """Scenarios that cannot be played here, with the reason; they are in no split."""
        if "CAPTRAIN_ANSWERS" in self._environment:
            return {}
        return {
            name: f"needs benchmark.answers: {', '.join(entry.get('external', []))}"
            for name, entry in self._scenarios.items()
            # If information is missing, the agent should not reach the tool.
            if entry.get("external") and entry["category"] != "insufficient_information"
        }

    @cached_property
    def splits(self) -> Mapping[str, Sequence[Entry]]:
        """Tasks by split."""
        runnable = {name: entry["category"] for name, entry in self._scenarios.items() if name not in self.not_runnable}
        splits = split_families(runnable, *self.shares[:2])
        return {split: [self._scenarios[name] for name in names] for split, names in splits.items()}

    @cached_property
    def about(self) -> JsonObject:
        """Hash of the installation, clock, split sizes, user, and scenarios that are not runnable."""
        return {**super().about, "user": identity_of(self.user), "not_runnable": self.not_runnable}

    def reference(self, task: TaskDict) -> list[Message]:
        """No reference is known."""
        return []
