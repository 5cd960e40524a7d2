"""One adapter by GRPO from one job: read from its workspace where it is there already, else trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from captrain.config import Machine, build
from captrain.contract import Target
from captrain.execution import code_digest
from captrain.records import JsonObject, digest
from captrain.training import processes
from captrain.training.jobs import Job, Learner, Trained, learner
from captrain.training.recipe import GRPO
from captrain.training.workspace import Workspace

WORKSPACES = Path(".cache/adapters")


@dataclass(frozen=True)
class Training:
    """GRPO of one job (see `captrain.training.processes.SharedTraining`). What it loads is of this process alone."""

    job: Job

    def __reduce__(self) -> tuple[type["Training"], tuple[Job]]:
        return type(self), (self.job,)

    @property
    def name(self) -> str:
        """Name of the adapter."""
        return self.job.name

    @property
    def machine(self) -> Machine:
        """Machine with the layout over processes and GPUs."""
        return self.job.machine

    def on(self, machine: Machine) -> "Training":
        """Return the same training with another layout."""
        return type(self)(replace(self.job, machine=machine))

    @cached_property
    def policy(self) -> Learner:
        """Samples."""
        return learner(self.job.policy, self.job.base, self.job.machine, purpose=self.job.name)

    @cached_property
    def targets(self) -> Sequence[Target]:
        """The job's environments."""
        return [environment.target(self.job.machine) for environment in self.job.environments]

    @cached_property
    def recipe(self) -> GRPO:
        """The trainer."""
        return build(self.job.trainer, GRPO)

    def identity(self) -> list[object]:
        """Return all that decides the result beside the code, as JSON."""
        fingerprints = [target.fingerprint for target in self.targets]
        recipe = [self.job.trainer.target, self.recipe.identity()]
        return [self.policy.digest, fingerprints, recipe, self.job.plan_identity()]

    def portions(self) -> tuple[int, str]:
        """Return the groups of a step, and their name in messages."""
        return self.recipe.groups_per_step, "trainer.groups_per_step groups of a step"

    def fit(self, workspace: Path) -> JsonObject:
        """Train in this process; the fields of `Trained` but name and folder."""
        from captrain.training import grpo  # torch and TRL

        return grpo.fit(self.recipe, self.job, self.policy, self.targets, workspace)

    def trained(self, workspace: Path) -> Trained:
        """Load the adapter from its workspace, training it first if it is not there.

        Args:
            workspace: named by what decides the adapter.
        """
        place = Workspace(workspace, self.name, scratch=processes.SCRATCH)
        return Trained(self.name, folder=place.adapter, **place.result(lambda: processes.fit(self, workspace)))


def train(job: Job) -> Trained:
    """Train one adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the environment's file or the base is missing or damaged, or the adapter was altered.
        EnvironmentFault: the environment broke its contract.
        UserError: the processes of `machine.accelerate` cannot share the work, or died.
    """
    training = Training(job)
    return training.trained(WORKSPACES / digest(code_digest(train), *training.identity()))
