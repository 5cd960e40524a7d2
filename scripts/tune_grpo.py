"""Search for the settings of GRPO on the target. Run by `make tune`.

A comparison with GRPO is fair only if GRPO is as good as it can be. So its settings are searched where the row
`grpo_target` trains, with TRACE's number of rollouts: on the training split of the configured mix, judged on tasks of
that split from number 20,000 on, which nothing trains on. The test split is never played. One base would overfit, so
each rung of the search adds the base of another seed, and only the best candidates go on (successive halving over
seeds). Shorter trainings would be no substitute, because the learning rate falls over the training's length.

Writes results/studies/grpo_tuning.csv: one row per rung and candidate, with the rollouts of the whole search. The
winning settings are the defaults of `baselines.grpo_target`. An interrupted search resumes.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from judging import TRIALS, passes
from numpy.typing import NDArray
from tqdm import tqdm

from captrain.comparison import baseline_job
from captrain.models import Adapter
from captrain.records import JsonObject, publish_text
from captrain.run import Spec, entry_point, launch, load_spec
from captrain.statistics import Bootstrap
from captrain.training import TrainingEnvironment, train, train_base

ROLLOUTS = 3200
"""Rollouts of one training: TRACE's total in the committed run."""
TASKS = 300
"""Number of judging tasks."""
RUNGS = {0: 4, 1: 2, 2: 1}
"""Seed of the base that a rung adds -> number of candidates left after it."""
WORK = Path(".cache/tuning")
RESULTS = Path("results/studies/grpo_tuning.csv")
NAMES = ("group_size", "groups_per_step", "epochs", "learning_rate", "schedule", "clip_high")
GRID: list[tuple[object, ...]] = [
    (8, 5, 2, 1.5e-3, "constant", None),  # the row's settings before this search
    (8, 5, 2, 1.5e-3, "linear", None),
    (8, 5, 2, 2.5e-3, "linear", 0.28),
    (8, 10, 2, 2.5e-3, "linear", None),
    (16, 5, 2, 2.5e-3, "linear", None),
    (4, 10, 2, 2e-3, "linear", None),
    (8, 5, 4, 1.5e-3, "linear", 0.28),
    (8, 5, 4, 2.5e-3, "linear", 0.28),
]


def base_of(spec: Spec, seed: int) -> Path:
    """Return the project with the base of a seed: this one, or a new one."""
    project = Path() if seed == spec.seed else WORK / str(seed)
    folder = project / "artifacts/base"
    if not (folder / "model.safetensors").exists():
        train_base(spec.base, seed, folder, lambda batches: tqdm(batches, desc=f"base {seed}"), spec.machine.workers)
    return project


def search(spec: Spec) -> list[JsonObject]:
    """Run the search, rung by rung.

    Returns:
        One row per rung and candidate, best first: settings, pass rate over the rung's seeds with an interval over
        tasks, whether the candidate goes on, and the rollouts of the whole search so far, judging included.
    """
    candidates: Sequence[tuple[object, ...]] = GRID
    outcomes: dict[tuple[object, ...], list[NDArray[np.float64]]] = {settings: [] for settings in GRID}
    target, rows, total = TrainingEnvironment("target", spec.benchmark), list[JsonObject](), 0
    for rung, (seed, count) in enumerate(RUNGS.items(), start=1):
        project, seeded = base_of(spec, seed), spec.model_copy(update={"seed": seed})
        jobs = []
        for candidate in candidates:
            settings = {name: value for name, value in zip(NAMES, candidate, strict=True) if value is not None}
            # As the row `grpo_target` trains.
            jobs.append(baseline_job("grpo_target", seeded, project, [target], ROLLOUTS, settings))
        for candidate, adapter in zip(candidates, launch.run(train, jobs, spec.machine, f"rung {rung}"), strict=True):
            acting = Adapter(str(adapter.folder), adapter.digest)
            marks = passes(seeded, project / "artifacts/base", acting, TASKS)
            outcomes[candidate].append(marks)
            total += adapter.rollouts + adapter.errors + marks.size
        rates = {candidate: np.nanmean(np.concatenate(outcomes[candidate], axis=1), axis=1) for candidate in candidates}
        candidates = sorted(candidates, key=lambda candidate: -np.nanmean(rates[candidate]))
        intervals = Bootstrap(TASKS, 2000, 0.95, 0).intervals([rates[candidate] for candidate in candidates])
        for place, (candidate, (low, high)) in enumerate(zip(candidates, intervals, strict=True)):
            row = {"rung": rung, "seeds": " ".join(map(str, list(RUNGS)[:rung]))}
            row |= dict(zip(NAMES, candidate, strict=True))
            row |= {"pass_rate": float(np.nanmean(rates[candidate])), "low": low, "high": high, "kept": place < count}
            row |= {"rollouts": ROLLOUTS, "validation_rollouts": TASKS * TRIALS, "search_rollouts": total}
            rows.append(row)
        candidates = candidates[:count]
    return rows


@partial(entry_point, stage=False)
def main() -> None:
    """Search, write the table, and print the winner."""
    rows = search(load_spec())
    table = pd.DataFrame(rows, dtype=object)
    for column in ("pass_rate", "low", "high"):
        table[column] = table[column].map("{:.6f}".format)
    publish_text(RESULTS, table.to_csv(index=False, lineterminator="\n"))
    winner = next(row for row in rows if row["rung"] == len(RUNGS))
    print(f"{', '.join(f'{name} {winner[name]}' for name in NAMES)}: {winner['pass_rate']:.3f}; see {RESULTS}")


if __name__ == "__main__":
    main()
