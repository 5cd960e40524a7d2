"""Pass rates of adapters on training tasks from number 20,000 on, which nothing trains on.

`tune_grpo` and `doses` choose settings by these rates. The test split is never played.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from captrain.agents import collect, load_policy
from captrain.benchmarks import load_benchmark
from captrain.models import Adapter
from captrain.run import Spec

FIRST, TRIALS = 20_000, 2
"""Number of the first judging task, and trials per task."""


def passes(spec: Spec, base: Path, adapter: Adapter, tasks: int) -> NDArray[np.float64]:
    """Return which judging tasks an adapter passes, shape (tasks, trials); an error is NaN."""
    target = load_benchmark(spec.benchmark, spec.machine)
    policy = load_policy(spec.policy, base, spec.machine, batch=spec.machine.batch)
    played_tasks = target.tasks("training", FIRST + tasks)[FIRST:]
    rollouts = collect(
        policy, target, played_tasks, purpose="validation", seed=spec.seed, trials=TRIALS, adapter=adapter, quiet=True
    )
    marks = {"passed": 1.0, "failed": 0.0, "error": np.nan}
    return np.array([marks[rollout.outcome] for rollout in rollouts]).reshape(tasks, TRIALS)
