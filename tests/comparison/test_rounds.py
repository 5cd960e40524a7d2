"""Rounds: which capabilities a further diagnosis finds new, lacking or undecided, and the next training."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from support.training import ROOT

from captrain.capabilities import SelectionAccount, select, undecided
from captrain.comparison.baselines.rounds import RoundState, contrast, rediscovery_table
from captrain.records import Capability, Label, Rollout, RolloutLabels, Score, Task
from captrain.run import Component, Spec, compose_spec
from captrain.training.jobs import TrainingEnvironment

BENCHMARK = Component.model_validate({"_target_": "captrain.benchmarks.servicedesk.ServiceDesk", "mix": "mixed"})
VERDICTS = {"L": "LACKING", "P": "PRESENT", "-": "NA"}


def environment(name: str) -> TrainingEnvironment:
    return TrainingEnvironment(name, BENCHMARK)


def capability(name: str) -> Capability:
    return Capability(id=name, name=name, description=name)


def evidence(labels: Sequence[RolloutLabels] = (), *taught: str, **lacking: int) -> RoundState:
    candidates = {name: capability(name) for name in ("a", "b")}
    known = [candidates[name] for name in taught if name in candidates]
    return RoundState([], labels, candidates, known, tuple(environment(name) for name in taught), 0.5, lacking)


def rows(prefix: str, runs: int = 5, **counts: tuple[str, int]) -> list[RolloutLabels]:
    """Labels of rollouts in every run: outcome_name=("verdicts of a and b", count)."""
    return [
        RolloutLabels(
            run=run,
            rollout=f"{prefix}{name}{number}",
            outcome="failed" if name.startswith("f") else "passed",
            count=1,
            labels={
                slug: Label.model_validate({"verdict": VERDICTS[sign]}) for slug, sign in zip("ab", signs, strict=True)
            },
        )
        for run in range(runs)
        for name, (signs, count) in counts.items()
        for number in range(count)
    ]


def rollout(name: str, outcome: str) -> Rollout:
    return Rollout.model_validate(
        {
            "id": name, "environment": "desk", "task": Task(id=name, split="discovery", data={}), "trial": 0,
            "purpose": "diagnosis", "policy": "p", "messages": [], "outcome": outcome,
            "score": Score(reward=float(outcome == "passed"), success=outcome == "passed", parts={}),
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def spec() -> Spec:
    return compose_spec("smoke", 0, ["labels.runs=5", "selection.resamples=200"], ROOT / "conf")


def account(spec: Spec, labels: Sequence[RolloutLabels]) -> SelectionAccount:
    return select(labels, [capability("a"), capability("b")], spec.selection, 4, 0).report


def test_demonstrations_are_divided_evenly_with_more_for_lacking_capabilities() -> None:
    plain = evidence([], "a", "b", "a+b")
    assert [count for _, count in plain.doses(10)] == [4, 3, 3]
    again = evidence([], "a", "b", "c", "a+b", a=1)
    assert [(item.name, count) for item, count in again.doses(600)] == [
        ("a", 200),
        ("b", 100),
        ("c", 100),
        ("a+b", 200),
    ]
    assert sum(count for _, count in again.doses(8000)) == 8000


def test_a_candidate_without_passed_occasions_is_undecided(spec: Spec) -> None:
    # No passed rollout exercised `a`. `b` is lacking in passed rollouts as often as in failed ones.
    labels = rows("x", f=("LL", 10), g=("--", 1), f2=("LP", 10), p=("-L", 10), p2=("-P", 10))
    assert undecided(account(spec, labels)) == ["a"]
    decided = rows("x", f=("LP", 20), p=("PP", 20))
    assert undecided(account(spec, decided)) == []


def test_pooled_labels_may_select_what_neither_diagnosis_selects_alone(spec: Spec) -> None:
    first = rows("x", f=("LL", 12), p=("-P", 12))
    assert undecided(account(spec, first)) == ["a"]
    # The agent that learnt `b` passes rollouts that exercise `a`, and fails others.
    fresh = rows("y", f=("-P", 6), p=("PP", 14))
    rollouts = [rollout(f"y{index}", "passed" if index else "failed") for index in range(20)]
    candidates = [capability("a"), capability("b")]
    diagnosis = contrast(spec, 1, rollouts, candidates, fresh, evidence(first, "b"))
    assert [item.id for item in diagnosis.new] == ["a"] and diagnosis.lacking == [] and diagnosis.undecided == []
    assert [item.id for item in select(fresh, candidates, spec.selection, 4, 0).capabilities] == []
    assert len(diagnosis.state.labels) == len(first) + len(fresh)


def test_differences_between_agents_are_not_selected_by_pooled_labels(spec: Spec) -> None:
    # The base always lacks `a` and the trained agent never does, whatever the outcome: `a` explains no failure.
    first = rows("x", f=("LL", 16), p=("LP", 8))
    fresh = rows("y", f=("PP", 2), p=("PP", 22))
    diagnosis = contrast(spec, 1, [], [capability("a"), capability("b")], fresh, evidence(first, "b"))
    pooled = select([*first, *fresh], [capability("a"), capability("b")], spec.selection, 4, 0)
    assert "a" in [item.id for item in pooled.capabilities] and diagnosis.new == []


def test_a_taught_capability_selected_again_is_lacking_not_new(spec: Spec) -> None:
    fresh = rows("y", f=("LP", 12), p=("PP", 12))
    known = evidence(rows("x", f=("LL", 12), p=("PP", 12)), "a", "b")
    diagnosis = contrast(spec, 1, [], [capability("a"), capability("b")], fresh, known)
    assert (diagnosis.new, diagnosis.lacking) == ([], ["a"])


def test_few_failures_of_a_good_agent_do_not_start_a_round(spec: Spec) -> None:
    known = evidence(rows("x", f=("LL", 12), p=("PP", 12)), "a", "b")
    candidates = [capability("a"), capability("b")]
    # All failures lack `a`. The threshold is a tenth of half of all rollouts: 5 of 100.
    for failures, lacking in ((4, []), (5, ["a"])):
        fresh = rows("y", f=("LP", failures), p=("PP", 100 - failures))
        assert contrast(spec, 1, [], candidates, fresh, known).lacking == lacking


def test_rediscovery_lists_each_capability_before_and_after(spec: Spec) -> None:
    first = rows("x", f=("LL", 12), p=("PP", 12))
    before, known = account(spec, first), evidence(first, "a", "b")
    fresh = rows("y", f=("PL", 4), p=("PP", 20))
    after = contrast(spec, 1, [], [capability("a"), capability("b")], fresh, known)
    table = rediscovery_table(before, [after]).set_index(["round", "capability"])
    assert table.loc[(0, "a"), "coverage"] == 1.0 and table.loc[(0, "a"), "lacking"] == 0.5
    assert table.loc[(1, "a"), "coverage"] == 0.0 and table.loc[(1, "b"), "lacking"] == pytest.approx(4 / 24)
    assert (table.loc[(1, "b"), "failed"], table.loc[(1, "b"), "passed"]) == (4, 20)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_more_rounds_share_the_same_tasks_evenly_and_play_each_once(count: int) -> None:
    overrides = [f"baselines.solutions.rounds.count={count}", "baselines.solutions.rounds.tasks=100"]
    rounds = compose_spec("smoke", 0, overrides, ROOT / "conf").baselines.solutions.rounds
    bounds = [rounds.tasks_before(number) for number in range(1, count + 2)]
    shares = [last - first for first, last in pairwise(bounds)]
    assert bounds[0] == 0 and sum(shares) == 100 and max(shares) - min(shares) <= 1


def test_a_project_without_environments_trains_nothing(tmp_path: Path) -> None:
    from captrain.comparison import teach_in_rounds

    assert teach_in_rounds(compose_spec("smoke", 0, [], ROOT / "conf"), tmp_path) is None
