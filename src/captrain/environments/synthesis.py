"""Makes environments with passports for selected capabilities.

A failed environment is synthesized again with its findings, for a configured number of rounds. An attempt that does not
load has failed. All calibration rollouts of all rounds count. If no attempt passes, the capability is skipped, its best
attempt and the findings are kept, and the other capabilities continue.

Environments can also train two capabilities in every task: the pairs that failed rollouts lack together most often. A
pair is a capability of its own, "<a>+<b>" with a < b. Its evidence is the failed rollouts that lack both. Its passport
has no checks on the base and so costs no rollout, because only its solutions are taught. A pair without an environment
is skipped.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from captrain.agents import PolicySource, RolloutBatch, collect_batch
from captrain.capabilities import EXAMPLES, count_pairs
from captrain.capabilities import needs as lacking_sets
from captrain.contract import CheckedEnvironment, Policy
from captrain.environments.evidence import Standard
from captrain.environments.loading import is_own_text, load_own
from captrain.environments.passport import calibrate, failed_check, run_checks
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
"""Most passed rollouts in a brief."""
LOADS = "the file loads"
CALIBRATION = "rollouts on the base"


@dataclass(frozen=True)
class Draft:
    """A file without a passport yet. `trusted` says that its text is our own and runs outside of the sandbox."""

    path: Path
    machine: Machine
    trusted: bool

    def load(self) -> CheckedEnvironment:
        """Load the environment.

        Raises:
            EnvironmentFault: the file does not load.
            UserError: the sandbox is weaker than required.
        """
        from captrain.environments.sandbox.confined import load_confined

        if self.trusted:
            return load_own(self.path, self.machine)
        return load_confined(self.path, self.machine.sandbox)

    def identity(self) -> tuple[str, Path]:
        """Return its name and file, which decide its behaviour."""
        return self.path.stem, self.path


@dataclass(frozen=True)
class Examination:
    """The check results of a file, the base's rollouts in it, and their costs; `environment` is its fingerprint."""

    environment: str
    checks: list[CheckResult]
    rollouts: list[Rollout] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)


@dataclass(frozen=True)
class SynthesisResult:
    """The outcome for a capability: all attempts, the best one with the base's rollouts in it, and all costs."""

    capability: Capability
    attempts: list[Attempt]
    best: Attempt
    rollouts: list[Rollout]
    ledger: list[LedgerEntry]

    @property
    def passed(self) -> bool:
        """True if the best attempt passed."""
        return self.best.passport.passed


def make_brief(
    capability: Capability, tools: list[JsonObject], rollouts: Sequence[Rollout], benchmark: Component | None = None
) -> Brief:
    """Make a brief with failed rollouts that lack the capability, then the shortest passed ones.

    Args:
        capability: to be trained.
        tools: the target's schemas.
        rollouts: of the discovery split.
        benchmark: the target, if environments may be derived from it.

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
    """Synthesize an environment for one capability, and examine each attempt.

    Args:
        brief: the request.
        synthesizer: who writes it.
        policy: the base, as it will train; None skips the checks on it.
        standard: the target, its test tasks, and the bounds.
        machine: with the required level of the sandbox.
        seed: run seed.
        adapter: adapter to calibrate with; None for the base alone.

    Raises:
        UserError: the synthesizer cannot write it, or the sandbox is weaker than required.
    """
    name = brief.capability.id
    attempts: list[Attempt] = []
    examinations: list[Examination] = []
    for number in range(standard.bounds.rounds):
        text = synthesizer.synthesize(brief, attempts)
        path = DRAFTS / name / str(number) / f"{name}.py"
        publish_text(path, text)
        trusted = synthesizer.trusted and is_own_text(text)  # a file derived from a benchmark has its author's text
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
    """Return a sort key of an attempt, best first: passed checks, then the distances of failed ones to their bounds."""
    failed, distance = [check for check in checks if not check.passed], 0.0
    for check in failed:
        ends = [float(end) for end in re.findall(r"\d+(?:\.\d+)?", check.bound)]
        measured = math.inf if check.measured is None else check.measured
        distance += min([1.0, *(abs(measured - end) / max(1.0, end) for end in ends)])
    return len(failed) - len(checks), distance


def synthesize_each(
    briefs: Sequence[Brief],
    synthesizer: Synthesizer,
    policy: PolicySource | Policy | None,
    standard: Standard,
    machine: Machine,
    seed: int,
) -> list[SynthesisResult]:
    """Synthesize an environment for each capability; those without a template are named and skipped.

    Args:
        As `synthesize`.

    Raises:
        UserError: there is none for any of them; and as `synthesize`.
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
    """Run all checks of a file; those on the base only if the others passed.

    Args:
        path: the file.
        standard: the target, its test tasks, and the bounds.
        brief: the capability to train, and failed rollouts.
        machine: with the required level of the sandbox, and where benchmarks are installed.
        policy: the base; None skips the checks on it.
        seed: run seed.
        adapter: adapter that the base plays with.
        trusted: whether its text is our own and runs outside of the sandbox.

    Raises:
        UserError: the sandbox is weaker than required.
    """
    failures = [rollout for rollout in brief.examples if rollout.outcome == "failed"]
    bounds, item, draft = standard.bounds, brief.capability.id, Draft(path, machine, trusted)
    try:
        target = draft.load()
        environment = target.fingerprint
    except EnvironmentFault as fault:
        return Examination(digest(path.stem, file_digest(path)), [failed_check(LOADS, fault)])
    seconds = None if trusted else bounds.seconds
    checks = run_checks(
        target, path, standard, failures, seed=seed, seconds=seconds, machine=machine if trusted else None
    )
    if policy is None or not all(check.passed for check in checks):
        return Examination(environment, checks)
    try:
        tasks = target.tasks("training", bounds.groups)
        batch = RolloutBatch(item, policy, draft, tasks, "calibration", seed, bounds.group_size, adapter)
        rollouts = collect_batch(batch, target, "calibration")
    except EnvironmentFault as fault:
        # The number of finished rollouts is unknown; count all, rather than too few.
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
    """Make the passport of a file."""
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


class PairOutcome(TypedDict):
    """The outcome of a pair, and the number of failed rollouts that lack both."""

    lacking: int
    environment: bool
    reason: str


@dataclass(frozen=True)
class PairEnvironments:
    """The environments written for pairs, and the outcome of every pair that failed rollouts lack together."""

    results: list[SynthesisResult]
    account: dict[str, PairOutcome]


def combine(first: Capability, second: Capability, needs: Mapping[str, frozenset[str]]) -> Capability:
    """Combine two capabilities: `details` has those of both, `examples` failed rollouts that lack both."""
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
    """Synthesize environments for the most frequent pairs of the selected capabilities.

    Args:
        labels: of the diagnostic rollouts.
        selected: capabilities that TRACE trains.
        rollouts: the diagnostic rollouts.
        count: most pairs.
        synthesizer: who writes them.
        standard: the target, its test tasks, and the bounds.
        machine: with the required level of the sandbox.
        seed: run seed.
        benchmark: the target, if environments may be derived from it.

    Raises:
        UserError: the synthesizer cannot be asked, or the sandbox is weaker than required.
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
