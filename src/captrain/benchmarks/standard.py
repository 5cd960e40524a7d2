"""Environments of other standards as benchmarks: what those of OpenEnv and verifiers have in common.

Each runs in a worker, in an environment of its own that has the standard's package, and is played and scored by the
standard's own runner. What the contract asks for and a standard does not have is declared in `absences`, which
`captrain plan` reads before anything is spent: no reference solutions, so that whatever is held beside one needs a
language model. A score is a function of task and record here as everywhere: the record is played again from the start,
and the environment's own reward of that counts. One that then answers otherwise than the record says (its reward hangs
on a clock, on a judge or on a state that outlives an episode) gives no score, and the message says so.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from captrain.benchmarks.pool import Pool, workers_code
from captrain.benchmarks.simulation import WorkerBenchmark, divided, pool_of
from captrain.errors import UserError
from captrain.records import JsonObject, Message
from captrain.run import Machine

SPLITS = ("discovery", "training", "test")
START = 300.0
"""Seconds until a worker must answer: it imports much, and may start a server."""
ROUNDING = 9
"""Decimal places of a reward: sums of what steps are worth differ in their last ones."""


class StandardEnvironment(WorkerBenchmark):
    """A benchmark behind the runner of a standard.

    Args:
        machine: names the installation, where `captrain benchmark install` did not make it.
        source: what the worker opens; part of the tasks' names.
        settings: what the worker is told, as JSON.
        scale: the least and the most that an episode can earn; rewards are put between 0 and 1 by it.
        success: a rollout has passed from this reward on, on the scale from 0 to 1.
        shares: of discovery and training, where the environment does not have the three splits; the rest is the test.

    Raises:
        UserError: the scale is empty, or the shares leave nothing to test on.
    """

    absences: ClassVar[Mapping[str, str]]
    """Requests of the contract that the standard has no answer to -> what follows."""

    def __init__(
        self,
        machine: Machine | None,
        source: str,
        settings: JsonObject,
        *,
        scale: tuple[float, float],
        success: float,
        shares: tuple[float, float],
    ) -> None:
        if not scale[0] < scale[1]:
            raise UserError(f"benchmark.scale = {list(scale)} is no range", "name the least reward, then the most")
        if sum(shares) >= 1:
            raise UserError(
                f"benchmark.discovery + benchmark.training = {sum(shares):g} leaves nothing to test on",
                "lower one of them",
            )
        super().__init__(machine)
        self.settings, self.scale, self.success, self.shares = settings, scale, success, shares
        self.name = "-".join(part for part in source.replace("_", "-").split("/") if part)[-60:] or self.package

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        advice, settings = f"Run `captrain benchmark install {self.package}`.", json.dumps(self.settings)
        return pool_of(self.machine, self.package, settings, advice=advice, start_timeout=START)

    @cached_property
    def _survey(self) -> JsonObject:
        """Answer of the worker on the environment: `splits` (name -> tasks, None for no end), `tools`, `about`."""
        return self.pool.call("survey")

    @cached_property
    def about(self) -> JsonObject:
        """Versions and hashes, where tasks are from, what the reward is, what is absent."""
        return {
            **self._survey["about"],
            "splits": self._survey["splits"],
            "reward": f"{self.package}'s own, of the record played again; from {self.scale[0]:g} to {self.scale[1]:g}",
            "absences": sorted(self.absences),
            "worker": workers_code(self.package),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of the first task; an episode has its own."""
        return self._survey["tools"]

    def size(self, split: str) -> int | None:
        """Count the tasks of a split; None where there is no end to them."""
        listing = self._survey["splits"]
        name, part, shares = self._part(split)
        sizes = [*listing.values()] if name is None else [listing[name]]
        if None in sizes:
            return None
        return len(divided([""] * sum(sizes), shares)[part])

    def _part(self, split: str) -> tuple[str | None, int, Sequence[float]]:
        """Return the source of a split: a split of the environment's (None: all of them), and which part of it when it
        is divided in these shares."""
        listing, index = self._survey["splits"], SPLITS.index(split)
        if all(name in listing for name in SPLITS):
            return split, 0, (1.0,)
        if "train" in listing and "test" in listing:
            first = self.shares[0] / sum(self.shares)
            return ("test", 0, (1.0,)) if split == "test" else ("train", index, (first, 1 - first))
        return None, index, (*self.shares, 1 - sum(self.shares))

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """The first `count` tasks of a split; fewer where it has fewer."""
        (name, part, shares), size = self._part(split), self.size(split)
        count = count if size is None else min(count, size)
        # The first tasks of the source: of a split of the environment's, or of all of them one after another.
        listing, most = self._survey["splits"], math.ceil((count + 1) / shares[part]) + len(shares)
        endless = [source for source in listing if listing[source] is None][:1]
        sources = [name] if name is not None else endless or [*listing]
        sizes = {source: most if listing[source] is None else min(most, listing[source]) for source in sources}
        places = [f"{source}/{index}" for source in sources for index in range(sizes[source])][:most]
        return [
            {
                "id": f"{self.package}/{self.name}/{place}",
                "split": split,
                "data": {"place": place, "world": self._survey["world"]},
            }
            for place in divided(places, shares)[part][:count]
        ]

    def location(self, task: JsonObject) -> JsonObject:
        """See `WorkerBenchmark.location`."""
        if task["data"]["world"] != self._survey["world"]:
            raise UserError(
                f"task {task['id']} is of another version of {self.name} than what is there now",
                "run `dvc repro rollouts`, or put back the version that it was made with",
            )
        return {"place": task["data"]["place"]}

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """The environment's reward of the record, which is played again.

        Raises:
            UserError: it is beyond the scale.
        """
        verdict = self.pool.call("evaluate", **self.location(task), messages=messages)
        low, high = self.scale
        reward = round((verdict["reward"] - low) / (high - low), ROUNDING)
        if not 0 <= reward <= 1:
            raise UserError(
                f"{self.name} rewarded {task['id']} with {verdict['reward']:g}, beyond benchmark.scale = "
                f"[{low:g}, {high:g}]",
                "set benchmark.scale to the least and the most that an episode can earn",
            )
        return {"reward": reward, "success": reward >= self.success, "parts": verdict["parts"]}
