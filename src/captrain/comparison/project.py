"""The evaluation of a project: plays what its stages have left, and compares what came of it with what was spent."""

from dataclasses import replace
from pathlib import Path

from captrain.benchmarks import load_benchmark, overlapping_tasks
from captrain.comparison.arms import all_routes, play_arms
from captrain.comparison.baselines.registry import spending_stages
from captrain.comparison.curve import play_curve, whole_curve
from captrain.comparison.rows import controls_of
from captrain.comparison.tables import Evaluation, evaluate, mark_overlap
from captrain.config import Spec
from captrain.environments import read_passports
from captrain.ledger import LedgerEntry
from captrain.records import Capability, Rollout, load


def evaluate_project(spec: Spec, project: Path = Path()) -> tuple[list[Rollout], Evaluation]:
    """Play the test split with the base and all that can act, and compare.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.

    Returns:
        Every rollout of the test split, and the tables.

    Raises:
        UserError: a file is missing or corrupt, or rows that must have one total have not.
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
        evaluation = replace(evaluation, curve=whole_curve(curve, evaluation.main, spec.curve.points))
    if spec.evaluation.splits == "all":
        overlap = {task.id for task in overlapping_tasks(load_benchmark(spec.benchmark, spec.machine))}
        evaluation = mark_overlap(evaluation, len(overlap), len(set(outcomes["task"])))
    return rollouts, evaluation
