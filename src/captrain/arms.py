"""The arms of the evaluation: base, each capability's adapter, and the baselines, all on the same test tasks.

Every arm is played on every task with the same randomness, so that comparisons are paired, and every router and every
bound is computed from one table of outcomes without a further rollout.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from captrain import launch
from captrain.adapters import adapter_digest
from captrain.benchmarks import load_benchmark
from captrain.contract import Target
from captrain.errors import UserError
from captrain.policies import load_policy
from captrain.records import LedgerEntry, Rollout
from captrain.rollouts import Adapter, collect, floor, spent
from captrain.spec import Spec


@dataclass(frozen=True)
class Arm:
    """One arm to play: its name, and its adapter (None for the base)."""

    name: str
    adapter: Adapter | None
    base: Path
    spec: Spec

    def identity(self) -> tuple[Any, ...]:
        """What decides its rollouts."""
        acting, spec, asked = self.adapter.digest if self.adapter else "", self.spec, self.spec.evaluation
        return (
            acting,
            self.base,
            spec.seed,
            spec.benchmark,
            spec.policy,
            asked.tasks,
            asked.trials,
            spec.rollouts.retries,
        )


def play_arms(spec: Spec, base: Path, results: Path) -> tuple[list[Rollout], pd.DataFrame, list[LedgerEntry]]:
    """Play all arms on the test split.

    Returns:
        All rollouts; outcomes (task, kind, arm, trial, outcome, reward), one row a rollout, and rows of the arm
        "idle", which does nothing and costs no rollout; ledger entries.

    Raises:
        UserError: an adapter is missing, or is not the one the index names.
    """
    arms = [Arm("base", None, base, spec)]
    for stage in ("adapters", "baselines"):
        index = json.loads((results / stage / "index.json").read_text())
        for name, row in index.items():
            found = adapter_digest(Path(row["path"]))
            if found != row["digest"]:
                raise UserError(
                    f"adapter {name} in {row['path']} is {found}, but {row['digest']} was trained",
                    f"it was altered: run `dvc repro -f {stage}`",
                )
            arms.append(Arm(name, Adapter(row["path"], row["digest"]), base, spec))
    played = launch.run(play_arm, arms, spec.machine, "evaluation")
    rows = _floor(played[0], load_benchmark(spec.benchmark, spec.machine)) + [
        (*_place(rollout), arm.name, rollout.trial, rollout.outcome, rollout.score.reward if rollout.score else None)
        for arm, rollouts in zip(arms, played, strict=True)
        for rollout in rollouts
    ]
    outcomes = pd.DataFrame(rows, columns=["task", "kind", "arm", "trial", "outcome", "reward"])
    ledger = [
        spent(rollouts, stage="evaluation", method="evaluation", item=arm.name)
        for arm, rollouts in zip(arms, played, strict=True)
    ]
    return [rollout for rollouts in played for rollout in rollouts], outcomes, ledger


def _place(rollout: Rollout) -> tuple[str, str]:
    return rollout.task.id, str(rollout.task.data.get("kind", ""))


def _floor(rollouts: Sequence[Rollout], target: Target) -> list[tuple[Any, ...]]:
    """Outcomes of doing nothing on the tasks and trials of these rollouts."""
    scores = floor(target, [*{r.task.id: r.task for r in rollouts}.values()])
    rows = []
    for rollout in rollouts:
        score = scores[rollout.task.id]
        outcome = "error" if score is None else "passed" if score.success else "failed"
        rows.append((*_place(rollout), "idle", rollout.trial, outcome, None if score is None else score.reward))
    return rows


def play_arm(arm: Arm) -> list[Rollout]:
    """All trials of one arm on the test split."""
    spec = arm.spec
    target = load_benchmark(spec.benchmark, spec.machine)
    policy = load_policy(spec.policy, arm.base, spec.machine, batch=spec.machine.batch)
    return collect(
        policy, target, target.tasks("test", spec.evaluation.tasks), purpose="evaluation", seed=spec.seed,
        trials=spec.evaluation.trials, adapter=arm.adapter, retries=spec.rollouts.retries, quiet=True,
    )  # fmt: skip
