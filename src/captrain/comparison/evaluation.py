"""The evaluation of a project: plays the arms of each row, and compares the methods.

Each row is played separately (`play_row`, stage `evaluation@ROW`), so a changed baseline only replays its own arms.
`compare_rows` (stage `comparison`) reads the outcomes of all rows.

Learning curves: a curve is the pass rate of one training's checkpoints on the test split, over the rollouts spent. (The
paper's figure 4 instead trains a new adapter for every budget.) Each point uses the final routes, whose gate depends on
the finished adapters. With a constant learning rate, a checkpoint equals a training with that budget.
With a schedule that falls to zero it does not.

TRACE and GRPO on the target have a curve. The rollouts of a point are those of training up to it; TRACE's also include
diagnosis and calibration. The last point is the row of the evaluation itself. Curves are never used to choose anything.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from captrain.agents import LIBRARIES
from captrain.benchmarks import load_benchmark, overlapping_tasks
from captrain.comparison.arms import (
    CONTROLS,
    Arm,
    ArmBatch,
    Outcome,
    all_routes,
    composition_arms,
    idle_outcomes,
    outcomes_of,
    play_arms,
    play_batch,
    routed_tasks,
    row_arms,
    split_batch,
)
from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, SOLUTIONS_ADAPTER, TRACE_STAGES
from captrain.comparison.baselines.registry import acting_stages, trained_baselines
from captrain.comparison.differences import ComparisonRow
from captrain.comparison.rows import ADAPTERS, BASE, GRPO, IDLE, TRACE, controls_of, label
from captrain.comparison.tables import OUTCOMES, EvaluationTables, evaluate, mark_overlap
from captrain.environments import read_passports
from captrain.errors import UserError
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.models import CHECKPOINTS, Adapter, checkpoint_marks, require_trained
from captrain.records import (
    Capability,
    IndexEntry,
    Record,
    Rollout,
    load,
    publish,
    publish_text,
    read_index,
    read_table,
    scan,
)
from captrain.run import Spec, launch, repro
from captrain.statistics import Bootstrap, mean, summarise

COLUMNS = ["method", "label", "point", "rollouts_spent", "pass_rate", "low", "high", "tasks", "errors"]
TRAINING_COLUMNS = ["adapter", "rollouts", "reward", "success", "informative"]
ROUTE = "chosen"
"""Column of TRACE's own routes."""
PLAYED = Path("artifacts/played")
"""Folder with the rollouts and outcomes of each row of the evaluation."""


class CurveOutcomes(Record):
    """Outcomes at a point of a method's curve: its number from 1 on, and the rollouts of training by then."""

    method: str
    number: int
    rollouts: int
    outcomes: list[Outcome]


@dataclass(frozen=True)
class PlayedRow:
    """What the comparison reads of every row, so that a new row is no new input of it.

    - rollouts, outcomes, ledger, curve: of what the row played on the test split.
    - spent: the ledger of the row's own stage. Empty for the base, and for TRACE, which is the work of several stages.
    - history: the table of its training by GRPO; None if it has none.
    """

    rollouts: list[Rollout]
    outcomes: list[Outcome]
    ledger: list[LedgerEntry]
    curve: list[CurveOutcomes]
    spent: list[LedgerEntry]
    history: pd.DataFrame | None


def evaluation_rows() -> tuple[str, ...]:
    """Return the rows that are evaluated separately: the base, TRACE, and the other stages that train arms."""
    return (BASE, TRACE, *(stage for stage in acting_stages() if stage != ADAPTERS))


def play_row(spec: Spec, row: str, project: Path = Path()) -> PlayedRow:
    """Play the test split with the arms of a row and the checkpoints on its curve, and read its ledger and history.

    Raises:
        UserError: a file is missing or corrupt, or an adapter differs from its index.
    """
    base, results = project / "artifacts/base", project / "results"
    arms = row_arms(spec, results, row)
    played = play_arms(spec, base, arms) if arms else []
    outcomes = [outcome for arm, rollouts in played for outcome in outcomes_of(arm, rollouts)]
    if row == BASE:
        outcomes = idle_outcomes(played[0][1], load_benchmark(spec.benchmark, spec.machine)) + outcomes
    ledger = [
        ledger_entry(rollouts, stage="evaluation", method="evaluation", item=arm.name) for arm, rollouts in played
    ]
    curve, curve_ledger = _play_curve(spec, row, project)
    spent = results / row / "ledger.jsonl"
    return PlayedRow(
        rollouts=[rollout for _, part in played for rollout in part],
        outcomes=outcomes,
        ledger=ledger + curve_ledger,
        curve=curve,
        spent=load(spent, LedgerEntry) if spent.exists() else [],
        history=_history(results / row) if row in trained_baselines() else None,
    )


