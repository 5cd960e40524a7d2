"""The evaluation of a project: plays all arms and compares the methods. Also plays the curves of the trainings.

A curve is the pass rate of one training's checkpoints on the test split. A training passes through all smaller budgets,
so its checkpoints give pass rate over rollouts. (The paper's figure 4 trains anew at every budget.) Each point uses the
final routes, because routes depend on environments and not on adapters. With a constant learning rate a checkpoint
equals a training of that budget; with a schedule that falls to zero it does not.

TRACE and GRPO on the target have a curve. Its rollouts include diagnosis, calibration, and training up to the point.
The last point is the evaluation's own row. Nothing is chosen by a curve.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from captrain.agents import LIBRARIES
from captrain.benchmarks import load_benchmark, overlapping_tasks
from captrain.comparison.arms import Arm, ArmBatch, all_routes, composition_arms, play_arms, play_batch, routed_tasks
from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.baselines.registry import spending_stages
from captrain.comparison.rows import ADAPTERS, BASE, GRPO, TRACE, controls_of, label
from captrain.comparison.tables import OUTCOMES, EvaluationTables, evaluate, mark_overlap
from captrain.environments import read_passports
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.models import CHECKPOINTS, Adapter, checkpoint_marks, require_trained
from captrain.records import Capability, IndexEntry, Rollout, load, read_index
from captrain.run import Spec, launch
from captrain.statistics import Bootstrap, mean, summarise

COLUMNS = ["method", "label", "point", "rollouts_spent", "pass_rate", "low", "high", "tasks", "errors"]
ROUTE = "chosen"
"""Column of TRACE's routes."""


def evaluate_project(spec: Spec, project: Path = Path()) -> tuple[list[Rollout], EvaluationTables]:
    """Play the test split with all arms, and compare the methods.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.

    Returns:
        Every rollout of the test split, and the tables.

    Raises:
        UserError: a file is missing or corrupt, or the totals of rollouts differ.
    """
    results = project / "results"
    rollouts, outcomes, entries = play_arms(spec, project / "artifacts/base", results)
    curve, curve_entries = play_curve(spec, project)
    ledgers = [results / stage / "ledger.jsonl" for stage in spending_stages()]
    passports = read_passports(results / "environments")
    selected = load(results / "capabilities/capabilities.jsonl", Capability)
    evaluation = evaluate(
        outcomes,
        all_routes(results, spec.evaluation.alternatives),
        [entry for path in ledgers for entry in load(path, LedgerEntry)] + entries + curve_entries,
        ranked=[capability.id for capability in selected if capability.id in passports],
        controls=controls_of(results / "controls"),
        resamples=spec.evaluation.resamples,
        confidence=spec.evaluation.confidence,
        seed=spec.seed,
        alternatives=spec.evaluation.alternatives,
    )
    if len(curve):
        # Each curve ends with the evaluation's own row.
        last = evaluation.main[evaluation.main["method"].isin(curve["method"].tolist())].assign(point=spec.curve.points)
        points = [*curve.to_dict("records"), *last.filter(COLUMNS).to_dict("records")]
        points.sort(key=lambda row: (row["method"] != TRACE, row["point"]))
        evaluation = replace(evaluation, curve=pd.DataFrame(points, columns=COLUMNS))
    if spec.evaluation.splits == "all":
        overlap = {task.id for task in overlapping_tasks(load_benchmark(spec.benchmark, spec.machine))}
        evaluation = mark_overlap(evaluation, len(overlap), len(set(outcomes["task"])))
    return rollouts, evaluation


class CurvePoint(NamedTuple):
    """A point of a method's curve: its number from 1 on, the rollouts spent by then, and the arms that act."""

    method: str
    number: int
    rollouts: int
    arms: tuple[Arm, ...]


def play_curve(spec: Spec, project: Path = Path()) -> tuple[pd.DataFrame, list[LedgerEntry]]:
    """Play the test split with the checkpoints at each point before the end (`curve.points` counts the end).

    Returns:
        A table of `COLUMNS` with one row per method and point, and ledger entries.

    Raises:
        UserError: a file is missing or corrupt, or an adapter differs from its index.
    """
    points = [*_points(spec, project)] if spec.curve.points > 1 else []
    batches = [ArmBatch(point.arms, project / "artifacts/base", spec) for point in points]
    rows, ledger, settings = [], list[LedgerEntry](), spec.evaluation
    for point, pairs in zip(points, launch.run(play_batch, batches, spec.machine, "curve", LIBRARIES), strict=True):
        rollouts = [rollout for _, part in pairs for rollout in part]
        outcomes = [(rollout.task.id, rollout.trial, OUTCOMES[rollout.outcome]) for rollout in rollouts]
        frame = pd.DataFrame(outcomes, columns=["task", "trial", "passed"])
        passes = summarise(frame.pivot(index="task", columns="trial", values="passed").to_numpy(dtype=float))
        intervals = Bootstrap(len(passes.rates), settings.resamples, settings.confidence, spec.seed)
        numbers = (point.rollouts, mean(passes.rates), *intervals.interval(passes.rates))
        rows.append((point.method, label(point.method), point.number, *numbers, len(passes.rates), passes.errors))
        item = f"{point.method} {point.number}"
        ledger.append(ledger_entry(rollouts, stage="curve", method="evaluation", item=item))
    return pd.DataFrame(rows, columns=COLUMNS), ledger


def _points(spec: Spec, project: Path) -> Iterator[CurvePoint]:
    """Yield the points before the end of each method that has an adapter."""
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
            yield CurvePoint(
                TRACE, number, before + sum(count for count, _ in adapters.values()), (*acting, *compositions)
            )
        for row in trained[GRPO].values():
            count, adapter = _checkpoint(row, GRPO, number, spec.curve.points, project)
            yield CurvePoint(GRPO, number, count, (Arm(GRPO, GRPO, adapter),))


def _checkpoint(row: IndexEntry, stage: str, number: int, points: int, project: Path) -> tuple[int, Adapter]:
    """Return the rollouts and the adapter of a checkpoint."""
    mark = checkpoint_marks(row.rollouts, points)[number - 1]
    counts = [int(count) for count in row.checkpoints if int(count) >= mark]
    if not counts:  # within the last step
        return row.rollouts, Adapter(str(project / row.path), row.digest)
    name = str(min(counts))
    folder = project / row.path / CHECKPOINTS / name
    return int(name), require_trained(Adapter(str(folder), row.checkpoints[name]), stage)
