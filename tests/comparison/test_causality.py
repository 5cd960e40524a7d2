"""The causal test of capabilities: simulated worlds with a known answer, sums by hand, and a project on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from captrain.capabilities import LabelRequest
from captrain.comparison import BASE, PLAYED, TRACE, Causality, evaluation_rows, measure_causality, publish_causality
from captrain.comparison.arms import Arm, outcomes_of
from captrain.comparison.causality import Outcomes, causal_tables
from captrain.errors import UserError
from captrain.projects.pipeline import shipped_stages
from captrain.records import Capability, Label, Rollout, RolloutLabels, Score, Task, publish
from captrain.run import compose_spec
from captrain.statistics import Bootstrap

ROOT = Path(__file__).parents[2]
COPY, STEPS = (Capability(id=name, name=name.title(), description="Does it.") for name in ("copy", "steps"))
NAN = float("nan")
Floats = NDArray[np.float64]


def tables_of(
    passes: Mapping[str, Floats], lacks: Mapping[tuple[int, int], frozenset[str]], **stages: str
) -> Causality:
    stages = {arm: "adapters" for arm in passes if arm != "base"} | stages
    outcomes = Outcomes({arm: np.array(rows, dtype=float) for arm, rows in passes.items()}, lacks, stages)
    return causal_tables(outcomes, [COPY, STEPS], Bootstrap(len(passes["base"]), 500, 0.95, 0))


def world(
    change: Mapping[str, Mapping[str, float]],
    tasks: int = 900,
    trials: int = 4,
    stages: Mapping[str, str] | None = None,
) -> Causality:
    """A third of the tasks needs `copy`, a third `steps`, a third neither. The base passes each task with its
    own chance. A failure is labelled with the task's need. `change`: arm -> need -> added chance."""
    random = np.random.default_rng(0)
    needs = np.array(["copy", "steps", ""])[np.arange(tasks) % 3]
    chances = random.uniform(0.0, 0.5, tasks)
    base = (random.random((tasks, trials)) < chances[:, None]).astype(float)
    passes = {"base": base}
    for arm, gains in change.items():
        added = np.array([gains.get(need, 0.0) for need in needs])
        passes[arm] = (random.random((tasks, trials)) < (chances + added)[:, None]).astype(float)
    lacks = {
        (task, trial): frozenset({str(needs[task])} - {""}) for task, trial in zip(*np.nonzero(base == 0), strict=True)
    }
    return tables_of(passes, lacks, **(stages or {}))


def row(frame: pd.DataFrame, **where: str) -> dict[Any, Any]:
    [match] = [row for row in frame.to_dict("records") if all(row[name] == value for name, value in where.items())]
    return match


def test_a_specific_repair_differs_from_no_repair() -> None:
    causality = world({"copy": {"copy": 0.4}, "steps": {}})
    copy, steps = (row(causality.capabilities, capability=name) for name in ("copy", "steps"))
    for name in ("difference", "specificity"):
        assert copy[f"{name}_low"] < 0.4 < copy[f"{name}_high"] and copy[f"{name}_low"] > 0.3
        assert steps[f"{name}_low"] < 0 < steps[f"{name}_high"]
    assert copy["placebo_low"] < 0 < copy["placebo_high"]
    assert copy["claimed"] == pytest.approx(1 / 3, abs=0.03)
    # The adapter adds 0.4. Other trials of failed tasks pass with a chance a little below 0.25.
    assert copy["efficacy"] == pytest.approx(0.4 / (1 - 0.22), abs=0.05)
    assert copy["repaired"] == pytest.approx(copy["claimed"] * copy["efficacy"], abs=0.02)


def test_adapters_from_solutions_are_listed_beside_those_from_rewards() -> None:
    change = {"copy": {"copy": 0.4}, "steps": {"steps": 0.4}, "solutions:copy": {}, "solutions:steps": {"copy": 0.4}}
    table = world(change, stages={"solutions:copy": "solutions", "solutions:steps": "solutions"}).capabilities
    assert [*table["adapter"]] == ["copy", "steps", "solutions:copy", "solutions:steps"]
    assert [*table["name"]] == ["Copy", "Steps", "Copy (solutions)", "Steps (solutions)"]
    by_rewards, by_solutions = (row(table, capability="copy", adapter=arm) for arm in ("copy", "solutions:copy"))
    assert by_rewards["claimed"] == by_solutions["claimed"] and by_rewards["efficacy_low"] > 0.3
    assert by_solutions["efficacy_low"] < 0 < by_solutions["efficacy_high"]
    # Its placebo is the other adapter of its family, which repairs `copy` here.
    assert by_rewards["placebo_low"] < 0 < by_rewards["placebo_high"] and by_solutions["placebo_low"] > 0.3


