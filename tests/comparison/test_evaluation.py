"""Evaluation on outcomes made by hand or drawn from known pass rates."""

from collections.abc import Mapping
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.stats import binomtest
from support.outcomes import LEDGER, SMALL, outcomes_of, routes_of, run
from support.results import make_results

from captrain.comparison.rows import compared_pairs, unequal_total
from captrain.comparison.tables import evaluate, publish_evaluation
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.reporting.figures import draw
from captrain.reporting.loaders import load_kinds
from captrain.reporting.pages.files import table_of
from captrain.reporting.tables import table
from captrain.statistics import Bootstrap, best_single, oracle, sign_test, summarise


def drawn(rates: Mapping[str, float], tasks: int, trials: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    letters = {arm: np.where(random.random((tasks, trials)) < rate, "P", "F") for arm, rate in rates.items()}
    return outcomes_of({arm: [list(row) for row in array] for arm, array in letters.items()})


def row(frame: pd.DataFrame, **where: str) -> dict:
    rows = [row for row in frame.to_dict("records") if all(row[name] == value for name, value in where.items())]
    assert len(rows) == 1
    return rows[0]


def test_trace_is_scored_by_the_arm_its_router_chose_for_each_task() -> None:
    result = run(outcomes_of(SMALL), routes_of(["base", "a", "a", "base"], retrieval=["a"] * 4))
    assert row(result.main, method="trace")["pass_rate"] == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert row(result.main, method="router:retrieval")["pass_rate"] == pytest.approx(0.5)
    assert row(result.main, method="base")["pass_hat_k"] == pytest.approx(0.25)


def test_the_random_bound_is_the_exact_mean_over_arms() -> None:
    result = run(outcomes_of(SMALL), routes_of(["base"] * 4))
    assert row(result.main, method="bound:random")["pass_rate"] == pytest.approx((1.5 / 4 + 2 / 4) / 2)


def test_errors_are_counted_but_are_no_failures() -> None:
    arms = {**SMALL, "base": ["PE", "EE", "FF", "PP"]}
    base = row(run(outcomes_of(arms), routes_of(["base"] * 4)).main, method="base")
    assert base["pass_rate"] == pytest.approx((1 + 0 + 1) / 3)
    assert (base["errors"], base["trials"], base["tasks"], base["excluded"]) == (3, 5, 3, 1)
    assert base["pass_hat_k"] == pytest.approx(0.5)


def test_intervals_have_their_nominal_coverage() -> None:
    held, worlds = 0, 120
    for seed in range(worlds):
        random = np.random.default_rng(seed)
        chances = random.choice([0.1, 0.9], size=(100, 1))
        passes = np.where(random.random((100, 4)) < chances, 1.0, 0.0)
        low, high = Bootstrap(100, 400, 0.9, seed).interval(summarise(passes).rates)
        held += low <= 0.5 <= high
    assert binomtest(held, worlds, 0.9).pvalue > 0.01


def test_differences_are_paired_and_antisymmetric() -> None:
    outcomes = drawn({"base": 0.3, "grpo_target": 0.6, "a": 0.6}, tasks=200, trials=4, seed=1)
    result = run(outcomes, routes_of(["a"] * 200))
    gain = row(result.differences, first="trace", second="base")
    assert gain["distinguishable"] and gain["low"] < 0.3 < gain["high"] and gain["p"] < 0.01
    level = row(result.differences, first="trace", second="grpo_target")
    assert not level["distinguishable"] and level["low"] < 0 < level["high"]
    assert level["difference"] == pytest.approx(
        row(result.main, method="trace")["pass_rate"] - row(result.main, method="grpo_target")["pass_rate"]
    )


def test_equal_outcomes_have_no_difference() -> None:
    result = run(outcomes_of(SMALL), routes_of(["base"] * 4))
    same = row(result.differences, first="trace", second="base")
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1.0)
    assert not same["distinguishable"]


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (0, 5), (3, 9), (6, 6), (40, 11)])
def test_the_sign_test_equals_the_exact_binomial_test(better: int, worse: int) -> None:
    expected = binomtest(min(better, worse), better + worse).pvalue if better + worse else 1.0
    assert sign_test(better, worse) == pytest.approx(expected)


def test_the_oracle_does_not_reward_noise() -> None:
    rates, naive = [], []
    for seed in range(40):
        arms = np.random.default_rng(seed).random((5, 200, 4)) < 0.5
        rates.append(np.nanmean(oracle(list(arms * 1.0)).rates))
        naive.append(arms.mean(axis=2).max(axis=0).mean())
    spread = np.std(rates) / np.sqrt(len(rates))
    assert abs(np.mean(rates) - 0.5) < 4 * spread
    assert np.mean(naive) > 0.7


