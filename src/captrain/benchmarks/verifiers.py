"""Tasksets of verifiers as benchmarks, played and scored by verifiers' own runner in a worker.

captrain replaces the harness and the model. Tools, users and rewards are the taskset's. Tasks come from `load()`, in
order; an endless taskset yields as many as you ask for. verifiers has no reference solutions. `absences` declares this,
and `captrain plan` reports it before anything is spent.

Scoring replays the record from the start and takes the reward of that replay. If the environment answers differently in
the replay (its reward depends on a clock, a judge or state that outlives an episode), the rollout gets an error instead
of a score.
"""

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypedDict

from pydantic import Field

from captrain.benchmarks.pool import Pool, workers_code
from captrain.benchmarks.simulation import ScoreDict, TaskDict, WorkerBenchmark, divided, pool_of, require_test_share
from captrain.errors import UserError
from captrain.records import JsonObject, Message, Split
from captrain.run import Machine

SPLITS = ("discovery", "training", "test")
START = 300.0
"""Seconds until a worker must answer: it imports a lot and may start a server."""
ROUNDING = 9
"""Decimal places kept of a reward: sums of step rewards differ in the last ones."""


class Survey(TypedDict):
    """What the worker reports about a taskset.

    splits: number of tasks per split, None for an endless one. tools: those of the first task. world: versions and
    hashes on which every task depends. about: `world` and how tasks are made.
    """

    splits: dict[str, int | None]
    tools: list[JsonObject]
    world: dict[str, str]
    about: dict[str, str]


