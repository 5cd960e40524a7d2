"""Pass rates against the number of demonstrations, of the two rows that are fine-tuned. Run by `make doses`.

A dose is chosen where its curve is flat, for the baseline as for our own row: on tasks of the training split from
number 20,000 on, which nothing trains on, in the project that lies here. The test split is never played. Doses of
`solutions` are those of its first adapter over all environments, of `specialist` those of each adapter of one
environment, whose pass rates are averaged; of `rejection_sft` the rows that each of its fine-tunings sees, whose
rollouts are those of the row itself.

Writes results/studies/doses.csv: one row a method and dose, with a 95% interval over tasks.
"""

import csv
import io
from functools import partial
from pathlib import Path

import numpy as np

from captrain.benchmarks import load_benchmark
from captrain.comparison import (
    Bootstrap,
    Evidence,
    Lesson,
    generalist_lesson,
    refine,
    specialist_lessons,
    trace_ledger,
)
from captrain.config import Spec, load_spec
from captrain.execution import entry_point, launch
from captrain.ledger import budget
from captrain.models import Adapter
from captrain.policies import load_policy
from captrain.records import JsonObject, publish_text
from captrain.rollouts import collect
from captrain.training import LIBRARIES, teach_solutions

DOSES = {
    "solutions": (2000, 4000, 6000, 8000),
    "specialist": (1000, 2000),
    "rejection_sft": (1000, 2000, 3000, 4000),
}
FIRST, TASKS, TRIALS = 20_000, 400, 2
"""The tasks that judge: the number of the first, how many, and how often each is played."""
RESULTS = Path("results/studies/doses.csv")


def measure(point: tuple[Spec, str, int]) -> JsonObject:
    """Train one method with one dose and play the tasks that judge."""
    spec, method, dose = point
    base = Path("artifacts/base")
    if method == "rejection_sft":
        section = spec.baselines.rejection_sft.model_copy(update={"rows": dose})
        rows = spec.baselines.model_copy(update={"rejection_sft": section})
        dosed = spec.model_copy(update={"baselines": rows})
        adapters = [refine(Lesson(method, dosed, base, rollouts=budget(trace_ledger())))]
    else:
        name = "demonstrations" if method == "solutions" else "specialist"
        section = spec.baselines.solutions.model_copy(update={name: dose})
        dosed = spec.model_copy(update={"baselines": spec.baselines.model_copy(update={"solutions": section})})
        evidence = Evidence.of_project(Path())
        general = method == "solutions"
        lessons = [generalist_lesson(dosed, base, evidence)] if general else specialist_lessons(dosed, base, evidence)
        adapters = [teach_solutions(lesson) for lesson in lessons]
    policy = load_policy(spec.policy, base, spec.machine, batch=spec.machine.batch)
    target = load_benchmark(spec.benchmark, spec.machine)
    tasks = target.tasks("training", FIRST + TASKS)[FIRST:]
    marks = {"passed": 1.0, "failed": 0.0, "error": np.nan}
    rates = []
    for adapter in adapters:
        acting = Adapter(str(adapter.folder), adapter.digest)
        rollouts = collect(
            policy, target, tasks, purpose="validation", seed=spec.seed, trials=TRIALS, adapter=acting, quiet=True
        )
        rates.append(np.array([marks[rollout.outcome] for rollout in rollouts]).reshape(TASKS, TRIALS))
    outcomes = np.hstack(rates)
    [(low, high)] = Bootstrap(TASKS, 2000, 0.95, 0).intervals([np.nanmean(outcomes, axis=1)])
    numbers = {"pass_rate": float(np.nanmean(outcomes)), "low": low, "high": high}
    return {"method": method, "dose": dose, **{name: f"{value:.6f}" for name, value in numbers.items()}}


@partial(entry_point, stage=False)
def main() -> None:
    """Measure every dose and write the table."""
    spec = load_spec()
    points = [(spec, method, dose) for method, doses in DOSES.items() for dose in sorted(doses, reverse=True)]
    rows = launch.run(measure, points, spec.machine, "doses", LIBRARIES)
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(sorted(rows, key=lambda row: (row["method"], row["dose"])))
    publish_text(RESULTS, text.getvalue())
    print(text.getvalue())


if __name__ == "__main__":
    main()
