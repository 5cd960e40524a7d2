"""From selected capabilities to environments with passports.

An environment that fails its passport is synthesized again, up to the configured rounds; every calibration rollout
of every round is counted. If none passes, the stage ends with the reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.contract import Target, load_file
from captrain.environments import Synthesizer
from captrain.environments.passport import Passport, calibrate, inspect
from captrain.errors import UserError
from captrain.policies import Policy
from captrain.records import Capability, LedgerEntry, Rollout, publish_text
from captrain.rollouts import collect, spent
from captrain.spec import Environments

DRAFTS = Path(".cache/environments")


@dataclass(frozen=True)
class Synthesized:
    """An environment file that passed, its passport, the base's rollouts in it, and what all rounds cost."""

    text: str
    passport: Passport
    rollouts: list[Rollout]
    ledger: list[LedgerEntry]


def synthesize(
    capability: Capability, synthesizer: Synthesizer, policy: Policy, benchmark: Target, bounds: Environments, seed: int
) -> Synthesized:
    """One environment for one capability.

    Raises:
        UserError: no attempt earned its passport; says what each one failed.
    """
    ledger: list[LedgerEntry] = []
    reasons: list[str] = []
    for attempt in range(bounds.rounds):
        text = synthesizer.synthesize(capability, benchmark.tools, attempt)
        path = DRAFTS / str(attempt) / f"{capability.id}.py"
        publish_text(path, text)
        target = load_file(path)
        checks = inspect(target, path, benchmark.tools, bounds)
        rollouts: Sequence[Rollout] = []
        if all(check.passed for check in checks):
            tasks = target.tasks("training", bounds.groups)
            rollouts = collect(policy, target, tasks, purpose="calibration", seed=seed, trials=bounds.group_size)
            ledger.append(spent(rollouts, stage="environments", method="trace", item=capability.id))
            checks += calibrate(rollouts, bounds.group_size, bounds)
        passport = Passport(
            capability=capability.id, environment=target.fingerprint, attempt=attempt,
            passed=all(check.passed for check in checks), calibration_tasks=bounds.groups, checks=checks,
        )  # fmt: skip
        if passport.passed:
            return Synthesized(text, passport, list(rollouts), ledger)
        reasons.append(f"attempt {attempt}: {passport.complaints()}")
        print(f"environment for {capability.id}, {reasons[-1]}")
    raise UserError(
        f"no environment for {capability.id} earned its passport. " + " | ".join(reasons),
        f"see the drafts in {DRAFTS}; widen the bounds in the environments section, or deselect the capability",
    )
