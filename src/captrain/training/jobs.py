"""The jobs of training: where one adapter is trained, how, with which budget, and what came of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from captrain.benchmarks import load_benchmark
from captrain.config import Component, Machine, fulfils
from captrain.contract import Target
from captrain.environments import load_environment, read_passports
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.policies import Policy, load_policy
from captrain.records import Passport


@dataclass(frozen=True)
class Synthesized:
    """An environment file by its passport, and the folder that holds it."""

    folder: Path
    passport: Passport

    def identity(self) -> str:
        """What decides what is trained in it."""
        return self.passport.environment


@dataclass(frozen=True)
class Place:
    """Where groups are drawn from.

    Args:
        name: of the environment; no two places of a job have the same.
        environment: a synthesized environment, or a benchmark component.
        skip: training tasks passed over because calibration has spent them.
    """

    name: str
    environment: Synthesized | Component
    skip: int = 0

    def target(self, machine: Machine) -> Target:
        """The environment to train in.

        Raises:
            UserError: its file is missing, or is another one than its passport was made out for.
        """
        if isinstance(self.environment, Synthesized):
            return load_environment(self.environment.folder, self.environment.passport, machine)
        return load_benchmark(self.environment, machine)


@dataclass(frozen=True)
class Job:
    """One adapter to train.

    Args:
        name: the capability, or the baseline.
        base: folder of the base model.
        policy: the policy component (how to sample).
        trainer: the trainer component.
        places: where to train, one or more.
        rollouts: exact budget.
        seed: run seed.
        machine: where installations of benchmarks lie, and how strict the sandbox is; no part of the result.
    """

    name: str
    base: Path
    policy: Component
    trainer: Component
    places: tuple[Place, ...]
    rollouts: int
    seed: int
    machine: Machine

    def decisive(self) -> list[Any]:
        """What decides the result besides policy, trainer and environments, as JSON."""
        return [self.name, self.rollouts, self.seed, [[place.name, place.skip] for place in self.places]]


class Learner(Policy, Protocol):
    """A policy that GRPO samples through: it acts with any adapter of its model, gives hints, and shows the tokens that
    it read and wrote, with log-probabilities under the distribution that it drew from."""

    temperature: float
    room: int
    """Tokens of the longest dialogue."""
    tokenizer: Any


def learner(component: Component, base: Path, machine: Machine, purpose: str, way_out: str = "") -> Learner:
    """The policy that an adapter is trained through.

    Args:
        component: the `policy` section.
        base: folder of the base model.
        machine: where it acts.
        purpose: what needs it, for messages.
        way_out: how to do without, for messages.

    Raises:
        UserError: its weights are not at hand: an endpoint that somebody else runs cannot be trained through.
    """
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
    `places`, how many groups were of each place; where hints are given also `unhinted`, the step's rollouts without
    one, and how many of these passed. `errors` are attempts at a rollout that came to nothing and were made again,
    beyond `rollouts`.
    """

    name: str
    digest: str
    folder: Path
    rollouts: int
    discarded: int
    prompt_tokens: int
    completion_tokens: int
    errors: int
    history: list[dict[str, Any]]

    def ledger(self, stage: str, method: str) -> LedgerEntry:
        """What the training spent."""
        return LedgerEntry(
            stage=stage, purpose="training", method=method, item=self.name, rollouts=self.rollouts + self.errors,
            discarded=self.discarded, errors=self.errors, prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )  # fmt: skip


def places_of(environments: Path) -> tuple[Place, ...]:
    """The environments in a folder that have a passport, in the order of their names; none if there is no folder."""
    return tuple(
        Place(name, Synthesized(environments, passport), passport.calibration_tasks)
        for name, passport in read_passports(environments).items()
    )
