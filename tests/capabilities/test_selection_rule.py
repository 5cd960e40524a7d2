"""The selection rule: what a run says, how many runs are needed, and that a selection's account decides it again."""

import io

import numpy as np
import pytest
from rich.console import Console

from captrain.capabilities.selection import select, selection_table
from captrain.capabilities.selection_rule import (
    Contrast,
    Limits,
    RunRates,
    SelectionAccount,
    decide,
    replay,
    stability_table,
)
from captrain.records import Capability, Label, RolloutLabels
from captrain.run import SelectionSettings

LIMITS = Limits(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, count=2)
RETAINED, NARROW = RunRates(gap=0.2, coverage=0.1), RunRates(gap=0.1, coverage=0.1)
NO_GAP, NO_COVERAGE = RunRates(gap=None, coverage=0.1), RunRates(gap=None, coverage=None)


@pytest.mark.parametrize(
    ("runs", "needed", "selected"),
    [
        ([*[RETAINED] * 8, *[NARROW] * 2], 8, True),
        ([*[RETAINED] * 7, *[NARROW] * 3], 8, False),
        ([*[RETAINED] * 5, *[NO_GAP] * 4, NARROW], 5, True),  # 0.8 of the 6 runs that have a say
        ([*[RETAINED] * 4, *[NO_GAP] * 6], 4, True),  # few have one, and the resamples' bound decides
        ([*[RETAINED] * 3, NARROW, *[NO_GAP] * 6], 4, False),
        ([NO_GAP] * 10, 8, False),  # none has one
        ([*[RETAINED] * 7, *[NO_COVERAGE] * 3], 8, False),  # not to be proposed speaks against
    ],
)
def test_as_many_runs_must_retain_as_the_runs_with_a_say_demand(
    runs: list[RunRates], needed: int, selected: bool
) -> None:
    (decision,) = decide([Contrast(id="a", gap=0.5, gap_low=0.1, coverage=0.5, per_run=runs)], LIMITS)
    assert (decision.required, decision.selected) == (needed, selected)


def test_a_proven_need_selects_where_there_is_nothing_to_contrast_and_ranks_behind_what_the_contrast_selects() -> None:
    undefined = Contrast(id="a", gap=None, gap_low=None, coverage=0.3, per_run=[NO_GAP] * 10)
    contrasted = Contrast(id="b", gap=0.5, gap_low=0.1, coverage=0.5, per_run=[RETAINED] * 10)
    shares = {"proven": 0.3, "proven_low": 0.1, "proven_high": 0.5}
    proven, rare = (
        Contrast(**{**undefined, **shares}),
        Contrast(**{**undefined, **shares, "id": "c", "proven_low": 0.09}),
    )
    assert [d.selected for d in decide([proven, contrasted, rare], LIMITS)] == [True, False, False]
    decisions = decide([proven, contrasted, rare], Limits(**{**LIMITS, "proof": 0.1}))
    assert [(d.id, d.selected, d.by_proof) for d in decisions] == [
        ("b", True, False),
        ("a", True, True),
        ("c", False, False),
    ]


def test_the_share_of_proven_failures_is_over_all_failures_and_its_interval_over_tasks() -> None:
    settings = {"delta": 0.2, "coverage": 0.1, "agreement": 1, "confidence": 0.95, "floor": 0.0, "resamples": 500}
    lacking = {"a": Label(verdict="LACKING"), "b": Label(verdict="LACKING")}
    labels = [
        RolloutLabels(
            run=0, rollout=f"r{n}", task="", outcome="failed" if n < 40 else "passed", count=1, labels=lacking
        )
        for n in range(60)
    ]
    candidates = [Capability(id=slug, name=slug, description=slug) for slug in ("a", "b")]
    needed = {f"r{n}": {"a"} for n in (*range(10), 50)}
    chosen = select(labels, candidates, SelectionSettings.model_validate({**settings, "proof": 0.1}), 4, 0, needed)
    first, second = chosen.report["candidates"]
    assert [capability.id for capability in chosen.capabilities] == ["a"] and first.get("by_proof") is True
    assert first.get("proven") == 0.25 and 0.1 < first.get("proven_low", 0) < 0.2 < 0.3 < first.get("proven_high", 0)
    assert second.get("proven") == 0.0 and "lower bound of proven failures 0.000 is below 0.1" in second["reason"]
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(selection_table(chosen.report))
    assert "by proof: 0.250 of the failures" in captured.get()
    without = select(labels, candidates, SelectionSettings.model_validate(settings), 4, 0)
    assert not without.capabilities and "proven" not in without.report["candidates"][0]


def account(seed: int, failed: int, **changes: float) -> SelectionAccount:
    """Make an account of labels that runs disagree on: resamples of so few failed rollouts that some runs draw none."""
    draw = np.random.default_rng(seed)
    labels = []
    for run in range(6):
        for number in range(12):
            is_failed = number < failed
            verdicts = {
                slug: Label(verdict="LACKING" if draw.random() < (rate if is_failed else 0.1) else "PRESENT")
                for slug, rate in (("a", 0.9), ("b", 0.6), ("c", 0.3))
                if slug != "c" or run
            }
            outcome, count = "failed" if is_failed else "passed", int(draw.integers(0, 2))
            row = RolloutLabels(run=run, rollout=f"r{number}", outcome=outcome, count=count, labels=verdicts)
            labels.append(row)
    candidates = [Capability(id=slug, name=slug, description=slug) for slug in "abc"]
    limits = {"delta": 0.2, "coverage": 0.1, "agreement": 4, "confidence": 0.5, "floor": -1.0, "resamples": 50}
    return select(labels, candidates, SelectionSettings.model_validate(limits | changes), 2, seed).report


@pytest.mark.parametrize("failed", [1, 2, 6])
def test_a_selection_follows_from_its_account_alone(failed: int) -> None:
    without_failed = False
    for seed in range(40):
        written = account(seed, failed)
        selected = [row["id"] for row in written["candidates"] if row["selected"]]
        assert replay(written, 0.2, 0.1) == selected, seed
        stricter = account(seed, failed, delta=0.5, coverage=0.3)
        assert replay(written, 0.5, 0.3) == [row["id"] for row in stricter["candidates"] if row["selected"]], seed
        kept = stability_table(written).groupby("capability").kept.sum().to_dict()
        assert kept == {row["id"]: row["runs_retained"] for row in written["candidates"]}
        without_failed |= any(run["coverage"] is None for row in written["candidates"] for run in row["per_run"][1:])
    assert without_failed or failed == 6  # some runs drew no failed rollout


def test_the_table_of_a_selection_is_whole_in_a_terminal_of_80_columns() -> None:
    report = account(0, 6)
    for row, name in zip(report["candidates"], ("missing_lookup", "undue_compliance", "c"), strict=True):
        row["id"] = name
    terminal = io.StringIO()
    Console(file=terminal, width=80).print(selection_table(report))
    text = terminal.getvalue()
    assert "\u2026" not in text and max(map(len, text.splitlines())) <= 80
    head, *lines = [line.split() for line in text.splitlines()[1:5]]
    assert head == ["capability", "gap", "interval", "mean", "coverage", "runs", "selected"]
    for line, row in zip(lines, report["candidates"], strict=True):
        assert line[0] == row["id"] and line[-1] == ("yes" if row["selected"] else "no")
    for row in report["candidates"]:
        assert row["selected"] or " ".join(f"{row['id']}: {row['reason']}".split()) in " ".join(text.split())
