"""From selected capabilities to environments with passports.

An environment that fails its passport is synthesized again, up to the configured rounds, with all that was found; an
attempt that does not even load has failed. Every calibration rollout of every round is counted. A capability
for which no attempt passed is left out, its best attempt and all findings kept: the others go on.

Two capabilities may be asked for in every task, for the pairs that failed rollouts lack together most often. A pair is
a capability of its own, "<a>+<b>" with a < b, whose evidence is the failed rollouts that lack both. Its passport holds
all checks but those on the base, so that it costs no rollout: what is taught in it are its solutions. A pair without an
environment is left out, with what was found; nothing rests on any one of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from captrain.agents import PolicySource, RolloutBatch, collect_batch
from captrain.capabilities import EXAMPLES, count_pairs
from captrain.capabilities import needs as lacking_sets
from captrain.contract import CheckedEnvironment, Policy
from captrain.environments.loading import is_own_text, load_own
from captrain.environments.passport import calibrate, failed_check, run_checks
from captrain.environments.subject import Standard
from captrain.environments.synthesizer import Attempt, Brief, NoTemplate, Synthesizer
from captrain.errors import EnvironmentFault, UserError
from captrain.ledger import LedgerEntry, guard_split, ledger_entry
from captrain.models import Adapter
from captrain.records import (
    Capability,
    CheckResult,
    JsonObject,
    Passport,
    Rollout,
    RolloutLabels,
    digest,
    file_digest,
    publish_json,
    publish_text,
)
from captrain.run import Component, Machine

DRAFTS = Path(".cache/environments")
PASSED_EXAMPLES = 3
"""Passed rollouts in a brief."""
LOADS = "the file loads"
CALIBRATION = "rollouts on the base"


@dataclass(frozen=True)
class Draft:
    """A file that has no passport yet, how well it must be confined, and whether its text is our own, which need not
    be."""

    path: Path
    machine: Machine
    trusted: bool

    def load(self) -> CheckedEnvironment:
        """The environment, wherever this is called.

        Raises:
            EnvironmentFault: the file does not load.
            UserError: the sandbox is weaker than asked for.
        """
        from captrain.environments.sandbox.confined import load_confined

        if self.trusted:
            return load_own(self.path, self.machine)
        return load_confined(self.path, self.machine.sandbox)

    def identity(self) -> tuple[str, Path]:
        """Return what decides its behaviour: its name and its file."""
        return self.path.stem, self.path


@dataclass(frozen=True)
class Examination:
    """Findings of the checks of a file, the base's rollouts in it, and what those cost; of which behaviour, by its
    fingerprint."""

    environment: str
    checks: list[CheckResult]
    rollouts: list[Rollout] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)


@dataclass(frozen=True)
class SynthesisResult:
    """Outcome of one capability: all attempts, the best one (the one that passed, if any did), the base's rollouts
    in that one, and what all rounds cost."""

    capability: Capability
    attempts: list[Attempt]
    best: Attempt
    rollouts: list[Rollout]
    ledger: list[LedgerEntry]

    @property
    def passed(self) -> bool:
        """True if there is an environment to train in."""
        return self.best.passport.passed


def make_brief(
    capability: Capability, tools: list[JsonObject], rollouts: Sequence[Rollout], benchmark: Component | None = None
) -> Brief:
    """Make the brief of an environment, whose examples are the failed rollouts that the capability was found in, then
    the shortest that passed.

    Args:
        capability: to be trained.
        tools: the target's schemas.
        rollouts: of the discovery split.
        benchmark: the target, where environments may be derived from it.

    Raises:
        UserError: a rollout is of another split.
    """
    guard_split([rollout.task for rollout in rollouts], "diagnosis")
    by_id: Mapping[str, Rollout] = {rollout.id: rollout for rollout in rollouts}
    failed = [by_id[name] for name in capability.examples if name in by_id]
    passed = sorted(
        (rollout for rollout in rollouts if rollout.outcome == "passed"),
        key=lambda rollout: (len(rollout.messages), rollout.id),
    )
    return Brief(capability, tools, [*failed, *passed[:PASSED_EXAMPLES]], benchmark)


def synthesize(
    brief: Brief,
    synthesizer: Synthesizer,
    policy: PolicySource | Policy | None,
    standard: Standard,
    machine: Machine,
    seed: int,
    adapter: Adapter | None = None,
) -> SynthesisResult:
    """One environment for one capability, or what all attempts at it lacked.

    Args:
        brief: what is asked for.
        synthesizer: who writes it.
        policy: the base, as it will train; None leaves the checks on it out.
        standard: the target, its test tasks, the bounds.
        machine: how well what a synthesizer of others wrote must be confined.
        seed: run seed.
        adapter: that calibration plays with; None: the base alone.

    Raises:
        UserError: the synthesizer cannot write it, or the sandbox is weaker than asked for.
    """
    name = brief.capability.id
    attempts: list[Attempt] = []
    examinations: list[Examination] = []
    for number in range(standard.bounds.rounds):
        text = synthesizer.synthesize(brief, attempts)
        path = DRAFTS / name / str(number) / f"{name}.py"
        publish_text(path, text)
        trusted = synthesizer.trusted and is_own_text(text)  # what is derived from a benchmark is its author's
        examination = examine(path, standard, brief, machine, policy, seed, adapter, trusted=trusted)
        passport = make_passport(path, examination, number, trusted=trusted)
        publish_json(path.with_suffix(".passport.json"), passport)
        attempts.append(Attempt(text, passport))
        examinations.append(examination)
        if passport.passed:
            break
        print(f"environment for {name}, attempt {number}: {passport.complaints()}")
    best = min(range(len(attempts)), key=lambda index: shortfall(attempts[index].passport.checks))
    ledger = [entry for examination in examinations for entry in examination.ledger]
    return SynthesisResult(brief.capability, attempts, attempts[best], examinations[best].rollouts, ledger)


def shortfall(checks: Sequence[CheckResult]) -> tuple[int, float]:
    """Rank an attempt, the best first: by checks passed, then by how far the failed ones are from their nearest bounds,
    each at most 1; what was not measured is furthest."""
    failed, distance = [check for check in checks if not check.passed], 0.0
    for check in failed:
        ends = map(float, re.findall(r"\d+(?:\.\d+)?", check.bound)) if check.measured is not None else ()
        distance += min([1.0, *(abs((check.measured or 0.0) - end) / max(1.0, end) for end in ends)])
    return len(failed) - len(checks), distance


def synthesize_each(
    briefs: Sequence[Brief],
    synthesizer: Synthesizer,
    policy: PolicySource | Policy | None,
    standard: Standard,
    machine: Machine,
    seed: int,
) -> list[SynthesisResult]:
    """One environment for each capability that the synthesizer has one for; the others are named and left out.

    Args:
        As `synthesize`.

    Raises:
        UserError: it has one for none of them; and as `synthesize`.
    """
    results, lacks = list[SynthesisResult](), list[NoTemplate]()
    for brief in briefs:
        try:
            results.append(synthesize(brief, synthesizer, policy, standard, machine, seed))
        except NoTemplate as lack:
            print(f"environment for {brief.capability.id}: {lack.problem}")
            lacks.append(lack)
    if lacks and not results:
        raise UserError("; ".join(lack.problem for lack in lacks), lacks[0].remedy)
    return results


def examine(
    path: Path,
    standard: Standard,
    brief: Brief,
    machine: Machine,
    policy: PolicySource | Policy | None,
    seed: int,
    adapter: Adapter | None = None,
    *,
    trusted: bool = False,
) -> Examination:
    """All checks of a file, those on the base only if the others passed.

    Args:
        path: the file.
        standard: what it is held against.
        brief: what it is to train, and the evidence for that.
        machine: how well it must be confined, and where installations of benchmarks lie.
        policy: the base; None leaves those checks out.
        seed: run seed.
        adapter: that the base plays with.
        trusted: whether its text is our own, and runs unconfined.

    Raises:
        UserError: the sandbox is weaker than asked for.
    """
    evidence = [rollout for rollout in brief.examples if rollout.outcome == "failed"]
    bounds, item, draft = standard.bounds, brief.capability.id, Draft(path, machine, trusted)
    try:
        target = draft.load()
        environment = target.fingerprint
    except EnvironmentFault as fault:
        return Examination(digest(path.stem, file_digest(path)), [failed_check(LOADS, fault)])
    seconds = None if trusted else bounds.seconds
    checks = run_checks(
        target, path, standard, evidence, seed=seed, seconds=seconds, machine=machine if trusted else None
    )
    if policy is None or not all(check.passed for check in checks):
        return Examination(environment, checks)
    try:
        tasks = target.tasks("training", bounds.groups)
        batch = RolloutBatch(item, policy, draft, tasks, "calibration", seed, bounds.group_size, adapter)
        rollouts = collect_batch(batch, target, "calibration")
    except EnvironmentFault as fault:
        # How many were played is not known; all count, rather than too few.
        estimate = LedgerEntry(
            stage="environments",
            purpose="calibration",
            method="trace",
            item=item,
            rollouts=bounds.groups * bounds.group_size,
        )
        return Examination(environment, [*checks, failed_check(CALIBRATION, fault)], [], [estimate])
    entry = ledger_entry(rollouts, stage="environments", method="trace", item=item)
    return Examination(environment, [*checks, *calibrate(rollouts, bounds.group_size, bounds)], rollouts, [entry])


def make_passport(path: Path, examination: Examination, attempt: int, *, trusted: bool) -> Passport:
    """The passport of a file."""
    tasks = {rollout.task.id for rollout in examination.rollouts}
    return Passport(
        capability=path.stem,
        environment=examination.environment,
        attempt=attempt,
        trusted=trusted,
        passed=all(check.passed for check in examination.checks),
        calibration_tasks=len(tasks),
        checks=examination.checks,
    )


@dataclass(frozen=True)
class PairEnvironments:
    """Outcomes of pairs: those that an environment was written for, and for every pair that failed rollouts lack
    together, by name, in how many and what became of it."""

    results: list[SynthesisResult]
    account: dict[str, JsonObject]


def combine(first: Capability, second: Capability, needs: Mapping[str, frozenset[str]]) -> Capability:
    """Two capabilities as one to be trained: `details` are those of both, `examples` failed rollouts that lack both."""
    first, second = sorted((first, second), key=lambda capability: capability.id)
    return Capability(
        id="+".join((first.id, second.id)),
        name=f"{first.name} and {second.name[:1].lower()}{second.name[1:]}",
        description=f"Both in the same task. {first.description} {second.description}",
        details={first.id: first.details, second.id: second.details},
        examples=[rollout for rollout, lacking in needs.items() if {first.id, second.id} <= lacking][:EXAMPLES],
    )


def synthesize_pairs(
    labels: Sequence[RolloutLabels],
    selected: Sequence[Capability],
    rollouts: Sequence[Rollout],
    count: int,
    synthesizer: Synthesizer,
    standard: Standard,
    machine: Machine,
    seed: int,
    benchmark: Component | None = None,
) -> PairEnvironments:
    """Environments for at most `count` pairs of the selected capabilities.

    Args:
        labels: of the diagnostic rollouts.
        selected: capabilities that TRACE trains.
        rollouts: the diagnostic rollouts.
        count: of pairs, the most frequent first.
        synthesizer: who writes them.
        standard: the target, its test tasks, the bounds.
        machine: how well what a synthesizer of others wrote must be confined.
        seed: run seed.
        benchmark: the target, where environments may be derived from it.

    Raises:
        UserError: the synthesizer cannot be asked, or the sandbox is weaker than asked for.
    """
    capabilities: Mapping[str, Capability] = {capability.id: capability for capability in selected}
    needs = lacking_sets(labels, capabilities)
    pairs = PairEnvironments([], {})
    for rank, (pair, lacking) in enumerate(count_pairs(needs).items(), start=1):
        reason = f"it ranks {rank}, and {count} are wanted"
        if rank <= count:
            capability = combine(capabilities[pair[0]], capabilities[pair[1]], needs)
            brief = make_brief(capability, standard.tools, rollouts, benchmark)
            try:
                pairs.results.append(synthesize(brief, synthesizer, None, standard, machine, seed))
                reason = pairs.results[-1].best.passport.complaints()
            except NoTemplate as fault:
                reason = fault.problem
        pairs.account["+".join(sorted(pair))] = {"lacking": lacking, "environment": not reason, "reason": reason}
    return pairs