def test_the_oracle_finds_the_better_arm_of_each_task() -> None:
    left = np.array([[1.0] * 4, [0.0] * 4])
    assert oracle([left, 1 - left]).rates.tolist() == [1.0, 1.0]


def test_the_oracle_gives_ties_to_the_first_arm_and_handles_errors() -> None:
    base = np.array([[1.0, np.nan, 1.0, 1.0]])
    other = np.array([[1.0, 1.0, 1.0, 1.0]])
    found = oracle([base, other])
    assert found.errors == 1 and found.rates.tolist() == [1.0]
    assert np.isnan(found.pass_k).all()


def test_one_trial_gives_every_row_except_the_oracle() -> None:
    once = {arm: [letters[0] for letters in rows] for arm, rows in SMALL.items()}
    one, two = (run(outcomes_of(arms), routes_of(["base"] * 4)).main for arms in (once, SMALL))
    assert {*two["method"]} - {*one["method"]} == {"bound:oracle"}
    assert not np.isnan(one["pass_rate"].to_numpy(float)).any()


def test_the_best_single_adapter_is_chosen_and_scored_on_different_tasks() -> None:
    noise = np.random.default_rng(0).random((8, 400, 1)) < 0.5
    names = [f"t{task}" for task in range(400)]
    lucky = max(arm.mean() for arm in noise)
    fair = np.mean(best_single({str(i): arm * 1.0 for i, arm in enumerate(noise)}, names).rates)
    assert fair < lucky
    good, bad = np.ones((60, 2)), np.zeros((60, 2))
    assert best_single({"bad": bad, "good": good}, names[:60]).rates.tolist() == [1.0] * 60


def test_unequal_totals_are_rejected_with_both_numbers() -> None:
    unequal = [*LEDGER, LedgerEntry(stage="environments", purpose="calibration", method="trace", rollouts=5)]
    with pytest.raises(UserError, match="TRACE spent 105 rollouts and grpo_target 100"):
        run(outcomes_of(SMALL), routes_of(["base"] * 4), unequal)


def many(outcomes: Mapping[str, str]) -> pd.DataFrame:
    """`SMALL` with arms of other stages: "stage/arm" -> one string per task, "" if not played."""
    frames = [outcomes_of(SMALL)]
    for name, tasks in outcomes.items():
        stage, arm = name.split("/")
        frame = outcomes_of({arm: tasks.split(",")})
        frames.append(frame.assign(stage=stage))
    return pd.concat(frames)


def charged(stage: str, rollouts: int, item: str = "", purpose: Any = "training", **more: int) -> LedgerEntry:
    return LedgerEntry(stage=stage, purpose=purpose, method=stage, item=item, rollouts=rollouts, **more)


def test_every_acting_stage_is_a_row_with_its_charges() -> None:
    calibration = LedgerEntry(stage="environments", purpose="calibration", method="trace", item="a", rollouts=20)
    ledger = [
        *LEDGER[:2], calibration, charged("grpo_target", 120), charged("gepa", 120), charged("single", 60, "single"),
        charged("mixed", 60), charged("merging", 30, "distillation"),
    ]  # fmt: skip
    stages = {"gepa/gepa": "PP,PP,PP,PP", "adp/adp": "FF,FF,FF,FF", "single/single": "PP,FF,FF,FF"}
    stages |= {"solutions/solutions": "PP,PP,FF,FF"}
    stages |= {"mixed/mixed": "PP,PP,PP,FF", "merging/sum": "PF,PF,FF,FF", "merging/distillation": "PP,PP,FF,PF"}
    result = run(many(stages), routes_of(["base"] * 4), ledger)
    main = result.main
    rates = dict(zip(main["method"], main["pass_rate"], strict=True))
    spent = dict(zip(main["method"], main["rollouts_spent"], strict=True))
    assert rates["gepa"] == 1 and rates["merged:sum"] == 0.25 and rates["merged:distillation"] == 0.625
    assert {name: spent[name] for name in ("trace", "grpo_target", "gepa", "single", "mixed", "merged:sum")} == (
        dict.fromkeys(("trace", "grpo_target", "gepa", "single", "mixed", "merged:sum"), 120)
        | {"single": 120, "mixed": 120}
    )
    # Only the first capability's adapter: diagnosis, its calibration, its training.
    assert row(main, method="single_share")["label"] == "single capability, one share"
    assert rates["single_share"] == 0.5 and spent["single_share"] == 120
    assert "single_share" not in set(run(many({}), routes_of(["base"] * 4)).main["method"])
    assert (spent["adp"], spent["merged:distillation"]) == (0, 150)
    # Diagnosis, calibration, and the stage without a ledger entry.
    assert spent["solutions"] == 60 and unequal_total("solutions").startswith(
        "is taught the environments' own solutions"
    )
    assert row(result.costs, method="solutions")["stages"] == "rollouts environments solutions"
    assert row(result.costs, method="adp")["stages"] == "adp"
    compared = {*zip(result.differences["first"], result.differences["second"], strict=True)}
    assert {("solutions", "base"), ("solutions", "grpo_target"), ("solutions", "adp")} < compared


