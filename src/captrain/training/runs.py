"""One adapter by GRPO from one job: read from its workspace where it is there already, else trained."""

from pathlib import Path

from captrain.config import build
from captrain.execution import code_digest
from captrain.records import JsonObject, digest
from captrain.training import processes
from captrain.training.jobs import Job, Trained, learner
from captrain.training.recipe import GRPO
from captrain.training.workspace import Workspace

WORKSPACES = Path(".cache/adapters")


def train(job: Job) -> Trained:
    """Train one adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the environment's file or the base is missing or damaged, or the adapter was altered.
        EnvironmentFault: the environment broke its contract.
        UserError: the processes of `machine.accelerate` cannot share the work, or died.
    """
    policy = learner(job.policy, job.base, job.machine, purpose=job.name)
    targets = [environment.target(job.machine) for environment in job.environments]
    trainer = build(job.trainer, GRPO)
    identity = digest(
        code_digest(train),
        policy.digest,
        [target.fingerprint for target in targets],
        [job.trainer.target, trainer.identity()],
        job.plan_identity(),
    )
    workspace = Workspace(WORKSPACES / identity, job.name, scratch=("checkpoints*", "points", processes.RESULT))

    def fit() -> JsonObject:
        if job.machine.accelerate.processes > 1:
            return processes.launch(job, trainer, workspace.folder)
        from captrain.training import grpo  # torch and TRL

        return grpo.fit(trainer, job, policy, targets, workspace.folder)

    return Trained(job.name, folder=workspace.adapter, **workspace.result(fit))
