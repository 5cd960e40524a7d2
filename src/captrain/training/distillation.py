"""On-policy distillation: one student learns from every specialist in the specialist's own environment.

The student, a fresh LoRA adapter, plays the adapters' environments in turn, on training tasks beyond calibration. What
it wrote is read again by the environment's specialist, and the student is moved towards it: the loss is the reverse
divergence KL(student || teacher) of the distributions of the next token, over the full vocabulary, at each token that
the student wrote, mean over the tokens of a batch. That is GKD with data of the student alone and the reverse KL
(arXiv 2306.13649, section 3.1); as there, no gradient goes through sampling. Rewards are recorded and not learnt from.

It is trained as adapters are by GRPO (`captrain.training.grpo`), with another loss: groups, checkpoints, processes and
precision are the same, and a job that was cut off goes on and ends in the identical adapter.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from captrain.config import Spec
from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.models import Adapter
from captrain.records import JsonObject, digest
from captrain.training.jobs import Distillation, Learner, Trained, learner, training_environments
from captrain.training.recipe import derived_trainer
from captrain.training.runs import Training

NAME = "distillation"
WORKSPACES = Path(".cache/distillation")


class _StudentTraining(Training):
    """The training of one student."""

    job: Distillation

    @cached_property
    def policy(self) -> Learner:
        way_out = "leave distillation out of merging.methods"
        return learner(self.job.policy, self.job.base, self.job.machine, purpose=NAME, way_out=way_out)

    def fit(self, workspace: Path) -> JsonObject:
        from captrain.training import grpo, student  # torch and TRL

        return grpo.fit(self.recipe, self.job, self.policy, self.targets, workspace, student.Student)


def distillation(spec: Spec, base: Path, environments: Path, teachers: Mapping[str, Adapter]) -> Distillation:
    """Plan the student of all adapters, by the names of their environments.

    Raises:
        UserError: an adapter's environment has no passport.
    """
    by_name = {environment.name: environment for environment in training_environments(environments)}
    if missing := [name for name in teachers if name not in by_name]:
        raise UserError(
            f"adapter {missing[0]} has no environment of its own in {environments} to be imitated in",
            "run `dvc repro environments adapters`, or leave distillation out of merging.methods",
        )
    return Distillation(
        name=NAME,
        base=base,
        policy=spec.exploring(),
        trainer=derived_trainer(
            spec.trainer,
            learning_rate=spec.merging.learning_rate,
            schedule="constant",
            loss="dapo",
            importance_cap=None,
            hints=0.0,
        ),
        environments=tuple(by_name[name] for name in teachers),
        rollouts=spec.merging.rollouts,
        seed=spec.seed,
        machine=spec.machine,
        teachers=tuple(teachers.values()),
    )


def distil(job: Distillation) -> Trained:
    """Train the student, or return it from its workspace when it is there already.

    Raises:
        UserError: the policy cannot be trained through, an environment's file is missing, a rollout ended in an
            infrastructure error, or the adapter was altered.
        EnvironmentFault: an environment broke its contract.
    """
    training = _StudentTraining(job)
    return training.trained(WORKSPACES / digest(code_digest(distil), *training.identity()))