def publish_row(played: PlayedRow, folder: Path) -> None:
    """Write all parts of a row."""
    publish(folder / "rollouts.jsonl", played.rollouts)
    publish(folder / "outcomes.jsonl", played.outcomes)
    publish(folder / "ledger.jsonl", played.ledger)
    publish(folder / "curve.jsonl", played.curve)
    publish(folder / "spent.jsonl", played.spent)
    if played.history is not None:
        publish_text(folder / "history.csv", played.history.to_csv(index=False))


class Played(NamedTuple):
    """A rollout of the evaluation with its outcome, its file in the project, and the byte at which its line begins."""

    outcome: Outcome
    rollout: Rollout
    file: Path
    place: int


def played(project: Path = Path(), rows: Sequence[str] | None = None) -> Iterator[Played]:
    """Yield the rollouts of rows, in the order of `evaluation_rows`.

    Args:
        project: folder of artifacts/.
        rows: the rows; None for all that were played.

    Raises:
        UserError: a file is missing or corrupt.
    """
    rows = [row for row in evaluation_rows() if (project / PLAYED / row).exists()] if rows is None else rows
    if not rows:
        raise UserError(f"{project / PLAYED} is missing", f"run `{repro('comparison', project)}`")
    for row in rows:
        file = PLAYED / row / "rollouts.jsonl"
        outcomes = scan(project / file.with_name("outcomes.jsonl"), Outcome)
        acting = (outcome for _, outcome in outcomes if outcome.arm != IDLE)
        for outcome, line in zip_longest(acting, scan(project / file, Rollout)):
            if outcome is None or line is None:
                raise UserError(
                    f"{project / file} and outcomes.jsonl beside it do not have the same rollouts",
                    f"run `{repro(f'evaluation@{row}', project)} -f`",
                )
            place, rollout = line
            yield Played(outcome, rollout, file, place)


def _history(folder: Path) -> pd.DataFrame:
    """Read the columns `TRAINING_COLUMNS` of a training by GRPO, as written."""
    return read_table(folder / "history.csv", words=True, columns=TRAINING_COLUMNS).filter(TRAINING_COLUMNS)


def compare_rows(spec: Spec, project: Path = Path(), rows: Sequence[str] | None = None) -> EvaluationTables:
    """Compare the methods whose rows were played.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        rows: some of `evaluation_rows`, with the base and TRACE; None for all.

    Raises:
        UserError: a file is missing or corrupt, or the totals of rollouts differ.
    """
    rows = evaluation_rows() if rows is None else rows
    results, folders = project / "results", [project / PLAYED / row for row in rows]
    outcomes = _frame(outcome for folder in folders for outcome in load(folder / "outcomes.jsonl", Outcome))
    ledgers = [
        *(results / stage / "ledger.jsonl" for stage in TRACE_STAGES),
        *(folder / "spent.jsonl" for folder in folders),
        *(folder / "ledger.jsonl" for folder in folders),
    ]
    ledger = [entry for path in ledgers for entry in load(path, LedgerEntry)]
    passports = read_passports(results / "environments")
    selected = load(results / "capabilities/capabilities.jsonl", Capability)
    routed = [row for row in (SOLUTIONS_ADAPTER, CONTROLS) if row in rows]
    evaluation = evaluate(
        outcomes,
        all_routes(results, spec.evaluation.alternatives, routed),
        ledger,
        ranked=[capability.id for capability in selected if capability.id in passports],
        controls=controls_of(results / CONTROLS) if CONTROLS in rows else {},
        resamples=spec.evaluation.resamples,
        confidence=spec.evaluation.confidence,
        seed=spec.seed,
        alternatives=spec.evaluation.alternatives,
    )
    before = sum(entry.rollouts for entry in ledger if entry.stage in (DIAGNOSIS, CALIBRATION))
    curve = [
        _curve_row(spec, point, before if point.method == TRACE else 0)
        for folder in folders
        for point in load(folder / "curve.jsonl", CurveOutcomes)
    ]
    trained = {row: folder for row, folder in zip(rows, folders, strict=True) if row in trained_baselines()}
    histories = {ADAPTERS: results / ADAPTERS} | trained
    training = pd.concat([_history(folder).assign(stage=stage) for stage, folder in histories.items()])
    evaluation = replace(evaluation, training=training)
    if curve:
        # The last point of each curve is the row of the evaluation itself.
        last = evaluation.main[evaluation.main["method"].isin([row["method"] for row in curve])]
        points = [*curve, *last.assign(point=spec.curve.points).filter(COLUMNS).to_dict("records")]
        points.sort(key=lambda row: (row["method"] != TRACE, row["point"]))
        evaluation = replace(evaluation, curve=pd.DataFrame(points, columns=COLUMNS))
    if spec.evaluation.splits == "all":
        overlap = {task.id for task in overlapping_tasks(load_benchmark(spec.benchmark, spec.machine))}
        evaluation = mark_overlap(evaluation, len(overlap), len(set(outcomes["task"])))
    return evaluation


