"""One adapter from one job: cached in its workspace, or trained.

A job learns from rewards by GRPO, or from specialists by distillation (`captrain.training.student`). Both differ only
in the loss. The gates of a mixture (`captrain.training.gates`) are trained like an adapter.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from captrain.contract import CheckedEnvironment
from captrain.records import digest
from captrain.run import Machine, build, code_digest
from captrain.training import processes
from captrain.training.jobs import Distillation, GateJob, Job, Learner, StepResult, Trained, learner
from captrain.training.recipe import GRPO
from captrain.training.workspace import train_once

TRAININGS = Path(".cache/adapters")
"""Folder of workspaces. Each is named by a digest of everything that decides its adapter, so runs can share them."""


def train(job: Job) -> Trained:
    """Train one adapter and cache it in its workspace.

    Raises:
        UserError: the policy cannot be trained through, the environment's file or the base is missing or damaged, the
            adapter was altered, or the processes of `machine.accelerate` cannot share the work or died.
        EnvironmentFault: the environment broke its contract.
    """
    policy, targets, recipe = _loaded(job)
    fingerprints = [target.fingerprint for target in targets]
    settings = [job.trainer.target, recipe.identity(), job.machine.accelerate.precision]
    folder = TRAININGS / digest(code_digest(train), policy.digest, fingerprints, settings, job.plan_identity())

    def trained() -> StepResult:
        if job.machine.accelerate.processes == 1:
            return _fit(job, policy, targets, recipe, folder)
        groups = recipe.groups_per_step, "trainer.groups_per_step groups of a step"
        return processes.fit(job.name, job.machine, groups, partial(_fit_share, job), StepResult, folder)

    result = train_once(folder, job.name, StepResult, trained)
    return Trained.of_steps(job.name, folder / "adapter", result)


def _loaded(job: Job) -> tuple[Learner, list[CheckedEnvironment], GRPO]:
    """Load the policy, the environments and the recipe of a job."""
    policy = learner(job.policy, job.base, job.machine, job.name, job.way_out)
    targets = [environment.target(job.machine) for environment in job.environments]
    return policy, targets, build(job.trainer, GRPO)


def _fit(job: Job, policy: Learner, targets: Sequence[CheckedEnvironment], recipe: GRPO, workspace: Path) -> StepResult:
    from captrain.training import gates, grpo, student  # torch and TRL

    kinds = {Distillation: student.Student, GateJob: gates.GateTrainer}
    kind = kinds.get(type(job), grpo.PolicyTrainer)
    return grpo.fit(kind, recipe, job, policy, targets, workspace)


def _fit_share(job: Job, machine: Machine, workspace: Path) -> StepResult:
    """Train as one of several processes, with the layout of a machine."""
    job = job.on(machine)
    return _fit(job, *_loaded(job), workspace)
