"""Training jobs and their results: where and how one adapter is trained, its budget, and what it cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from captrain.agents import load_policy
from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment, Policy
from captrain.environments import load_environment, read_passports
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models import CHECKPOINTS, Adapter, Chat, MixtureParts, checkpoint_marks
from captrain.records import JsonObject, Passport
from captrain.run import Component, Machine, fulfils

LIBRARIES = ("captrain.training.grpo", "trl.trainer.sft_trainer")
"""Slow imports of a training (see `captrain.run.launch.run`)."""


@dataclass(frozen=True)
class EnvironmentFile:
    """A synthesized environment: its passport, and the folder of its file."""

    folder: Path
    passport: Passport

    def identity(self) -> str:
        """Return the fingerprint of the environment."""
        return self.passport.environment


@dataclass(frozen=True)
class TrainingEnvironment:
    """Environment that groups are drawn from.

    Args:
        name: unique within a job.
        source: the file of a synthesized environment, or a benchmark component.
        skip: training tasks that calibration has used up.
    """

    name: str
    source: EnvironmentFile | Component
    skip: int = 0

    def target(self, machine: Machine) -> CheckedEnvironment:
        """Load the environment.

        Raises:
            UserError: its file is missing, or is not the one that its passport was made for.
        """
        if isinstance(self.source, EnvironmentFile):
            return load_environment(self.source.folder, self.source.passport, machine)
        return load_benchmark(self.source, machine)


@dataclass(frozen=True)
class Job:
    """One adapter to train.

    Args:
        name: the capability, or the baseline.
        base: folder of the base model.
        policy: the policy component (how to sample).
        trainer: the trainer component.
        environments: where to train, one or more.
        rollouts: exact budget.
        seed: run seed.
        machine: where benchmarks are installed and how strict the sandbox is. It does not change the result.
        start: the adapter to train further; None: a new one.
        points: number of points of the training at which the adapter is kept, evenly spaced in rollouts and including
            the end. 0 or 1: only the end.
    """

    name: str
    base: Path
    policy: Component
    trainer: Component
    environments: tuple[TrainingEnvironment, ...]
    rollouts: int
    seed: int
    machine: Machine
    start: Adapter | None = field(default=None, kw_only=True)
    points: int = field(default=0, kw_only=True)
    way_out: ClassVar[str] = ""
    """A remedy for a policy that cannot be trained through, in addition to another policy."""

    def on(self, machine: Machine) -> Self:
        """Return the same job with another layout over processes and GPUs."""
        return replace(self, machine=machine)

    @property
    def marks(self) -> list[int]:
        """Numbers of rollouts at which the adapter is kept, at the end of the first step that reaches them."""
        return checkpoint_marks(self.rollouts, self.points)

    def plan_identity(self) -> list[object]:
        """Return the JSON fields that decide the result, except policy, trainer and environments.

        These have their own identities. A job on a cluster is identified by all of its fields
        (`captrain.run.fingerprint`).
        """
        skipped = [[environment.name, environment.skip] for environment in self.environments]
        start = [self.start.digest] if self.start else []
        return [self.name, self.rollouts, self.seed, skipped, *start, *self.marks]


@dataclass(frozen=True)
class Distillation(Job):
    """On-policy distillation of specialists into one student, a fresh LoRA adapter.

    The student plays the specialists' environments in turn, on training tasks beyond calibration. The specialist of an
    environment then scores the student's tokens. The loss is the reverse divergence KL(student || teacher) over the
    full vocabulary at each token that the student wrote, averaged over the tokens of a batch: GKD with the student's
    own data (arXiv 2306.13649, section 3.1). No gradient goes through sampling, and rewards are only recorded.
    """

    teachers: tuple[Adapter, ...] = field(kw_only=True)
    way_out: ClassVar[str] = "leave distillation out of merging.methods"

    def plan_identity(self) -> list[object]:
        """See `Job`."""
        return [*super().plan_identity(), [teacher.digest for teacher in self.teachers]]


@dataclass(frozen=True)
class GateJob(Job):
    """Gates over frozen adapters to train. `start` is a saved mixture of the same parts; None: gates start at zero."""

    parts: MixtureParts = field(kw_only=True)
    way_out: ClassVar[str] = "set baselines.mixture.run to false"

    def plan_identity(self) -> list[object]:
        """See `Job`."""
        return [*super().plan_identity(), self.parts.config().model_dump()]


class Learner(Policy, Protocol):
    """A policy that can be trained through.

    It acts with any adapter of its model, gives hints, and returns its tokens with their log-probabilities under the
    distribution that it sampled from.
    """

    temperature: float
    max_length: int
    """Tokens of the longest dialogue."""
    tokenizer: Any

    def chat(self, tools: list[JsonObject]) -> Chat:
        """Return the dialogue renderer for a set of tools."""
        ...


def learner(component: Component, base: Path, machine: Machine, purpose: str, way_out: str = "") -> Learner:
    """Build the policy that an adapter is trained through.

    Args:
        component: the `policy` section.
        base: folder of the base model.
        machine: where it acts.
        purpose: what needs the policy, for messages.
        way_out: how to avoid the need, for messages.

    Raises:
        UserError: the policy's weights are not available here, such as those behind an endpoint, or differ from those
            that the base stage recorded.
    """
    policy = load_policy(component, base, machine)
    if not fulfils(policy, Learner):
        raise UserError(
            f"{purpose}: training needs the weights of the model, which policy {component.target} does not have here",
            "choose policy=local or policy=vllm" + (f", or {way_out}" if way_out else ""),
        )
    return policy


@dataclass(frozen=True)
class StepRecord:
    """One step of a training by rollouts, as in checkpoints and history.csv.

    `rollouts` counts the whole training so far; the other numbers are of this step. Fields that may be None are
    measured only if they apply: `unhinted` with hints, `rerendered` and the three after `staleness` with a server,
    `divergence` in distillation.
    """

    step: int
    rollouts: int
    reward: float
    success: float
    informative: float
    """Share of groups with a training signal."""
    discarded: int
    """Number of rollouts in groups without a training signal."""
    prompt_tokens: int
    completion_tokens: int
    errors: int
    """Number of failed attempts. They were retried and do not count in `rollouts`."""
    places: dict[str, int]
    """Number of groups of each environment."""
    unhinted: int | None = None
    """Number of rollouts without a hint."""
    unhinted_passed: int | None = None
    rerendered: int | None = None
    """Number of turns for which rendering the dialogue again would have given other tokens."""
    staleness: int | None = None
    """Number of steps by which the acting adapter was behind."""
    mismatch: float | None = None
    """Mean absolute difference between the server's log-probabilities and the trainer's."""
    mismatch_largest: float | None = None
    effective_tokens: float | None = None
    """Effective sample size of the importance weights, as a share of the tokens."""
    divergence: float | None = None
    """Divergence from the teachers before the step's first update, in nats per token."""

    def row(self) -> dict[str, object]:
        """Return the fields that were measured, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Result:
    """Result of a training in its workspace: digests of the adapter and of the files in its folder."""

    digest: str
    files: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class StepResult(Result):
    """Result of a training by rollouts. `checkpoints`: see `Trained`."""

    history: list[StepRecord]
    checkpoints: dict[str, str]


@dataclass(frozen=True)
class Trained:
    """A trained adapter and what its rollouts cost.

    `errors` counts failed attempts, which are not among `rollouts`. `checkpoints` maps numbers of rollouts to the
    content hash of the adapter at that point, without the end. They are in `folder`. `demonstrations` counts the
    adapter's own rollouts that it was fine-tuned on, if any.
    """

    name: str
    digest: str
    folder: Path
    rollouts: int = 0
    discarded: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: int = 0
    history: Sequence[StepRecord] = ()
    checkpoints: dict[str, str] = field(default_factory=dict)
    demonstrations: int | None = None

    @classmethod
    def of_steps(cls, name: str, folder: Path, result: StepResult) -> Self:
        """Sum up the steps of a training."""
        steps = result.history
        return cls(
            name,
            result.digest,
            folder,
            steps[-1].rollouts,
            sum(step.discarded for step in steps),
            sum(step.prompt_tokens for step in steps),
            sum(step.completion_tokens for step in steps),
            sum(step.errors for step in steps),
            steps,
            result.checkpoints,
        )

    @property
    def rows(self) -> list[dict[str, object]]:
        """The rows of history.csv."""
        return [step.row() for step in self.history]

    def summary(self) -> JsonObject:
        """Summarize the training for the index of its stage."""
        further = {CHECKPOINTS: self.checkpoints or None, "demonstrations": self.demonstrations}
        counts = {"rollouts": self.rollouts, "discarded": self.discarded}
        return counts | {name: value for name, value in further.items() if value is not None}

    def ledger(self, stage: str, method: str) -> LedgerEntry:
        """Return the ledger entry of the training's rollouts, failed ones included."""
        return LedgerEntry(
            stage=stage,
            purpose="training",
            method=method,
            item=self.name,
            rollouts=self.rollouts + self.errors,
            discarded=self.discarded,
            errors=self.errors,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned adapter, with the number of its demonstrations and the loss of each update.

    `costs` counts the rollouts from which demonstrations were taken; fine-tuning itself costs none.
    """

    name: str
    digest: str
    folder: Path
    demonstrations: int
    left_out: dict[str, int]
    losses: list[float]
    costs: tuple[LedgerEntry, ...] = ()

    @property
    def rows(self) -> list[dict[str, object]]:
        """The rows of history.csv: step, from 1 on, and loss."""
        return [{"step": step, "loss": loss} for step, loss in enumerate(self.losses, start=1)]

    def summary(self) -> JsonObject:
        """Summarize the training for the index of its stage."""
        counts = {"demonstrations": self.demonstrations, "left_out": self.left_out}
        return {"rollouts": sum(entry.rollouts for entry in self.costs), "discarded": 0, **counts}


def training_environments(folder: Path) -> tuple[TrainingEnvironment, ...]:
    """List the environments of a folder that have a passport, by name; none if there is no folder."""
    return tuple(
        TrainingEnvironment(name, EnvironmentFile(folder, passport), passport.calibration_tasks)
        for name, passport in read_passports(folder).items()
    )