def test_regression_to_the_mean_is_no_repair() -> None:
    """Regression to the mean: other trials of a failed task are better anyway."""
    causality = world({"copy": {}, "steps": {}})
    for name in ("copy", "steps"):
        lacking = row(causality.effects, capability=name, stratum="lacking", arm=name)
        assert lacking["base"] > 0.15  # labels and rates of the same trial would show this as repaired
        assert lacking["low"] < 0 < lacking["high"]
        assert lacking["rate"] == pytest.approx(lacking["base"], abs=0.04)
    passed = row(causality.effects, stratum="passed", arm="copy")
    assert passed["low"] < 0 < passed["high"] and passed["base"] < 0.5


def test_help_everywhere_is_no_specific_repair() -> None:
    gains = {"copy": 0.4, "steps": 0.4, "": 0.4}
    copy = row(world({"copy": gains, "steps": gains}).capabilities, capability="copy")
    assert copy["efficacy_low"] > 0.4 and copy["placebo_low"] > 0.3
    for name in ("difference", "specificity"):
        assert copy[f"{name}_low"] < 0 < copy[f"{name}_high"]


def test_labels_of_one_trial_meet_only_outcomes_of_other_trials() -> None:
    """Task 0 lacks both in trial 0. Task 1 lacks copy in trials 0 and 1, and the adapter passes trial 1. Task 2 has no
    label and passes once."""
    passes = {
        "base": np.array([[0, 1], [0, 0], [0, 1]]),
        "copy": np.array([[1, 0], [0, 1], [1, 1]]),
        "steps": np.array([[1, 1], [0, 0], [0, 0]]),
    }
    both, copy = frozenset({"copy", "steps"}), frozenset({"copy"})
    causality = tables_of(passes, {(0, 0): both, (1, 0): copy, (1, 1): copy, (2, 0): frozenset()})
    numbers = row(causality.capabilities, capability="copy")
    assert [numbers[name] for name in ("failures", "lacking", "sole", "tasks")] == [4, 3, 2, 2]
    assert numbers["claimed"] == 3 / 4
    effect = {name: row(causality.effects, capability="copy", stratum=name, arm="copy") for name in ("lacking", "sole")}
    # Pairs (label, score) of copy: (0,0)->(0,1): 0-1; (1,0)->(1,1): 1-0; (1,1)->(1,0): 0-0.
    assert effect["lacking"]["change"] == pytest.approx(0.0) and effect["lacking"]["base"] == pytest.approx(1 / 3)
    assert effect["sole"]["change"] == pytest.approx(1 / 2)
    assert row(causality.effects, capability="copy", stratum="other", arm="copy")["change"] == pytest.approx(0.0)
    # Recurring failures: none for task 0, both for task 1; task 2's other trial passes.
    assert numbers["sole_efficacy"] == pytest.approx(1 / 2) and numbers["repaired"] == pytest.approx(0.0)
    # Task 0 also lacks steps, so the adapter of steps is a placebo only on task 1.
    assert numbers["placebo"] == pytest.approx(0.0) and numbers["specificity"] == pytest.approx(1 / 2)


def test_errors_and_single_trials_give_undefined_numbers_not_zero() -> None:
    copy = frozenset({"copy"})
    passes = {"base": np.array([[0, NAN], [0, 1]]), "copy": np.array([[1, 1], [1, NAN]])}
    numbers = row(tables_of(passes, {(0, 0): copy, (1, 0): copy}).capabilities, capability="copy")
    assert numbers["claimed"] == 1.0
    assert all(np.isnan(numbers[name]) for name in ("efficacy", "repaired", "difference", "placebo", "specificity"))
    once = {"base": np.array([[0], [1]]), "copy": np.array([[1], [1]])}
    assert np.isnan(row(tables_of(once, {(0, 0): copy}).capabilities, capability="copy")["efficacy"])


def test_an_adapter_without_a_selected_capability_is_shown_but_is_no_placebo() -> None:
    passes = {
        "base": np.zeros((4, 2)),
        "copy": np.ones((4, 2)),
        "generalist": np.ones((4, 2)),
        "mixed": np.ones((4, 2)),
    }
    causality = tables_of(passes, {(0, 0): frozenset({"copy"})}, mixed="mixed")
    assert [*causality.capabilities["capability"]] == ["copy"]
    assert np.isnan(causality.capabilities["placebo"][0])
    assert {*causality.effects["arm"]} == {"copy", "generalist", "mixed"}
    assert row(causality.effects, capability="copy", stratum="lacking", arm="generalist")["change"] == 1.0


