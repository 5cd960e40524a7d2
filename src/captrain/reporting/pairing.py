"""Two runs on the same tasks: the difference of a method, task by task.

Pass rates of single tasks are read from the rollouts of the evaluation, where they lie beside the results: which arm
acts for a method on a task is what its routes say. A method counts only where that gives the pass rate of the run's own
table; bounds, which are no policy's outcomes, and what composed adapters played are left unpaired.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from captrain.comparison import OUTCOMES, TRACE, Arms, Bootstrap, all_routes
from captrain.records import Rollout, digest, scan

ROLLOUTS = "artifacts/evaluation/rollouts.jsonl"
RESAMPLES = 10_000
SAME = 1e-6
"""A table rounds to so much."""


@dataclass
class Played:
    """Evaluation of a run: digests of its tasks by id, their trials, and the outcomes of each arm by task."""

    tasks: dict[str, str] = field(default_factory=dict)
    trials: set[int] = field(default_factory=set)
    outcomes: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def matches(self, second: "Played") -> bool:
        """Return whether both have played the same tasks, as often."""
        return bool(self.tasks) and self.tasks == second.tasks and self.trials == second.trials


def read_played(folder: Path) -> Played | None:
    """Read the evaluation of the run in a folder; None where its rollouts are not there."""
    path = folder / ROLLOUTS
    if not path.exists():
        return None
    record, arms = Played(), Arms(folder)
    for _, rollout in scan(path, Rollout):
        task = rollout.task.id
        if task not in record.tasks:
            record.tasks[task] = digest(rollout.task.model_dump())
        record.trials.add(rollout.trial)
        record.outcomes.setdefault(arms.of(rollout), {}).setdefault(task, []).append(OUTCOMES[rollout.outcome])
    return record


def task_rates(folder: Path, record: Played, rates: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Compute the pass rate of each method on each task, (tasks,) in the order of their ids, where it can be told.

    Args:
        folder: of the run.
        record: there.
        rates: of the run's table, by method.

    Raises:
        UserError: the routes are no whole table.
    """
    if not (folder / "results/routes/routes.csv").exists():
        return {}
    routes = all_routes(folder / "results").set_index("task")
    by_method = {}
    for method, rate in rates.items():
        column = "chosen" if method == TRACE else method.removeprefix("router:")
        arm = method.rpartition(":")[2]
        values = []
        for task in sorted(record.tasks):
            choice = routes[column].get(task, "") if column in routes else arm
            outcomes = np.array(record.outcomes.get(str(choice), {}).get(task, []), dtype=float)
            defined = outcomes[~np.isnan(outcomes)]
            if not len(outcomes):
                break
            values.append(float(defined.mean()) if len(defined) else np.nan)
        if len(values) == len(record.tasks) and abs(np.nanmean(values) - rate) < SAME:
            by_method[method] = np.array(values)
    return by_method


def paired_interval(first: np.ndarray, second: np.ndarray, confidence: float) -> tuple[float, float, float]:
    """Average the second's task rates less the first's, with an interval: a bootstrap over tasks, as in the tables."""
    gaps = second - first
    low, high = Bootstrap(len(gaps), RESAMPLES, confidence, 0).interval(gaps)
    return float(np.nanmean(gaps)), low, high
