"""The selection as the paper has it: its arithmetic on labels of the reference's shape, its ranking, its runs,
and rollouts of one task, which are no independent evidence."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
from support.published_labels import CANDIDATES, COUNTS, FAILED, PASSED, published_labels

from captrain.capabilities.labelling import label_runs
from captrain.capabilities.selection import select
from captrain.capabilities.selection_rule import CandidateAccount, mean_gap, replay
from captrain.records import Capability, Label, Message, Rollout, Score, Task
from captrain.run import SelectionSettings

PUBLISHED = SelectionSettings(
    delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200, ranking="mean_gap"
)


def accounts(selection: SelectionSettings = PUBLISHED, count: int = 4) -> dict[str, CandidateAccount]:
    report = select(published_labels(), CANDIDATES, selection, count, 0).report
    return {row["id"]: row for row in report["candidates"]}


def test_each_run_has_the_gap_and_coverage_that_its_counts_give() -> None:
    rows = accounts()
    for slug, runs in COUNTS.items():
        gaps = [lacking / exercised - passed / 40 for lacking, exercised, passed in runs]
        coverages = [lacking / FAILED for lacking, _, _ in runs]
        assert [run["gap"] for run in rows[slug]["per_run"]] == pytest.approx(gaps, abs=1e-6), slug
        assert [run["coverage"] for run in rows[slug]["per_run"]] == pytest.approx(coverages, abs=1e-6), slug
        assert mean_gap(rows[slug]) == pytest.approx(fmean(gaps), abs=1e-6), slug
    first = rows["multi_step"]["per_run"]
    assert round(fmean(run["coverage"] or 0.0 for run in first), 4) == 0.4773
    assert round(fmean(run["gap"] or 0.0 for run in first), 4) == 0.7947


def test_the_published_thresholds_keep_six_of_nine() -> None:
    rows = accounts(count=9)
    retained = {slug: row["runs_retained"] for slug, row in rows.items()}
    assert retained == dict(zip(COUNTS, [10, 10, 10, 10, 9, 9, 7, 3, 0], strict=True))
    assert {slug for slug, row in rows.items() if row["selected"]} == {*list(COUNTS)[:6]}


def test_the_ranking_decides_which_of_those_that_meet_the_rule_are_kept() -> None:
    first = ["multi_step", "constraint", "numerical"]
    kept = {}
    for ranking in ("product", "mean_gap", "gap", "coverage"):
        selection = PUBLISHED.model_copy(update={"ranking": ranking})
        report = select(published_labels(), CANDIDATES, selection, 4, 0).report
        kept[ranking] = [row["id"] for row in report["candidates"] if row["selected"]]
        assert replay(report, 0.2, 0.1) == kept[ranking]
        assert report["thresholds"].get("ranking", "product") == ranking
    assert kept == {
        "product": [*first, "policy"],
        "mean_gap": [*first, "aggregation"],
        "gap": [*first, "aggregation"],
        "coverage": ["multi_step", "policy", "constraint", "numerical"],
    }


def test_four_copies_of_every_rollout_make_no_interval_narrower() -> None:
    """The same task played four times at temperature 0 is known once."""

    def width(copies: int, by_task: bool) -> float:
        rows = [
            row.model_copy(update={"rollout": f"{row.rollout}/{trial}", "task": row.rollout if by_task else ""})
            for row in published_labels()
            for trial in range(copies)
        ]
        row = next(row for row in select(rows, CANDIDATES, PUBLISHED, 4, 0).report["candidates"] if row["id"] == "tone")
        assert row["gap_low"] is not None and row["gap_high"] is not None
        return row["gap_high"] - row["gap_low"]

    once = width(1, by_task=False)
    assert width(4, by_task=True) == once
    assert width(4, by_task=False) < 0.7 * once


def rollouts(trials: int) -> list[Rollout]:
    """Ten tasks, the odd ones failed."""
    messages: list[Message] = [{"role": "user", "content": "go"}]
    return [
        Rollout(
            id=f"t{task}/{trial}",
            environment="e",
            task=Task(id=f"e/t{task}", split="discovery", data={}),
            trial=trial,
            purpose="diagnosis",
            policy="p",
            messages=messages,
            score=Score(reward=1.0 - task % 2, success=task % 2 == 0),
            outcome="failed" if task % 2 else "passed",
        )
        for task in range(10)
        for trial in range(trials)
    ]


class Recorder:
    """Keeps the samples that it is shown."""

    deterministic = False

    def __init__(self) -> None:
        self.samples: list[list[Rollout]] = []

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: Any) -> list[list[Capability]]:
        self.samples = [[*sample] for sample in samples]
        return [[CANDIDATES[0]] for _ in samples]

    def label(self, requests: Sequence[Any], tools: Any) -> list[dict[str, Label]]:
        return [{CANDIDATES[0].id: Label(verdict="PRESENT", evidence="e", message=0)} for _ in requests]


def test_a_resample_draws_tasks_with_all_of_their_rollouts() -> None:
    analyst = Recorder()
    _, rows = label_runs(analyst, rollouts(trials=3), [], 4, seed=0)
    for run, sample in enumerate(analyst.samples):
        drawn = {row.rollout: row.count for row in rows if row.run == run}
        assert drawn == {name: sum(rollout.id == name for rollout in sample) for name in drawn}
        assert all(drawn[f"t{task}/0"] == drawn[f"t{task}/1"] == drawn[f"t{task}/2"] for task in range(10))
        assert len(sample) == 30 and set(drawn.values()) > {0, 1}
    assert {row.task for row in rows} == {f"e/t{task}" for task in range(10)}


def test_without_resamples_every_run_sees_every_rollout_once_in_an_order_of_its_own() -> None:
    analyst = Recorder()
    _, rows = label_runs(analyst, rollouts(trials=1), [], 4, seed=0, resample=False)
    assert {row.count for row in rows} == {1} and {row.task for row in rows} == {""}
    orders = [tuple(rollout.id for rollout in sample) for sample in analyst.samples]
    assert all(sorted(order) == sorted(orders[0]) for order in orders) and len({*orders}) > 1
    assert len(orders[0]) == 10 and FAILED + PASSED == 164
