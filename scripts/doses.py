"""Pass rates against the number of demonstrations, for the two rows that are fine-tuned. Run by `make doses`.

We choose each dose where its curve is flat, for the baseline as for our own row. The judging tasks are training tasks
from number 20,000 on, which nothing trains on; the test split is never played. A dose of `solutions` counts the
demonstrations of its first adapter over all environments. A dose of `specialist` counts those of each one-environment
adapter, whose pass rates are averaged. A dose of `rejection_sft` counts the rows that each fine-tuning sees; the
rollouts are those of the row itself.

Writes results/studies/doses.csv: one row per method and dose, with a 95% interval over tasks.
"""

from functools import partial
from pathlib import Path

import numpy as np
from judging import passes

from captrain.comparison import (
    Lesson,
    RoundState,
    generalist_lesson,
    refine,
    specialist_lessons,
    trace_ledger,
    write_table,
)
from captrain.ledger import budget
from captrain.models import Adapter
from captrain.records import JsonObject
from captrain.run import Spec, entry_point, launch, load_spec
from captrain.statistics import Bootstrap
from captrain.training import LIBRARIES, teach_solutions

DOSES = {
    "solutions": (2000, 4000, 6000, 8000),
    "specialist": (1000, 2000),
    "rejection_sft": (1000, 2000, 3000, 4000),
}
TASKS = 400
"""Number of judging tasks."""
RESULTS = Path("results/studies/doses.csv")


def measure(point: tuple[Spec, str, int]) -> JsonObject:
    """Train one method with one dose and play the judging tasks."""
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
        evidence = RoundState.of_project(Path())
        general = method == "solutions"
        lessons = [generalist_lesson(dosed, base, evidence)] if general else specialist_lessons(dosed, base, evidence)
        adapters = [teach_solutions(lesson) for lesson in lessons]
    acting = [Adapter(str(adapter.folder), adapter.digest) for adapter in adapters]
    outcomes = np.hstack([passes(spec, base, adapter, TASKS) for adapter in acting])
    [(low, high)] = Bootstrap(TASKS, 2000, 0.95, 0).intervals([np.nanmean(outcomes, axis=1)])
    return {"method": method, "dose": dose, "pass_rate": float(np.nanmean(outcomes)), "low": low, "high": high}


@partial(entry_point, stage=False)
def main() -> None:
    """Measure every dose and write the table."""
    spec = load_spec()
    points = [(spec, method, dose) for method, doses in DOSES.items() for dose in sorted(doses, reverse=True)]
    rows = launch.run(measure, points, spec.machine, "doses", LIBRARIES)
    write_table(sorted(rows, key=lambda row: (row["method"], row["dose"])), RESULTS)
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
