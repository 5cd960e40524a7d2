"""The jobs of training: where one adapter is trained, how, with which budget, and what came of it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from captrain.agents import load_policy
from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment, Policy
from captrain.environments import load_environment, read_passports
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models import CHECKPOINTS, Adapter, Chat, checkpoint_marks, require_recorded
from captrain.records import JsonObject, Passport
from captrain.run import Component, Machine, fulfils

LIBRARIES = ("captrain.training.grpo", "trl.trainer.sft_trainer")
"""Modules that bring what training imports (see `captrain.run.launch.run`)."""


@dataclass(frozen=True)
class EnvironmentFile:
    """The file of a synthesized environment by its passport, and the folder that holds it."""

    folder: Path
    passport: Passport

    def identity(self) -> str:
        """Return the fingerprint of the environment, which decides what is trained in it."""
        return self.passport.environment


@dataclass(frozen=True)
class TrainingEnvironment:
    """Environment that groups are drawn from.

    Args:
        name: of the environment; no two of a job have the same.
        source: the file of a synthesized environment, or a benchmark component.
        skip: training tasks passed over because calibration has spent them.
    """

    name: str
    source: EnvironmentFile | Component
    skip: int = 0

    def target(self, machine: Machine) -> CheckedEnvironment:
        """Load the environment to train in.

        Raises:
            UserError: its file is missing, or is another one than its passport was made out for.
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
        machine: where installations of benchmarks lie, and how strict the sandbox is; no part of the result.
        start: the adapter whose training goes on; None: a new one, which changes nothing at first.
        points: of the training, evenly in rollouts, at which the adapter is kept as it then is: the end among them,
            and nothing else where there is one or none.
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
    """Remedy where the policy is none to train through, beside another policy."""

    def on(self, machine: Machine) -> Self:
        """Return the same job with another layout over processes and GPUs."""
        return replace(self, machine=machine)

    @property
    def marks(self) -> list[int]:
        """Rollouts after which the adapter is kept: at the end of the first step that has played so many."""
        return checkpoint_marks(self.rollouts, self.points)

    def plan_identity(self) -> list[object]:
        """Return the JSON fields that decide the result beside policy, trainer and environments, which have identities
        of their own. A job that is sent away is known by all of its fields (`captrain.run.fingerprint`)."""
        skipped = [[environment.name, environment.skip] for environment in self.environments]
        start = [self.start.digest] if self.start else []
        return [self.name, self.rollouts, self.seed, skipped, *start, *self.marks]


@dataclass(frozen=True)
class Distillation(Job):
    """One student to train: a job whose environments are the specialists', with the specialist of each.

    On-policy distillation: the student, a fresh LoRA adapter, plays the adapters' environments in turn, on training
    tasks beyond calibration. What it wrote is read again by the environment's specialist, and the student is moved
    towards it: the loss is the reverse divergence KL(student || teacher) of the distributions of the next token, over
    the full vocabulary, at each token that the student wrote, mean over the tokens of a batch. That is GKD with data of
    the student alone and the reverse KL (arXiv 2306.13649, section 3.1); as there, no gradient goes through sampling.
    Rewards are recorded and not learnt from.
    """

    teachers: tuple[Adapter, ...] = field(kw_only=True)
    way_out: ClassVar[str] = "leave distillation out of merging.methods"

    def plan_identity(self) -> list[object]:
        """See `Job`."""
        return [*super().plan_identity(), [teacher.digest for teacher in self.teachers]]


class Learner(Policy, Protocol):
    """A policy that GRPO samples through: it acts with any adapter of its model, gives hints, and shows the tokens that
    it read and wrote, with log-probabilities under the distribution that it drew from."""

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
        purpose: what needs it, for messages.
        way_out: how to do without, for messages.

    Raises:
        UserError: its weights are not at hand (an endpoint that somebody else runs cannot be trained through), or are
            not those that the base stage has recorded.
    """
    require_recorded(base)
    policy = load_policy(component, base, machine)
    if not fulfils(policy, Learner):
        raise UserError(
            f"{purpose}: an adapter is trained for a model whose weights are at hand, and policy is {component.target}",
            "choose policy=local or policy=vllm" + (f", or {way_out}" if way_out else ""),
        )
    return policy


@dataclass(frozen=True)
class Trained:
    """A trained adapter: its content hash, its folder, and what it cost.

    `history` has one row a step: step, rollouts so far, mean reward, pass rate, share of informative groups, and
    `places`, how many groups were of each environment; where hints are given also `unhinted`, the step's rollouts
    without one, and how many of these passed. `errors` are attempts at a rollout that came to nothing and were made
    again, beyond `rollouts`. `checkpoints` are the adapter's content hashes at the points of its job before the end, by
    the rollouts played; they lie in `folder`. `demonstrations` are those of its own that it was fine-tuned on, if any.
    """

    name: str
    digest: str
    folder: Path
    rollouts: int
    discarded: int
    prompt_tokens: int
    completion_tokens: int
    errors: int
    history: list[JsonObject]
    checkpoints: JsonObject = field(default_factory=dict)
    demonstrations: int | None = None

    def summary(self) -> JsonObject:
        """Summarize the training for the index of its stage."""
        further = {CHECKPOINTS: self.checkpoints or None, "demonstrations": self.demonstrations}
        counts: JsonObject = {"rollouts": self.rollouts, "discarded": self.discarded}
        return counts | {name: value for name, value in further.items() if value is not None}

    def ledger(self, stage: str, method: str) -> LedgerEntry:
        """Enter the rollouts that the training spent, those that ended in an error included."""
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
    """A fine-tuned adapter: its content hash and folder, what it was trained on, and the loss of each update.

    `costs` are of the rollouts that demonstrations were taken from; fine-tuning itself costs none.
    """

    name: str
    digest: str
    folder: Path
    demonstrations: int
    left_out: dict[str, int]
    losses: list[float]
    costs: tuple[LedgerEntry, ...] = ()

    @property
    def history(self) -> list[JsonObject]:
        """One row an update: step, from 1 on, and loss."""
        return [{"step": step, "loss": loss} for step, loss in enumerate(self.losses, start=1)]

    def summary(self) -> JsonObject:
        """Summarize the training for the index of its stage."""
        counts = {"demonstrations": self.demonstrations, "left_out": self.left_out}
        return {"rollouts": sum(entry.rollouts for entry in self.costs), "discarded": 0, **counts}


def training_environments(folder: Path) -> tuple[TrainingEnvironment, ...]:
    """List the environments in a folder that have a passport, in the order of their names; none without a folder."""
    return tuple(
        TrainingEnvironment(name, EnvironmentFile(folder, passport), passport.calibration_tasks)
        for name, passport in read_passports(folder).items()
    )
