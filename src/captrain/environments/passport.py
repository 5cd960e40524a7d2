"""The passport: the checks that an environment must pass before anything is trained in it.

`run_checks` runs all of `CHECKS`. A check that meets a fault fails, and the others still run. `calibrate` measures the
rewards of the base; its rollouts count as calibration. `audit` compares the tasks of a training with the passport.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from captrain.contract import CheckedEnvironment
from captrain.environments.checks import CHECKS, IDLE, RANDOM, REFERENCE, is_solved, mean, result
from captrain.environments.evidence import Evidence, Standard, play_agent
from captrain.environments.probes import act_randomly
from captrain.environments.sandbox.forkserver import Allowance
from captrain.errors import EnvironmentFault, UserError
from captrain.records import CheckResult, Passport, Rollout, Score, Task, counted, digest, plain
from captrain.run import EnvironmentSettings, Machine

UNREADABLE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Errors of captrain's code that reads answers, because an answer may be designed to break it."""
AUDITED = 16
"""Audited tasks of a training."""
DRIFT = 0.25
"""Largest amount by which their mean reward may exceed the passport's."""
BASE_REWARD, BASE_PASSES = "mean reward of the base", "pass rate of the base"
BASE_CONSTANT = "share of constant-reward groups on the base"
SETTINGS = {check.name: check.setting for check in CHECKS if check.setting}
SETTINGS |= {BASE_REWARD: "mean_reward", BASE_PASSES: "success", BASE_CONSTANT: "constant_groups"}
"""Settings of the section `environments` that hold a check's bound."""


def run_checks(
    target: CheckedEnvironment,
    path: Path,
    against: Standard,
    failures: Sequence[Rollout],
    *,
    seed: int = 0,
    seconds: float | None = None,
    machine: Machine | None = None,
) -> list[CheckResult]:
    """Run all checks that need no policy.

    Args:
        target: the environment, loaded.
        path: its file.
        against: the standard.
        failures: failed rollouts that lack the capability; none if unknown.
        seed: run seed; with the file's bytes it decides what is drawn.
        seconds: that the answers of a confined environment may take; then the remaining checks fail. None: no limit.
        machine: see `Evidence`.
    """
    allowance = None if seconds is None else Allowance(seconds)
    evidence = Evidence(target, path, against, failures, seed=seed, allowance=allowance, machine=machine)
    results: list[CheckResult] = []
    for check in CHECKS:
        evidence.task_id = ""
        try:
            results.append(named(check.name, check.measure(evidence)))
        except EnvironmentFault as fault:
            results.append(failed_check(check.name, fault, evidence.task_id))
        except UNREADABLE as error:
            reason = f"what it answers cannot be examined ({type(error).__name__}: {plain(str(error))[:200]})"
            fault = EnvironmentFault(reason, "answer as the target does")
            results.append(failed_check(check.name, fault, evidence.task_id))
    evidence.limit(None)
    return results


def failed_check(name: str, fault: EnvironmentFault, task: str = "") -> CheckResult:
    """Make the result of a check that met a fault."""
    return CheckResult(name=name, passed=False, measured=None, bound="no fault", detail=fault.problem, task=task)


def widening(passports: Iterable[Passport]) -> str:
    """Name the settings that would let failed checks pass, as a remedy; "" if there are none."""
    failed = [check.name for passport in passports for check in passport.checks if not check.passed]
    keys = dict.fromkeys(f"environments.{SETTINGS[name]}" for name in failed if name in SETTINGS)
    return f"widen {', '.join(keys)} if what failed is right, or " if keys else ""


def calibrate(rollouts: Sequence[Rollout], group_size: int, bounds: EnvironmentSettings) -> list[CheckResult]:
    """Check the rewards of the base: each `group_size` consecutive rollouts are a group of one task."""
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    if len(scores) < len(rollouts):
        task = next(rollout.task.id for rollout in rollouts if rollout.score is None)
        detail = f"{counted(len(rollouts) - len(scores), 'rollout')} ended in an infrastructure error"
        return [named("rollouts without error", result(False, len(scores), "all", detail, task))]
    starts = range(0, len(scores), group_size)
    groups = {rollouts[start].task.id: scores[start : start + group_size] for start in starts}
    rewards = {task: [score.reward for score in group] for task, group in groups.items()}
    passes = {task: mean(score.success for score in group) for task, group in groups.items()}
    constant = {task: float(max(group) - min(group) <= 1e-6) for task, group in rewards.items()}
    return [
        _within(BASE_REWARD, {task: mean(group) for task, group in rewards.items()}, *bounds.mean_reward),
        _within(BASE_PASSES, passes, *bounds.success),
        _within(BASE_CONSTANT, constant, 0.0, bounds.constant_groups),
    ]


def _within(name: str, values: dict[str, float], low: float, high: float) -> CheckResult:
    """Check that the mean over groups is within bounds; on failure, name the group that is furthest out."""
    value = mean(values.values())
    furthest = (min if value < low else max)(values, key=values.__getitem__)
    return named(name, result(low <= value <= high, value, f"{low} to {high}", "", furthest))


def named(name: str, check: CheckResult) -> CheckResult:
    """Give the result of a check its name."""
    return check.model_copy(update={"name": name})


def audit(target: CheckedEnvironment, passport: Passport, tasks: Sequence[Task], seed: int) -> None:
    """Compare tasks of a training with the environment's passport, as far as the passport measured the same.

    A passport checks drawn tasks, and a file may behave differently on those that training requests, for example if
    many are requested. So references must earn everything here, too, and doing nothing or random calls no more than in
    the passport.

    Args:
        target: the environment, as it is trained in.
        passport: its passport.
        tasks: the tasks of the training.
        seed: run seed; with passport and tasks it decides which are audited.

    Raises:
        UserError: they deviate: nothing is trained on them.
        EnvironmentFault: the environment broke its contract.
    """
    measured = {check.name: check.measured for check in passport.checks if check.measured is not None}
    key = digest("audit", passport.environment, seed, [task.id for task in tasks])
    sample = random.Random(key).sample(list(tasks), min(AUDITED, len(tasks)))
    if deviation := next(_deviations(target, measured, sample, key), ""):
        raise UserError(
            f"environment {target.name} is another one on the tasks of this training than on those of its passport: "
            f"{deviation}",
            f"do not train in it: read {target.source}, remove it with its passport, and run `dvc repro environments`",
        )


def _deviations(
    target: CheckedEnvironment, measured: dict[str, float], sample: Sequence[Task], key: str
) -> Iterator[str]:
    def at_random(task: Task) -> Score:
        agent = partial(act_randomly, target.tools, random.Random(f"{key}/{task.id}"))
        return target.score(task, play_agent(target, task, agent))

    if REFERENCE in measured:
        for task in sample:
            score = target.score(task, target.play(task, target.reference(task)))
            if not is_solved(score):
                yield f"the reference of {task.id} earns {score.reward:g}, and the passport has 1"
    for name, score_of in {IDLE: target.floor, RANDOM: at_random}.items():
        if sample and name in measured:
            value = mean(score_of(task).reward for task in sample)
            if value > measured[name] + DRIFT:
                yield f"{name} is {value:.2f} on {len(sample)} of them, and the passport has {measured[name]:.2f}"
