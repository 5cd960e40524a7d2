"""The settings of GRPO on the target, searched. Run by `make tune`.

A method is ahead of GRPO only if GRPO is as good as it can be made. So its settings are searched by themselves, where
the row `grpo_target` trains, at what TRACE spends: on the training split of the configured mix, and judged on tasks of
that split from number 20,000 on, which nothing trains on. The test split is never played. One base overfits, so each
rung of the search adds the base of another seed, and of the candidates only the best so far go on to it (successive
halving over seeds; a shorter training would be another one, because a falling rate is tied to its length).

Writes results/studies/grpo_tuning.csv: one row a rung and candidate, with what the whole search has spent. The settings
that win are the defaults of `baselines.grpo_target`. A search that was cut off goes on where it was.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from captrain.benchmarks import load_benchmark, train_base
from captrain.comparison import Bootstrap, baseline_job
from captrain.config import Spec, load_spec
from captrain.execution import entry_point, launch
from captrain.models import Adapter
from captrain.policies import load_policy
from captrain.records import JsonObject, publish_text
from captrain.rollouts import collect
from captrain.training import Job, Trained, TrainingEnvironment, train

ROLLOUTS = 3200
"""Rollouts of one training: what TRACE spends in all in the committed run."""
FIRST, TASKS, TRIALS = 20_000, 300, 2
"""The tasks that judge: the number of the first, how many, and how often each is played."""
RUNGS = {0: 4, 1: 2, 2: 1}
"""The seed of the base that a rung adds -> how many candidates are left after it."""
WORK = Path(".cache/tuning")
RESULTS = Path("results/studies/grpo_tuning.csv")
NAMES = ("group_size", "groups_per_step", "epochs", "learning_rate", "schedule", "clip_high")
GRID: list[tuple[object, ...]] = [
    (8, 5, 2, 1.5e-3, "constant", None),  # as the row was configured before this search
    (8, 5, 2, 1.5e-3, "linear", None),
    (8, 5, 2, 2.5e-3, "linear", 0.28),
    (8, 10, 2, 2.5e-3, "linear", None),
    (16, 5, 2, 2.5e-3, "linear", None),
    (4, 10, 2, 2e-3, "linear", None),
    (8, 5, 4, 1.5e-3, "linear", 0.28),
    (8, 5, 4, 2.5e-3, "linear", 0.28),
]


@dataclass(frozen=True)
class Trial:
    """One candidate on the base of one seed: its settings, and where the base lies."""

    spec: Spec
    settings: tuple[object, ...]
    project: Path

    def job(self) -> Job:
        """The training, as the row `grpo_target` does it."""
        target = TrainingEnvironment("target", self.spec.benchmark)
        settings = {name: value for name, value in zip(NAMES, self.settings, strict=True) if value is not None}
        return baseline_job("grpo_target", self.spec, self.project, [target], ROLLOUTS, settings)


def base_of(spec: Spec, seed: int) -> Path:
    """The project whose artifacts hold the base of a seed: this one, or one that is made now."""
    project = Path() if seed == spec.seed else WORK / str(seed)
    folder = project / "artifacts/base"
    if not (folder / "model.safetensors").exists():
        train_base(spec.base, seed, folder, lambda batches: tqdm(batches, desc=f"base {seed}"), spec.machine.workers)
    return project


def passes(trial: Trial, adapter: Trained) -> NDArray[np.float64]:
    """Tell which of the tasks that judge an adapter passes, (tasks, trials); an error is NaN."""
    spec = trial.spec
    target = load_benchmark(spec.benchmark, spec.machine)
    policy = load_policy(spec.policy, trial.project / "artifacts/base", spec.machine, batch=spec.machine.batch)
    tasks = target.tasks("training", FIRST + TASKS)[FIRST:]
    acting = Adapter(str(adapter.folder), adapter.digest)
    rollouts = collect(
        policy, target, tasks, purpose="validation", seed=spec.seed, trials=TRIALS, adapter=acting, quiet=True
    )
    marks = {"passed": 1.0, "failed": 0.0, "error": np.nan}
    return np.array([marks[rollout.outcome] for rollout in rollouts]).reshape(TASKS, TRIALS)


def search(spec: Spec) -> list[JsonObject]:
    """One row a rung and candidate, best first."""
    candidates: Sequence[tuple[object, ...]] = GRID
    outcomes: dict[tuple[object, ...], list[NDArray[np.float64]]] = {settings: [] for settings in GRID}
    rows: list[JsonObject] = []
    total = 0
    for rung, (seed, count) in enumerate(RUNGS.items(), start=1):
        project, seeded = base_of(spec, seed), spec.model_copy(update={"seed": seed})
        trials = [Trial(seeded, settings, project) for settings in candidates]
        adapters = launch.run(train, [trial.job() for trial in trials], spec.machine, f"rung {rung}")
        for trial, adapter in zip(trials, adapters, strict=True):
            outcomes[trial.settings].append(passes(trial, adapter))
            total += adapter.rollouts + adapter.errors + TASKS * TRIALS
        rates = {settings: np.nanmean(np.concatenate(outcomes[settings], axis=1), axis=1) for settings in candidates}
        candidates = sorted(candidates, key=lambda settings: -np.nanmean(rates[settings]))
        rows += rung_rows(rung, list(RUNGS)[:rung], candidates, rates, count, total)
        candidates = candidates[:count]
    return rows


def rung_rows(
    rung: int,
    seeds: Sequence[int],
    candidates: Sequence[tuple[object, ...]],
    rates: Mapping[tuple[object, ...], NDArray[np.float64]],
    count: int,
    total: int,
) -> list[JsonObject]:
    """The rows of one rung: settings, pass rate over its seeds with an interval over tasks, whether the candidate goes
    on, and the rollouts of the whole search so far, those that judge among them."""
    intervals = Bootstrap(TASKS, 2000, 0.95, 0).intervals([rates[settings] for settings in candidates])
    rows = []
    for place, (settings, (low, high)) in enumerate(zip(candidates, intervals, strict=True)):
        numbers = {"pass_rate": float(np.nanmean(rates[settings])), "low": low, "high": high}
        budget = {"rollouts": ROLLOUTS, "validation_rollouts": TASKS * TRIALS, "search_rollouts": total}
        setting = dict(zip(NAMES, settings, strict=True))
        rows.append(
            {"rung": rung, "seeds": " ".join(map(str, seeds)), **setting, **numbers, "kept": place < count} | budget
        )
    return rows


@partial(entry_point, stage=False)
def main() -> None:
    """Search, write the table, and say what won."""
    rows = search(load_spec())
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(
        {name: f"{value:.6f}" if name in ("pass_rate", "low", "high") else value for name, value in row.items()}
        for row in rows
    )
    publish_text(RESULTS, text.getvalue())
    winner = next(row for row in rows if row["rung"] == len(RUNGS))
    print(f"{', '.join(f'{name} {winner[name]}' for name in NAMES)}: {winner['pass_rate']:.3f}; see {RESULTS}")


if __name__ == "__main__":
    main()
