"""The curve of one training: what its adapters were worth on the test split at points before its end.

A training to the end passes through all smaller budgets, so one of each is a curve of pass rate over rollouts (as the
paper's figure 4 has it, which trains anew at every budget). A point is what the adapters were then, under the routes of
the end: routes rest on environments and not on adapters. A schedule of the learning rate that falls to zero is, before
the end, that of the longer training, and such a point is not what a training of that budget alone would come to; where
the rate is constant it is.

TRACE and the baseline that recipes are held against have a curve. Rollouts spent are all: diagnosis, calibration, and
what was trained with up to the point. The last point is the evaluation's own row. Nothing is chosen by a curve.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from captrain.comparison.arm_names import ADAPTERS
from captrain.comparison.arms import Arm, ArmBatch, all_routes, composition_arms, play_batch, routed_tasks
from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.rows import BASE, GRPO, TRACE, label
from captrain.comparison.statistics import Bootstrap, mean, summarise
from captrain.comparison.tables import OUTCOMES
from captrain.config import Spec
from captrain.execution import launch
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.models import CHECKPOINTS, Adapter, checkpoint_marks, require_trained
from captrain.policies import LIBRARIES
from captrain.records import IndexEntry, JsonObject, Rollout, load, read_index

COLUMNS = ["method", "label", "point", "rollouts_spent", "pass_rate", "low", "high", "tasks", "errors"]
ROUTE = "chosen"
"""The column of the routes that is TRACE."""


class Point(NamedTuple):
    """A point of a method's curve: its number, from 1, the rollouts spent by then, and what acts."""

    method: str
    number: int
    rollouts: int
    arms: tuple[Arm, ...]


def play_curve(spec: Spec, project: Path = Path()) -> tuple[pd.DataFrame, list[LedgerEntry]]:
    """Play the test split with what the adapters were at each point of their training but the end.

    Args:
        spec: the whole specification; `curve.points` is how many points there are.
        project: folder of artifacts/ and results/.

    Returns:
        One row a method and point, see `COLUMNS`; none where there is no point before the end, or nothing was trained.
        What playing has cost.

    Raises:
        UserError: a file is missing or corrupt, or an adapter is not the one that its index names.
    """
    points = [*_points(spec, project)] if spec.curve.points > 1 else []
    batches = [ArmBatch(point.arms, project / "artifacts/base", spec) for point in points]
    rows, ledger = list[JsonObject](), list[LedgerEntry]()
    for point, pairs in zip(points, launch.run(play_batch, batches, spec.machine, "curve", LIBRARIES), strict=True):
        rollouts = [rollout for _, part in pairs for rollout in part]
        rows.append(_row(point, rollouts, spec))
        item = f"{point.method} {point.number}"
        ledger.append(ledger_entry(rollouts, stage="curve", method="evaluation", item=item))
    return pd.DataFrame(rows, columns=COLUMNS), ledger


def whole_curve(table: pd.DataFrame, main: pd.DataFrame, points: int) -> pd.DataFrame:
    """Append to the rows of `play_curve` of each method the evaluation's own, which is the end of its training.

    Args:
        table: of the points before the end.
        main: `Evaluation.main`.
        points: their number, the end among them.
    """
    final = main[main["method"].isin(table["method"].tolist())].assign(point=points)
    rows = [*table.to_dict("records"), *final.filter(COLUMNS).to_dict("records")]
    return pd.DataFrame(sorted(rows, key=lambda row: (row["method"] != TRACE, row["point"])), columns=COLUMNS)


def _points(spec: Spec, project: Path) -> Iterator[Point]:
    """Yield the points before the end, of each method that has an adapter."""
    results = project / "results"
    routes = all_routes(results).filter(["task", "kind", ROUTE])
    paths = [results / stage / "ledger.jsonl" for stage in (DIAGNOSIS, CALIBRATION)]
    before = sum(entry.rollouts for path in paths for entry in load(path, LedgerEntry))
    trained = {stage: read_index(results / stage / "index.json") for stage in (ADAPTERS, GRPO)}
    for number in range(1, spec.curve.points):
        if trained[ADAPTERS]:
            adapters = {
                name: _checkpoint(row, ADAPTERS, number, spec.curve.points, project)
                for name, row in trained[ADAPTERS].items()
            }
            arms = [Arm(name, ADAPTERS, adapter) for name, (_, adapter) in adapters.items()]
            compositions = composition_arms(results, {arm.name: arm for arm in arms}, routes)
            acting = [replace(arm, tasks=routed_tasks(arm.name, routes)) for arm in (Arm(BASE), *arms)]
            yield Point(TRACE, number, before + sum(count for count, _ in adapters.values()), (*acting, *compositions))
        for row in trained[GRPO].values():
            count, adapter = _checkpoint(row, GRPO, number, spec.curve.points, project)
            yield Point(GRPO, number, count, (Arm(GRPO, GRPO, adapter),))


def _checkpoint(row: IndexEntry, stage: str, number: int, points: int, project: Path) -> tuple[int, Adapter]:
    """Return the adapter as it was at a point of its training, after the rollouts that it had then."""
    mark = checkpoint_marks(row.rollouts, points)[number - 1]
    counts = [int(count) for count in row.checkpoints if int(count) >= mark]
    if not counts:  # within the last step
        return row.rollouts, Adapter(str(project / row.path), row.digest)
    name = str(min(counts))
    folder = project / row.path / CHECKPOINTS / name
    return int(name), require_trained(Adapter(str(folder), row.checkpoints[name]), stage)


def _row(point: Point, rollouts: Sequence[Rollout], spec: Spec) -> JsonObject:
    frame = pd.DataFrame(
        [(rollout.task.id, rollout.trial, OUTCOMES[rollout.outcome]) for rollout in rollouts],
        columns=["task", "trial", "passed"],
    ).pivot(index="task", columns="trial", values="passed")
    outcome, settings = summarise(frame.to_numpy(dtype=float)), spec.evaluation
    low, high = Bootstrap(len(frame), settings.resamples, settings.confidence, spec.seed).interval(outcome.rates)
    values = (point.method, label(point.method), point.number, point.rollouts, mean(outcome.rates), low, high)
    return dict(zip(COLUMNS, (*values, int(outcome.rates.size), outcome.errors), strict=True))