def _frame(outcomes: Iterable[Outcome]) -> pd.DataFrame:
    """Tabulate outcomes, a column for each field."""
    return pd.DataFrame([dict(outcome) for outcome in outcomes], columns=[*Outcome.model_fields])


class CurvePoint(NamedTuple):
    """A point of a row's curve: its number (from 1), the training rollouts up to the point, and the arms that act."""

    number: int
    rollouts: int
    arms: tuple[Arm, ...]


def _play_curve(spec: Spec, row: str, project: Path) -> tuple[list[CurveOutcomes], list[LedgerEntry]]:
    """Play the test split with the checkpoints at each point of the curve except the last.

    Raises:
        UserError: a file is missing or corrupt, or an adapter differs from its index.
    """
    points = [*_points(spec, row, project)]
    batches = [split_batch(ArmBatch(point.arms, project / "artifacts/base", spec), len(points)) for point in points]
    flat = [batch for parts in batches for batch in parts]
    played = iter(launch.run(play_batch, flat, spec.machine, "curve", LIBRARIES) if flat else [])
    curve, ledger = list[CurveOutcomes](), list[LedgerEntry]()
    for point, parts in zip(points, batches, strict=True):
        pairs = [pair for _ in parts for pair in next(played)]
        outcomes = [outcome for arm, rollouts in pairs for outcome in outcomes_of(arm, rollouts)]
        curve.append(CurveOutcomes(method=row, number=point.number, rollouts=point.rollouts, outcomes=outcomes))
        rollouts, item = [rollout for _, part in pairs for rollout in part], f"{row} {point.number}"
        ledger.append(ledger_entry(rollouts, stage="curve", method="evaluation", item=item))
    return curve, ledger


def _curve_row(spec: Spec, point: CurveOutcomes, before: int) -> ComparisonRow:
    """Return a point as a row of `COLUMNS`. `before` is the number of rollouts spent before the training."""
    frame, settings = _frame(point.outcomes), spec.evaluation
    scored = frame.assign(passed=[OUTCOMES[outcome] for outcome in frame["outcome"]])
    passes = summarise(scored.pivot(index="task", columns="trial", values="passed").to_numpy(dtype=float))
    intervals = Bootstrap(len(passes.rates), settings.resamples, settings.confidence, spec.seed)
    numbers = (before + point.rollouts, mean(passes.rates), *intervals.interval(passes.rates))
    row = (point.method, label(point.method), point.number, *numbers, len(passes.rates), passes.errors)
    return dict(zip(COLUMNS, row, strict=True))


def _points(spec: Spec, row: str, project: Path) -> Iterator[CurvePoint]:
    """Yield the points of a row's curve except the last. Yields nothing if the row has no curve or no adapter."""
    results, stage = project / "results", {TRACE: ADAPTERS, GRPO: GRPO}.get(row)
    if stage is None or spec.curve.points < 2:
        return
    trained = read_index(results / ("routes" if row == TRACE else row) / "index.json")
    for number in range(1, spec.curve.points):
        checkpoints = {
            name: _checkpoint(entry, stage, number, spec.curve.points, project) for name, entry in trained.items()
        }
        arms = [Arm(name, stage, adapter) for name, (_, adapter) in checkpoints.items()]
        spent = sum(count for count, _ in checkpoints.values())
        if row == TRACE and arms:
            routes = all_routes(results, stages=()).filter(["task", "kind", ROUTE])
            arms += composition_arms(results / "routes", {arm.name: arm for arm in arms}, routes)
            arms = [replace(arm, tasks=routed_tasks(arm.name, routes)) for arm in (Arm(BASE), *arms)]
        if arms:
            yield CurvePoint(number, spent, tuple(arms))


def _checkpoint(row: IndexEntry, stage: str, number: int, points: int, project: Path) -> tuple[int, Adapter]:
    """Return the rollouts and the adapter of a checkpoint."""
    mark = checkpoint_marks(row.rollouts, points)[number - 1]
    counts = [int(count) for count in row.checkpoints if int(count) >= mark]
    if not counts:  # the point is within the last step
        return row.rollouts, Adapter(str(project / row.path), row.digest)
    name = str(min(counts))
    folder = project / row.path / CHECKPOINTS / name
    return int(name), require_trained(Adapter(str(folder), row.checkpoints[name]), stage)
