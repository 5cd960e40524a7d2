"""Rollouts for a stage: collected in this process or, on a cluster, by jobs, each of which takes a shard of the tasks.

A `RolloutBatch` says which rollouts in a form that can be sent away, so that diagnosis, calibration and evaluation
differ only in who acts where. Rollouts depend on (seed, task, trial) alone, so that they are the same in any number of
shards.
Here nothing comes between a stage and `captrain.rollouts.collection.collect`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from captrain.benchmarks import load_benchmark
from captrain.config import Component, Machine
from captrain.contract import Target
from captrain.execution import launch
from captrain.models import Adapter
from captrain.policies import Policy, load_policy
from captrain.records import Purpose, Rollout, Task
from captrain.rollouts.collection import collect

SHARDS = 4
"""Jobs for one batch: each takes several times as long as it takes to come up, and there are seldom more GPUs free."""


class TargetSource(Protocol):
    """Loader of a target that is no benchmark component; `identity()` gives the fields that decide its behaviour."""

    def load(self) -> Target:
        """Load the target, wherever this is called."""
        ...

    def identity(self) -> object:
        """Return the fields that decide its behaviour (see `captrain.execution.fingerprint.identity_of`)."""
        ...


@dataclass(frozen=True)
class PolicySource:
    """A policy that is built where it first acts, so that it can be sent to a job.

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
        """The policy, built."""
        return load_policy(self.component, self.base, self.machine, batch=self.machine.batch)

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide its behaviour."""
        return self.component, self.base

    def __reduce__(self) -> tuple[type["PolicySource"], tuple[object, ...]]:
        # Without the policy, which may hold a model.
        return PolicySource, (self.component, self.base, self.machine)


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts of one purpose, to be collected.

    Args:
        name: what a reader calls it.
        policy: who acts; one that is built already acts here alone.
        source: where: a benchmark's component, or what else a target is loaded from.
        tasks: of the purpose's own split.
        purpose: what the rollouts are spent on.
        seed: run seed.
        trials: rollouts per task.
        adapter: None for the base.
        retries: new attempts at a rollout that ended in an infrastructure error.
    """

    name: str
    policy: PolicySource | Policy
    source: Component | TargetSource
    tasks: list[Task]
    purpose: Purpose
    seed: int
    trials: int = 1
    adapter: Adapter | None = None
    retries: int = 2

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the rollouts."""
        adapter = self.adapter.digest if self.adapter else ""
        return self.policy, self.source, self.tasks, self.purpose, self.seed, self.trials, adapter, self.retries

    def collect(self, target: Target, *, quiet: bool = False) -> list[Rollout]:
        """Collect it in this process (see `captrain.rollouts.collection.collect`)."""
        policy = self.policy.policy if isinstance(self.policy, PolicySource) else self.policy
        return collect(
            policy,
            target,
            self.tasks,
            purpose=self.purpose,
            seed=self.seed,
            trials=self.trials,
            adapter=self.adapter,
            retries=self.retries,
            quiet=quiet,
        )

    def shards(self, count: int) -> list["RolloutBatch"]:
        """Split into at most `count` batches, with the tasks in their order."""
        size = max(1, -(-len(self.tasks) // count))
        slices = [self.tasks[start : start + size] for start in range(0, len(self.tasks), size)]
        return [
            replace(self, name=f"{self.name} {number} of {len(slices)}", tasks=tasks)
            for number, tasks in enumerate(slices, start=1)
        ]


def collect_shard(batch: RolloutBatch) -> list[Rollout]:
    """Collect a batch whose policy is a `PolicySource`, with a target of its own, wherever this is called; no progress
    bar but in the log of a job.

    Raises:
        UserError: a task of another split, or the target cannot be loaded here.
        EnvironmentFault: the environment broke its contract; what is whole is kept.
    """
    assert isinstance(batch.policy, PolicySource)
    source = batch.source
    target = load_benchmark(source, batch.policy.machine) if isinstance(source, Component) else source.load()
    return batch.collect(target, quiet=True)


def collect_batch(batch: RolloutBatch, target: Target, label: str) -> list[Rollout]:
    """Collect a batch where its policy acts: here in `target` or, on a cluster, as an array of jobs named by `label`.

    Returns:
        Rollouts in the order (task, trial).

    Raises:
        As `collect_shard`, and as `captrain.execution.launch.run`.
    """
    if not isinstance(batch.policy, PolicySource) or batch.policy.machine.launcher == "local":
        return batch.collect(target)
    shards = launch.run(collect_shard, batch.shards(SHARDS), batch.policy.machine, label)
    return [rollout for rollouts in shards for rollout in rollouts]