def test_costs_list_the_stages_of_each_method() -> None:
    table = run(outcomes_of(SMALL), routes_of(["base"] * 4)).costs
    assert row(table, method="trace")["stages"] == "rollouts adapters" and row(table, method="trace")["discarded"] == 10
    assert row(table, method="base")["rollouts"] == 0


def test_another_total_is_rejected_unless_declared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TRACE spent 100 rollouts and gepa 90"):
        run(many({"gepa/gepa": "PP,PP,PP,PP"}), routes_of(["base"] * 4), [*LEDGER, charged("gepa", 90)])
    publish_evaluation(run(many({"adp/adp": "PP,PP,PP,PP"}), routes_of(["base"] * 4)), tmp_path)
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(table(tmp_path))
    assert "Unequal total: ADP trains on demonstrations." in captured.get()


def test_a_composition_plays_only_tasks_routed_to_it() -> None:
    outcomes = many({"compositions/a+b": "PP,PP"})
    result = run(outcomes, routes_of(["a+b", "a+b", "a", "base"], sets=["a+b", "base", "base", "base"]))
    assert row(result.main, method="trace")["pass_rate"] == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert row(result.main, method="router:sets")["pass_rate"] == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    with pytest.raises(UserError, match=r"leads to a\+b, which was not"):
        run(outcomes, routes_of(["base", "base", "a+b", "base"]))


def test_bounds_do_not_use_compositions() -> None:
    bound = row(run(many({"compositions/a+b": "PP,PP"}), routes_of(["base"] * 4)).main, method="bound:random")
    assert (
        bound["pass_rate"]
        == row(run(outcomes_of(SMALL), routes_of(["base"] * 4)).main, method="bound:random")["pass_rate"]
    )


def test_without_alternatives_adapters_play_only_routed_tasks_and_there_are_no_bounds() -> None:
    played = many({}).query("arm != 'a' or task in ['t0', 't1']")
    routes = routes_of(["a", "a", "base", "base"])
    with pytest.raises(UserError, match="arm a has 4 outcomes where 4 tasks x 2 trials were played"):
        run(played, routes)
    result = evaluate(
        played, routes, LEDGER, ranked=["a"], controls={}, resamples=500, confidence=0.95, seed=0, alternatives=False
    )
    assert [*result.main["method"]] == ["idle", "base", "grpo_target", "trace"]
    assert row(result.main, method="trace") == row(run(many({}), routes).main, method="trace")
    assert not {"bound:oracle", "bound:random"} & {*result.differences["first"], *result.differences["second"]}


def test_a_control_is_charged_only_for_its_own_capabilities() -> None:
    ledger = [*LEDGER, charged("controls", 60, "b"), charged("controls", 60, "c")]
    routes = routes_of(["a"] * 4).assign(**{"control:random": ["b", "b", "base", "base"]})
    result = evaluate(
        many({"controls/b": "PP,PP"}), routes, ledger, ranked=["a"], controls={"random": ["b"]},
        resamples=100, confidence=0.95, seed=0,
    )  # fmt: skip
    control = row(result.main, method="control:random")
    assert (control["rollouts_spent"], control["pass_rate"]) == (100, pytest.approx(2.5 / 4))
    assert row(result.differences, first="trace", second="control:random")["difference"] == pytest.approx(0.5 - 2.5 / 4)


