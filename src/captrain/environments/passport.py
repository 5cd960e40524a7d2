"""The passport: what an environment must prove before anything is trained in it.

Each check measures something, holds it against a bound, and on failure names the task that shows it. Checks that
need no policy run first; the spread of rewards is measured on the base, and its rollouts are counted as calibration.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captrain.contract import Target
from captrain.records import Record, Rollout, Task, digest
from captrain.spec import Environments

PATIENCE = 120
"""Seconds that a fresh process may take over all tasks."""

FRESH = """
import importlib.util, json, sys
answer, sys.stdout = sys.stdout, sys.stderr
spec = importlib.util.spec_from_file_location("environment", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
environment = module.Environment()
out = []
for task in environment.tasks("training", int(sys.argv[2])):
    actions = environment.reference(task)
    out.append([task, environment.score(task, actions)])
print(json.dumps(out, sort_keys=True), file=answer)
"""


class Check(Record):
    """One proof: what was measured, the bound it was held against, and what to know about a failure."""

    name: str
    passed: bool
    measured: float | None
    bound: str
    detail: str = ""


class Passport(Record):
    """All checks of one environment. `calibration_tasks`: training tasks spent, from the first on."""

    capability: str
    environment: str
    attempt: int
    passed: bool
    calibration_tasks: int
    checks: list[Check]

    def complaints(self) -> str:
        """The failed checks in one line."""
        return "; ".join(
            f"{check.name} is {check.measured}, asked is {check.bound}{f' ({check.detail})' if check.detail else ''}"
            for check in self.checks
            if not check.passed
        )


def inspect(target: Target, path: Path, tools: list[dict[str, Any]], bounds: Environments) -> list[Check]:
    """The checks that need no policy.

    Args:
        target: the environment, loaded.
        path: its file.
        tools: the schemas of the benchmark it stands for.
        bounds: the `environments` section.
    """
    tasks = target.tasks("training", bounds.seeds)
    return [
        _schemas(target, tools),
        _reference(target, tasks),
        _idle(target, tasks, bounds.idle_reward),
        _same_again(target, path, tasks),
        _different(tasks),
    ]


def _schemas(target: Target, tools: list[dict[str, Any]]) -> Check:
    same = target.tools == tools
    return Check(name="schemas equal the target's", passed=same, measured=float(same), bound="1")


def _reference(target: Target, tasks: Sequence[Task]) -> Check:
    rewards = [target.score(task, target.play(task, target.reference(task))).reward for task in tasks]
    worst = min(range(len(tasks)), key=lambda i: rewards[i])
    return Check(
        name="reward of the reference solution", passed=rewards[worst] >= 1 - 1e-9, measured=rewards[worst], bound="1",
        detail="" if rewards[worst] >= 1 - 1e-9 else f"least on {tasks[worst].id}",
    )  # fmt: skip


def _idle(target: Target, tasks: Sequence[Task], bound: float) -> Check:
    rewards = [target.floor(task).reward for task in tasks]
    mean = round(sum(rewards) / len(rewards), 6)
    most = max(range(len(tasks)), key=lambda i: rewards[i])
    detail = "" if mean <= bound else f"most on {tasks[most].id}"
    return Check(
        name="reward of doing nothing", passed=mean <= bound, measured=mean, bound=f"at most {bound}", detail=detail
    )


def _same_again(target: Target, path: Path, tasks: Sequence[Task]) -> Check:
    """Tasks and scores of the reference in a fresh interpreter without any package: the file must stand alone."""
    here = [
        [task.model_dump(), target.score(task, target.reference(task)).model_dump()] for task in tasks
    ]  # fmt: skip
    command = [sys.executable, "-I", "-S", "-c", FRESH, str(path), str(len(tasks))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 1, "", f"it did not end within {PATIENCE} s")
    there = json.loads(done.stdout) if done.returncode == 0 else []
    differing = [one[0]["id"] for one, other in zip(here, there, strict=False) if digest(one) != digest(other)]
    same = not differing and len(there) == len(here)
    said = done.stderr.strip() or f"{len(there)} tasks instead of {len(here)}"
    detail = "" if same else differing[0] if differing else said.splitlines()[-1]
    return Check(
        name="same seed, same task in a fresh process", passed=same, measured=float(same), bound="1", detail=detail
    )


def _different(tasks: Sequence[Task]) -> Check:
    share = round(len({digest(task.data) for task in tasks}) / len(tasks), 6)
    return Check(name="share of distinct tasks", passed=share >= 0.95, measured=share, bound="at least 0.95")


def calibrate(rollouts: Sequence[Rollout], group_size: int, bounds: Environments) -> list[Check]:
    """The spread of rewards on the base: rollouts of equal task lie together, `group_size` each."""
    rewards = [rollout.score.reward for rollout in rollouts if rollout.score is not None]
    success = [rollout.score.success for rollout in rollouts if rollout.score is not None]
    if len(rewards) < len(rollouts):
        detail = f"{len(rollouts) - len(rewards)} rollouts ended in an infrastructure error"
        return [
            Check(name="rollouts without error", passed=False, measured=float(len(rewards)), bound="all", detail=detail)
        ]
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    constant = sum(max(group) - min(group) <= 1e-6 for group in groups) / len(groups)
    return [
        _within("mean reward of the base", sum(rewards) / len(rewards), bounds.mean_reward),
        _within("pass rate of the base", sum(success) / len(success), bounds.success),
        _within("share of constant-reward groups on the base", constant, (0.0, bounds.constant_groups)),
    ]


def _within(name: str, value: float, bounds: tuple[float, float]) -> Check:
    low, high = bounds
    return Check(name=name, passed=low <= value <= high, measured=round(value, 6), bound=f"{low} to {high}")
