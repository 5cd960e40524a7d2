"""Rollouts for a stage: played in this process or, on a cluster, by jobs, each of which plays a shard of the tasks.

A `Part` says what is to be played in a form that can be sent away, so that diagnosis, calibration and evaluation differ
only in who acts where. Rollouts depend on (seed, task, trial) alone, so that they are the same in any number of shards.
Here nothing comes between a stage and `captrain.rollouts.collection.collect`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from captrain.benchmarks import load_benchmark
from captrain.config import Component, Machine
from captrain.contract import Target
from captrain.execution import launch
from captrain.models import Adapter
from captrain.policies import Policy, load_policy
from captrain.records import Purpose, Rollout, Task
from captrain.rollouts.collection import collect

SHARDS = 4
"""Jobs for one part: each plays several times as long as it takes to come up, and there are seldom more GPUs free."""


class Source(Protocol):
    """Where a target comes from, when it is not a benchmark's component; `identity()` says what decides it."""

    def load(self) -> Target:
        """The target, wherever this is called."""
        ...

    def identity(self) -> Any:
        """What decides its behaviour (see `captrain.execution.fingerprint.identity_of`)."""
        ...


@dataclass(frozen=True)
class Acting:
    """A policy that is built where it first plays, so that it can be sent to a job.

    Args:
        component: the `policy` section.
        base: folder that the base stage has left.
        machine: where it acts.
    """

    component: Component
    base: Path
    machine: Machine

    @cached_property
    def policy(self) -> Policy:
        """Itself, built."""
        return load_policy(self.component, self.base, self.machine, batch=self.machine.batch)

    def identity(self) -> tuple[Any, ...]:
        """What decides what it does."""
        return self.component, self.base

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the policy, which may hold a model.
        return Acting, (self.component, self.base, self.machine)


@dataclass(frozen=True)
class Part:
    """Rollouts of one purpose.

    Args:
        name: what a reader calls it.
        policy: who acts; one that is built already plays here alone.
        source: where: a benchmark's component, or what else a target is loaded from.
        tasks: of the purpose's own split.
        purpose: what the rollouts are spent on.
        seed: run seed.
        trials: rollouts per task.
        adapter: None for the base.
        retries: new attempts at a rollout that ended in an infrastructure error.
    """

    name: str
    policy: Acting | Policy
    source: Component | Source
    tasks: list[Task]
    purpose: Purpose
    seed: int
    trials: int = 1
    adapter: Adapter | None = None
    retries: int = 2

    def identity(self) -> tuple[Any, ...]:
        """What decides its rollouts."""
        acting = self.adapter.digest if self.adapter else ""
        return self.policy, self.source, self.tasks, self.purpose, self.seed, self.trials, acting, self.retries

    def collect(self, target: Target, *, quiet: bool = False) -> list[Rollout]:
        """Play it in this process (see `captrain.rollouts.collection.collect`)."""
        policy = self.policy.policy if isinstance(self.policy, Acting) else self.policy
        return collect(
            policy, target, self.tasks, purpose=self.purpose, seed=self.seed, trials=self.trials,
            adapter=self.adapter, retries=self.retries, quiet=quiet,
        )  # fmt: skip

    def shards(self, count: int) -> list["Part"]:
        """At most `count` parts, with the tasks in their order."""
        size = max(1, -(-len(self.tasks) // count))
        cut = [self.tasks[start : start + size] for start in range(0, len(self.tasks), size)]
        return [
            replace(self, name=f"{self.name} {at} of {len(cut)}", tasks=tasks) for at, tasks in enumerate(cut, start=1)
        ]


def play(part: Part) -> list[Rollout]:
    """Play a part whose policy is `Acting`, with a target of its own, wherever this is called; no progress bar but in
    the log of a job.

    Raises:
        UserError: a task of another split, or the target cannot be loaded here.
        EnvironmentFault: the environment broke its contract; what is whole is kept.
    """
    assert isinstance(part.policy, Acting)
    source = part.source
    target = load_benchmark(source, part.policy.machine) if isinstance(source, Component) else source.load()
    return part.collect(target, quiet=True)


def played(part: Part, target: Target, label: str) -> list[Rollout]:
    """Play a part where its policy acts: here in `target` or, on a cluster, as an array of jobs named by `label`.

    Returns:
        Rollouts in the order (task, trial).

    Raises:
        As `play`, and as `captrain.execution.launch.run`.
    """
    if not isinstance(part.policy, Acting) or part.policy.machine.launcher == "local":
        return part.collect(target)
    found = launch.run(play, part.shards(SHARDS), part.policy.machine, label)
    return [rollout for rollouts in found for rollout in rollouts]