class Verifiers(WorkerBenchmark):
    """The benchmark.

    Args:
        machine: names the installation, unless `captrain benchmark install verifiers` made it.
        taskset: id of the taskset, a package installed beside verifiers.
        folder: folder of that package, if it is not installed.
        config: of the taskset.
        splits: additions to `config` for each of discovery, training and test, if the taskset has splits. Without them
            its tasks are divided by the shares below.
        turns: maximum number of assistant messages in an episode. It then ends with the reward earned so far.
        scale: lowest and highest reward of an episode, mapped to 0 and 1.
        success: a rollout passes from this reward on, on the scale from 0 to 1.
        discovery: share of the tasks for diagnosis.
        training: share of the tasks for training; the rest is the test split.

    Raises:
        UserError: the scale is empty, or the shares leave no test tasks.
    """

    package = "verifiers"
    advice = "Run `captrain benchmark install verifiers`."
    absences = {
        "reference": "verifiers has no reference solutions: steps that need them take a language model instead",
        "judge": "rewards judged by a model, several agents and tasks in containers are refused",
    }

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        taskset: Annotated[str, Field(min_length=1)],
        folder: str = "",
        config: JsonObject | None = None,
        splits: dict[str, JsonObject] | None = None,
        turns: Annotated[int, Field(ge=1)] = 50,
        scale: tuple[float, float] = (0.0, 1.0),
        success: Annotated[float, Field(gt=0, le=1)] = 1.0,
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.4,
        training: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    ) -> None:
        super().__init__(machine)
        self.low, self.high = scale
        if not self.low < self.high:
            raise UserError(
                f"benchmark.scale = {[self.low, self.high]} is empty", "name the lowest reward, then the highest"
            )
        require_test_share(discovery, training)
        self.settings = {
            "taskset": taskset,
            "folder": str(Path(folder).expanduser().resolve()) if folder else "",
            "config": config or {},
            "splits": splits or {"tasks": {}},
            "turns": turns,
        }
        self.success, self.shares = success, (discovery, training, 1 - (discovery + training))
        self.name = "-".join(filter(None, taskset.replace("_", "-").split("/")))[-60:] or self.package

    @cached_property
    def pool(self) -> Pool:
        """The workers, started on first use."""
        settings = json.dumps(self.settings)
        return pool_of(self.machine, self.package, settings, advice=self.advice, start_timeout=START)

    @cached_property
    def _survey(self) -> Survey:
        return self.pool.call("survey")

    @cached_property
    def about(self) -> JsonObject:
        """Versions, hashes, origin of the tasks, meaning of the reward, and what is missing."""
        return {
            **self._survey["about"],
            "splits": self._survey["splits"],
            "reward": f"verifiers' own, of the record played again; from {self.low:g} to {self.high:g}",
            "absences": sorted(self.absences),
            "worker": workers_code(self.package),
        }

    @cached_property
    def tools(self) -> list[JsonObject]:
        """The tools of the first task; an episode has its own."""
        return self._survey["tools"]

    def size(self, split: str) -> int | None:
        """Count the tasks of a split; None for an endless taskset."""
        sources, part, shares = self._part(split)
        sizes = [size for source in sources if (size := self._survey["splits"][source]) is not None]
        return len(divided([""] * sum(sizes), shares)[part]) if len(sizes) == len(sources) else None

    def _part(self, split: str) -> tuple[Sequence[str], int, Sequence[float]]:
        """The taskset's splits that a split of ours is taken from, and which part of them, divided by which shares."""
        listing, index = self._survey["splits"], SPLITS.index(split)
        if all(name in listing for name in SPLITS):
            return [split], 0, (1.0,)
        if "train" in listing and "test" in listing:
            first = self.shares[0] / (self.shares[0] + self.shares[1])
            return (["test"], 0, (1.0,)) if split == "test" else (["train"], index, (first, 1 - first))
        return [*listing], index, self.shares

    def tasks(self, split: Split, count: int) -> list[TaskDict]:
        """The first `count` tasks of a split, or fewer if it has fewer."""
        (sources, part, shares), size = self._part(split), self.size(split)
        count = count if size is None else min(count, size)
        # Enough tasks from the start of the sources for `count` of them to fall into this part.
        listing, most = self._survey["splits"], math.ceil((count + 1) / shares[part]) + len(shares)
        endless = [source for source in sources if listing[source] is None]
        places: list[str] = []
        for source in endless[:1] or sources:
            length = listing[source]
            places += [f"{source}/{index}" for index in range(most if length is None else min(most, length))]
        return [
            {
                "id": f"verifiers/{self.name}/{place}",
                "split": split,
                "data": {"place": place, "world": self._survey["world"]},
            }
            for place in divided(places[:most], shares)[part][:count]
        ]

    def location(self, task: TaskDict) -> dict[str, str]:
        """See `WorkerBenchmark.location`."""
        if task["data"]["world"] != self._survey["world"]:
            raise UserError(
                f"task {task['id']} is from another version of {self.name} than the installed one",
                "run `dvc repro rollouts`, or install the version that the task was made with",
            )
        return {"place": task["data"]["place"]}

    def hidden(self, task: TaskDict) -> JsonObject:
        """The fields that the taskset adds to a task's data: the right answer may be among them."""
        return self.pool.call("hidden", **self.location(task))

    def contacted(self) -> list[str]:
        """The other machines that the taskset has contacted since the last question."""
        return self.pool.call("contacted")

    def score(self, task: TaskDict, messages: list[Message]) -> ScoreDict:
        """The taskset's reward of the replayed record, mapped to 0..1.

        Raises:
            UserError: the reward is outside the scale.
        """
        verdict: ScoreDict = self.pool.call("evaluate", **self.location(task), messages=messages)
        reward = round((verdict["reward"] - self.low) / (self.high - self.low), ROUNDING)
        if not 0 <= reward <= 1:
            raise UserError(
                f"{self.name} rewarded {task['id']} with {verdict['reward']:g}, outside benchmark.scale = "
                f"[{self.low:g}, {self.high:g}]",
                "set benchmark.scale to the lowest and the highest reward that an episode can earn",
            )
        return {"reward": reward, "success": reward >= self.success, "parts": verdict["parts"]}