def test_evaluation_rollouts_are_reported_but_not_spent() -> None:
    result = run(outcomes_of(SMALL), routes_of(["base"] * 4))
    spent = dict(zip(result.main["method"], result.main["rollouts_spent"], strict=True))
    assert (spent["base"], spent["trace"], spent["grpo_target"], spent["bound:oracle"]) == (0, 100, 100, 100)
    assert result.metrics.rollouts == {"trace": 100, "grpo_target": 100, "evaluation": 7}
    assert row(result.ledger, stage="adapters")["discarded"] == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame[(frame["arm"] != "a") | (frame["trial"] == 0)], "arm a has 4 outcomes where 4 tasks"),
        (lambda frame: pd.concat([frame, frame.head(1)]), "was evaluated twice"),
        (lambda frame: frame[frame["arm"] != "base"], "base was not evaluated"),
        (lambda frame: frame.assign(outcome="timeout"), "outcomes hold timeout"),
    ],
)
def test_duplicate_or_missing_outcomes_are_rejected(change, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(change(outcomes_of(SMALL)), routes_of(["base"] * 4))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [(["base"] * 3, "1 evaluated tasks have no route"), (["base", "base", "b", "b"], "leads to b, which was not")],
)
def test_routes_that_do_not_match_outcomes_are_rejected(chosen: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(outcomes_of(SMALL), routes_of(chosen))


def test_without_adapters_only_the_single_adapter_bound_is_undefined() -> None:
    arms = {name: SMALL[name] for name in ("base", "grpo_target")}
    result = run(outcomes_of(arms), routes_of(["base"] * 4))
    assert np.isnan(row(result.main, method="bound:best_single")["pass_rate"])
    assert "bound:best_single" not in result.metrics.pass_rate
    assert row(result.main, method="bound:random")["pass_rate"] == row(result.main, method="base")["pass_rate"]


def test_rates_by_kind_average_to_the_rate_of_all_tasks() -> None:
    result = run(outcomes_of(SMALL), routes_of(["base"] * 4))
    kinds = [row(result.kinds, method="base", kind=kind)["pass_rate"] for kind in ("even", "odd")]
    assert np.mean(kinds) == pytest.approx(row(result.main, method="base")["pass_rate"])


def test_tasks_without_a_kind_have_no_rates_by_kind(tmp_path: Path) -> None:
    make_results(tmp_path / "results")
    published = run(outcomes_of(SMALL).assign(kind=""), routes_of(["base"] * 4))
    publish_evaluation(published, tmp_path / "results/evaluation")
    assert published.kinds.empty and load_kinds(tmp_path).empty
    names = {path.stem for path in draw(tmp_path / "results", tmp_path / "figures")}
    assert "main" in names and "kinds" not in names
    assert table_of(tmp_path, "results/evaluation/kinds.csv") == []


def test_row_order_does_not_matter_and_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    outcomes, routes = drawn({"base": 0.3, "grpo_target": 0.6, "a": 0.6}, 30, 4, seed=2), routes_of(["a"] * 30)
    publish_evaluation(run(outcomes, routes), tmp_path / "one")
    publish_evaluation(
        run(outcomes.sample(frac=1, random_state=0), routes.sample(frac=1, random_state=1)), tmp_path / "two"
    )
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["differences.csv", "kinds.csv", "ledger.csv", "main.csv", "metrics.json", "spent.csv"]
    for folder, name in product(("one", "two"), names):
        assert (tmp_path / folder / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_an_oracle_below_a_router_is_marked_as_no_bound(tmp_path: Path) -> None:
    """With two trials the oracle's choice is luck: it takes an arm that passed once by chance and fails next time."""

    luck = {"base": ["PF", "FP", "PF", "FP"], "grpo_target": ["FF"] * 4, "a": ["PF", "FP", "FP", "PP"]}
    arms = {name: [list(task) for task in tasks] for name, tasks in luck.items()}
    publish_evaluation(run(outcomes_of(arms), routes_of(["a"] * 4)), tmp_path)
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(table(tmp_path))
    assert "no bound here. Set evaluation.trials=4" in captured.get()


def test_the_printed_table_explains_its_counts(tmp_path: Path) -> None:
    publish_evaluation(run(outcomes_of(SMALL), routes_of(["base"] * 4)), tmp_path)
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(table(tmp_path))
    text = captured.get()
    assert "95% interval" in text and "GRPO on target" in text and "bound: oracle router" in text
    assert "40 diagnosis + 60 training" in text
    assert "Not counted: 7 evaluation rollouts" in text and "no bound here" not in text


def test_a_missing_table_names_its_stage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dvc repro comparison"):
        table(tmp_path)


def test_rows_are_compared_only_with_played_rows() -> None:
    played = ["base", "trace", "solutions", "adp", "router:sets"]
    assert {("solutions", "adp"), ("router:sets", "trace")} < {*compared_pairs(played)}
    assert not [pair for pair in compared_pairs(played) if "grpo_target" in pair]
    further = {*compared_pairs([*played, "grpo_target"])} - {*compared_pairs(played)}
    assert {("router:sets", "grpo_target"), ("solutions", "grpo_target"), ("trace", "grpo_target")} <= further