class Reader:
    """An analyst that labels everything with copy, and records what it was shown."""

    deterministic = True

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[dict[str, Any]]) -> list[list[Capability]]:
        raise AssertionError("nothing is proposed from the test split")

    def label(self, requests: Sequence[LabelRequest], tools: list[dict[str, Any]]) -> list[dict[str, Label]]:
        self.rollouts = [request.rollout for request in requests]
        return [{one.id: Label(verdict="LACKING") for one in request.capabilities} for request in requests]


COMPOSED = Arm("0.5*copy+0.5*other", "compositions")


def play(task: int, trial: int, outcome: str, adapter: str | None = None, split: str = "test") -> Rollout:
    return Rollout.model_validate(
        {
            "id": f"{adapter}{task}{trial}",
            "environment": "desk",
            "task": Task.model_validate({"id": f"desk/{split}/{task}", "split": split, "data": {}}),
            "trial": trial,
            "purpose": "evaluation",
            "policy": "p0",
            "adapter": adapter,
            "messages": [{"role": "user", "content": "Hello."}],
            "score": None if outcome == "error" else Score(reward=0.0, success=outcome == "passed", parts={}),
            "outcome": outcome,
        }
    )


def project(folder: Path, rollouts: Sequence[Rollout]) -> Path:
    """Write what the base and the adapter `copy` played. A prompt and a composition of adapters have outcomes, too."""
    base = [rollout for rollout in rollouts if rollout.adapter is None]
    played = {
        BASE: [(Arm(BASE), base), (Arm("idle"), base)],
        TRACE: [(Arm("copy", "adapters"), [rollout for rollout in rollouts if rollout.adapter]), (COMPOSED, base)],
        "gepa": [(Arm("gepa", "gepa"), base)],
    }
    for row in evaluation_rows():
        arms = played.get(row, [])
        publish(folder / PLAYED / row / "rollouts.jsonl", base if row == BASE else [])
        publish(folder / PLAYED / row / "outcomes.jsonl", [one for arm, part in arms for one in outcomes_of(arm, part)])
    publish(folder / "results/capabilities/capabilities.jsonl", [COPY])
    return folder


def base_and_adapter(split: str = "test") -> list[Rollout]:
    base = [play(task, trial, "failed" if task else "passed", split=split) for task in range(3) for trial in range(2)]
    base[-1] = play(2, 1, "error", split=split)
    return base + [play(task, trial, "passed", "feed", split) for task in range(3) for trial in range(2)]


def measured(folder: Path, *overrides: str, reader: Reader | None = None) -> tuple[list[RolloutLabels], Causality]:
    spec = compose_spec("smoke", 0, overrides, ROOT / "conf")
    return measure_causality(reader or Reader(), [], spec, folder)


def test_only_failed_rollouts_of_the_base_are_labelled(tmp_path: Path) -> None:
    reader = Reader()
    labels, causality = measured(project(tmp_path, base_and_adapter()), reader=reader)
    assert {(rollout.outcome, rollout.adapter) for rollout in reader.rollouts} == {("failed", None)}
    assert [row.rollout for row in labels] == [rollout.id for rollout in reader.rollouts]
    numbers = row(causality.capabilities, capability="copy")
    assert (numbers["failures"], numbers["claimed"], numbers["efficacy"]) == (3, 1.0, 1.0)
    publish_causality(causality, tmp_path / "results/causality")
    again = pd.read_csv(tmp_path / "results/causality/capabilities.csv")
    assert again["name"].tolist() == ["Copy"] and again["efficacy"].tolist() == [1.0]
    assert {*causality.effects["arm"]} == {"copy"}


def test_a_rollout_of_another_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="discovery split"):
        measured(project(tmp_path, base_and_adapter("discovery")))


def test_a_disabled_test_asks_nothing_and_writes_empty_tables(tmp_path: Path) -> None:
    reader = Reader()
    labels, causality = measured(project(tmp_path, base_and_adapter()), "causality.run=false", reader=reader)
    assert not labels and not reader.rollouts
    publish_causality(causality, tmp_path / "out")
    assert pd.read_csv(tmp_path / "out/capabilities.csv").empty and pd.read_csv(tmp_path / "out/effects.csv").empty


def test_only_figures_read_labels_of_the_test_split() -> None:
    stages = shipped_stages()
    inputs = {name: [dep for dep in stage.get("deps", []) if "/causality" in dep] for name, stage in stages.items()}
    readers = {name for name, deps in inputs.items() if any(not dep.startswith(("src/", "stages/")) for dep in deps)}
    assert readers == {"figures"}
    assert not any(dep.startswith("artifacts/causality") for stage in stages.values() for dep in stage.get("deps", []))
