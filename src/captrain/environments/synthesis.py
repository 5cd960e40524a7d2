"""From selected capabilities to environments with passports.

An environment that fails its passport is synthesized again, up to the configured rounds, with all that was found; an
attempt that does not even load is one that failed. Every calibration rollout of every round is counted. A capability
for which no attempt passed is left out, its best attempt and all findings kept: the others go on.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captrain.config import Machine
from captrain.contract import Target, load_file
from captrain.environments.passport import calibrate, inspect, refused
from captrain.environments.subject import Standard
from captrain.environments.synthesized import Attempt, Brief, Synthesizer
from captrain.errors import EnvironmentFault
from captrain.ledger import LedgerEntry, guard_split, spent
from captrain.policies import Policy
from captrain.records import Capability, Check, Passport, Rollout, digest, file_digest, publish_json, publish_text
from captrain.rollouts import Acting, Part, played

DRAFTS = Path(".cache/environments")
SHOWN = 3
"""Passed rollouts in a brief."""
LOADS = "the file loads"
CALIBRATION = "rollouts on the base"


@dataclass(frozen=True)
class Draft:
    """A file that has no passport yet, and how well it must be confined; None for text of our own."""

    path: Path
    machine: Machine | None

    def load(self) -> Target:
        """The environment, wherever this is called.

        Raises:
            EnvironmentFault: the file does not load.
            UserError: the sandbox is weaker than asked for.
        """
        from captrain.environments.sandbox.confined import confined

        return confined(self.path, self.machine.sandbox) if self.machine else load_file(self.path)

    def identity(self) -> tuple[str, Path]:
        """What decides its behaviour."""
        return self.path.stem, self.path


@dataclass(frozen=True)
class Examined:
    """What the checks of a file found, the base's rollouts in it, and what those cost; of which behaviour, by its
    fingerprint."""

    environment: str
    checks: list[Check]
    rollouts: list[Rollout] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)


@dataclass(frozen=True)
class Synthesized:
    """What came of one capability: all attempts, the best one (the one that passed, if any did), the base's rollouts
    in that one, and what all rounds cost."""

    capability: Capability
    attempts: list[Attempt]
    best: Attempt
    rollouts: list[Rollout]
    ledger: list[LedgerEntry]

    @property
    def passed(self) -> bool:
        """Whether there is an environment to train in."""
        return self.best.passport.passed


def brief(capability: Capability, tools: list[dict[str, Any]], rollouts: Sequence[Rollout]) -> Brief:
    """What an environment is asked for: the failed rollouts that the capability was found in, then the shortest that
    passed.

    Args:
        capability: to be trained.
        tools: the target's schemas.
        rollouts: of the discovery split.

    Raises:
        UserError: a rollout is of another split.
    """
    guard_split([rollout.task for rollout in rollouts], "diagnosis")
    known: Mapping[str, Rollout] = {rollout.id: rollout for rollout in rollouts}
    failed = [known[name] for name in capability.examples if name in known]
    passed = sorted(
        (rollout for rollout in rollouts if rollout.outcome == "passed"),
        key=lambda rollout: (len(rollout.messages), rollout.id),
    )
    return Brief(capability, tools, [*failed, *passed[:SHOWN]])


def synthesize(
    wanted: Brief,
    synthesizer: Synthesizer,
    policy: Acting | Policy | None,
    against: Standard,
    machine: Machine,
    seed: int,
) -> Synthesized:
    """One environment for one capability, or what all attempts at it lacked.

    Args:
        wanted: what is asked for.
        synthesizer: who writes it.
        policy: the base, as it will train; None leaves the checks on it out.
        against: the target, its test tasks, the bounds.
        machine: how well what a synthesizer of others wrote must be confined.
        seed: run seed.

    Raises:
        UserError: the synthesizer cannot write it, or the sandbox is weaker than asked for.
    """
    name = wanted.capability.id
    attempts: list[Attempt] = []
    every: list[Examined] = []
    for number in range(against.bounds.rounds):
        text = synthesizer.synthesize(wanted, attempts)
        path = DRAFTS / name / str(number) / f"{name}.py"
        publish_text(path, text)
        found = examined(path, against, wanted, machine if not synthesizer.trusted else None, policy, seed)
        passport = passport_of(path, found, number, trusted=synthesizer.trusted)
        publish_json(path.with_suffix(".passport.json"), passport)
        attempts.append(Attempt(text, passport))
        every.append(found)
        if passport.passed:
            break
        print(f"environment for {name}, attempt {number}: {passport.complaints()}")
    best = min(range(len(attempts)), key=lambda at: _lacking(attempts[at].passport.checks))
    ledger = [entry for found in every for entry in found.ledger]
    return Synthesized(wanted.capability, attempts, attempts[best], every[best].rollouts, ledger)


def examined(
    path: Path, against: Standard, wanted: Brief, machine: Machine | None, policy: Acting | Policy | None, seed: int
) -> Examined:
    """All checks of a file, those on the base only if the others passed.

    Args:
        path: the file.
        against: what it is held against.
        wanted: what it is to train, and the evidence for that.
        machine: how well it must be confined; None for text of our own.
        policy: the base; None leaves those checks out.
        seed: run seed.

    Raises:
        UserError: the sandbox is weaker than asked for.
    """
    evidence = [rollout for rollout in wanted.examples if rollout.outcome == "failed"]
    bounds, item, draft = against.bounds, wanted.capability.id, Draft(path, machine)
    try:
        target = draft.load()
        environment = target.fingerprint
    except EnvironmentFault as fault:
        return Examined(digest(path.stem, file_digest(path)), [refused(LOADS, fault)])
    checks = inspect(target, path, against, evidence)
    if policy is None or not all(check.passed for check in checks):
        return Examined(environment, checks)
    try:
        tasks = target.tasks("training", bounds.groups)
        part = Part(item, policy, draft, tasks, "calibration", seed, trials=bounds.group_size)
        rollouts = played(part, target, "calibration")
    except EnvironmentFault as fault:
        # How many were played is not known; all count, rather than too few.
        lost = LedgerEntry(
            stage="environments", purpose="calibration", method="trace", item=item,
            rollouts=bounds.groups * bounds.group_size,
        )  # fmt: skip
        return Examined(environment, [*checks, refused(CALIBRATION, fault)], [], [lost])
    entry = spent(rollouts, stage="environments", method="trace", item=item)
    return Examined(environment, [*checks, *calibrate(rollouts, bounds.group_size, bounds)], rollouts, [entry])


def passport_of(path: Path, found: Examined, attempt: int, *, trusted: bool) -> Passport:
    """The passport of a file."""
    tasks = {rollout.task.id for rollout in found.rollouts}
    return Passport(
        capability=path.stem, environment=found.environment, attempt=attempt, trusted=trusted,
        passed=all(check.passed for check in found.checks), calibration_tasks=len(tasks), checks=found.checks,
    )  # fmt: skip


def _lacking(checks: Sequence[Check]) -> tuple[int, float]:
    """For ordering attempts: fewer is better in checks passed, then in how far the failed ones are from their bounds;
    what was not measured is furthest."""
    return -sum(check.passed for check in checks), sum(missed(check) for check in checks if not check.passed)


def missed(check: Check) -> float:
    """How far the measured is from the nearest bound, at most 1."""
    ends = [float(end) for end in re.findall(r"\d+(?:\.\d+)?", check.bound)]
    if check.measured is None or not ends:
        return 1.0
    return min(1.0, min(abs(check.measured - end) / max(1.0, end) for end in ends))
