"""The whole pipeline through `dvc repro`, as a user runs it: experiment smoke in its own repository."""

import json
import re
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import yaml
from support.needs import further
from support.smoke import BIN, STAGES, Repository

from captrain.comparison import played, trained_baselines
from captrain.ledger import LedgerEntry
from captrain.records import Rollout, load

TRAINING = [
    "adapters",
    "solutions",
    "gepa",
    "grpo_target",
    "grpo_untuned",
    "rejection_sft",
    "failures_sft",
    "adp",
    "warm_grpo",
    "awm",
    "awm_sft",
    "single",
    "mixed",
    "solutions_grpo",
    "mixture",
    "solutions_mixture",
    "merging",
    "controls",
]
LINE = re.compile(r"(?: *\d+ of \d+  )?([a-z_@]+) +\d+\.\d s   \S")
EVALUATION = [name for name in STAGES if name.startswith("evaluation@")]


@pytest.fixture(scope="module")
def project(smoke: Path, tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Repository:
    folder = shutil.copytree(smoke, tmp_path_factory.mktemp("project") / "repository", symlinks=True)
    return Repository(folder, warm)


@pytest.fixture
def spare(smoke: Path, tmp_path: Path, warm: Path) -> Repository:
    """A copy for one test that may change it."""
    return Repository(shutil.copytree(smoke, tmp_path / "repository", symlinks=True), warm)


def rollouts(project: Repository) -> Sequence[Rollout]:
    return load(project.folder / "artifacts/rollouts/discovery.jsonl", Rollout)


def test_every_stage_leaves_its_results_and_the_table_prints(project: Repository) -> None:
    said = project.call("captrain", "results", "--all")
    assert "GRPO on target" in said and "TRACE" in said and "oracle" in said
    for name in ("main.pdf", "main.png", "capabilities.pdf", "training.png"):
        assert (project.folder / "results/figures" / name).stat().st_size > 1000
    assert "pass_rate" in project.call("dvc", "metrics", "show", "--json")


def test_a_second_run_does_nothing_quickly_and_git_finds_nothing_changed(project: Repository) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "up to date" in Repository(project.folder, BIN).call("dvc", "repro")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30
    assert project.call("git", "status", "--porcelain") == ""


def test_a_run_says_what_it_will_take_then_a_line_a_stage_and_the_table_last(spare: Repository) -> None:
    spare.choose("causality.run=false")
    composed, forecast, *lines = spare.call("captrain", "run").splitlines()
    assert re.match(r"compose +\d+\.\d s   experiment smoke, seed 0", composed)
    assert re.match(r"2 stages to run, about [\d.]+ (s|min) by the measured speed of this machine$", forecast)
    ends = [place for place, line in enumerate(lines) if LINE.match(line)]
    assert [lines[place].split("   ")[0] for place in ends] == [" 1 of 2  causality", " 2 of 2  figures"]
    assert "The baselines follow." not in lines
    results = lines[ends[-1] + 1 :]
    assert results[0].rstrip() == "Test split: 40 tasks" and "  captrain results --all" in results[-3]
    assert not any("Running stage" in line or "Warning" in line for line in lines)
    (spare.folder / ".dvc/tmp/rwlock").write_text('{"read": {"results/spec.yaml": [')
    removed, *lines = spare.call("captrain", "run").splitlines()
    assert removed.startswith("removed .dvc/tmp/rwlock, which a kill had cut off") and lines == results


def test_the_base_and_trace_are_evaluated_and_printed_before_what_they_are_compared_with(spare: Repository) -> None:
    spare.choose("evaluation.trials=3", "causality.run=false")
    lines = spare.call("captrain", "run").splitlines()
    stages = [found[1] for line in lines if (found := LINE.match(line))]
    assert {*stages[:3]} == {"compose", "evaluation@base", "evaluation@trace"} and "comparison" in stages[3:]
    first, last = (place for place, line in enumerate(lines) if line.startswith("Test split: 40 tasks"))
    rows = {line.split("  ")[0].strip() for line in lines[first + 1 : lines.index("The baselines follow.")]}
    assert {"TRACE", "base", "Difference of TRACE"} <= rows and "GRPO on target" not in rows
    for label in ("TRACE ", "base "):
        early, late = (
            next(line for line in lines[start:] if line.lstrip().startswith(label)) for start in (first, last)
        )
        assert early.split() == late.split()


def test_a_changed_baseline_is_evaluated_alone(spare: Repository) -> None:
    spare.choose("baselines.rejection_sft.learning_rate=0.0007")
    ran = re.findall(r"Running stage '([^']+)'", spare.call("dvc", "repro", "comparison"))
    assert ran == ["compose", "row@rejection_sft", "evaluation@rejection_sft", "comparison"]


def test_without_alternatives_the_same_rows_cost_fewer_rollouts_of_evaluation(spare: Repository) -> None:
    before = pd.read_csv(spare.folder / "results/evaluation/main.csv").set_index("method")
    plays = len([*played(spare.folder)])
    spare.choose("evaluation.alternatives=false", "causality.run=false")
    spare.call("captrain", "run")
    after = pd.read_csv(spare.folder / "results/evaluation/main.csv").set_index("method")
    gone = {*before.index} - {*after.index}
    assert {"bound:oracle", "bound:random", "router:classifier"} <= gone
    assert all(name.startswith(("bound:", "router:")) or name == "single_share" for name in gone)
    assert after.equals(before.loc[after.index])
    assert len([*played(spare.folder)]) < plays
    assert "Test split" in spare.call("captrain", "results")


def test_a_run_whose_stage_fails_ends_in_what_is_wrong_and_what_to_do(project: Repository) -> None:
    project.choose("selection.delta=nothing")
    try:
        said = project.call("captrain", "run", status=2)
        assert "selection.delta" in said and "remedy:" in said and "Traceback" not in said and "Test split" not in said
    finally:
        project.choose()


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        (["machine.batch=7", "machine.workers=2"], []),
        (["trainer.clip=0.3"], TRAINING),
        *further(
            [
                (["selection.delta=0.25"], ["capabilities", "solutions"]),
                (["adapters.rollouts=120"], ["adapters", "mixture", "controls"]),
                (["evaluation.trials=3"], [*EVALUATION, "comparison"]),
                ([], []),
            ],
            0,
        ),
    ],
)
def test_a_changed_setting_makes_stale_only_what_it_decides(
    project: Repository, overrides: list[str], stages: list[str]
) -> None:
    project.choose(*overrides)
    try:
        assert project.stale() == stages
    finally:
        project.choose()


def test_changed_code_makes_stale_the_stages_that_reach_it_and_a_comment_none(project: Repository) -> None:
    path = project.folder / "src/captrain/reporting/figures.py"
    text = path.read_text()
    project.choose()
    try:
        for addition, stages in (("# a comment\n", []), ("print()\n", ["figures"])):
            path.write_text(text + addition)
            assert project.stale() == stages
    finally:
        path.write_text(text)


def test_going_back_to_an_earlier_choice_restores_its_results_without_running(project: Repository) -> None:
    before = (project.folder / "dvc.lock").read_bytes()
    project.choose("selection.delta=0.9")
    assert "Running stage 'capabilities'" in project.call("dvc", "repro", "capabilities")
    project.choose()
    said = project.call("dvc", "repro")
    assert "Stage 'capabilities' is cached" in said
    assert "Running stage 'capabilities'" not in said
    assert (project.folder / "dvc.lock").read_bytes() == before
    assert project.call("git", "status", "--porcelain") == ""


def test_both_sides_of_the_comparison_spend_the_same_rollouts_and_every_one_is_counted(project: Repository) -> None:
    folder = project.folder / "results"
    ledger = {
        stage: load(folder / stage / "ledger.jsonl", LedgerEntry)
        for stage in ("rollouts", "environments", "adapters", "grpo_target", "gepa")
    }
    spent = {stage: sum(entry.rollouts for entry in entries) for stage, entries in ledger.items()}
    assert spent["rollouts"] + spent["environments"] + spent["adapters"] == spent["grpo_target"] == spent["gepa"]
    assert spent["rollouts"] == len(rollouts(project))
    spec = yaml.safe_load((folder / "spec.yaml").read_text())
    assert {entry.rollouts for entry in ledger["adapters"]} == {spec["adapters"]["rollouts"]}
    table = pd.read_csv(folder / "evaluation/ledger.csv")
    assert sum(row["rollouts"] for row in table.to_dict("records") if row["stage"] == "evaluation") == len(
        [*played(project.folder)]
    )


def test_the_curve_of_a_training_ends_in_the_table_and_counts_what_was_spent_on_the_way(project: Repository) -> None:
    results = project.folder / "results"
    curve = pd.read_csv(results / "evaluation/curve.csv")
    main = pd.read_csv(results / "evaluation/main.csv").set_index("method")
    assert [*zip(curve["method"], curve["point"], strict=True)] == [
        (method, point) for method in ("trace", "grpo_target") for point in (1, 2)
    ]
    spent = {row["method"]: row["rollouts_spent"] for row in curve.to_dict("records") if row["point"] == 1}
    index = json.loads((results / "adapters/index.json").read_text())
    before = main.loc["trace", "rollouts_spent"] - 80 * len(index)
    assert spent["trace"] == before + 40 * len(index)
    assert (
        main.loc["grpo_target", "rollouts_spent"] / 2
        <= spent["grpo_target"]
        < main.loc["grpo_target", "rollouts_spent"]
    )
    for row in curve.to_dict("records")[1::2]:
        final = main.loc[row["method"]]
        assert [row[name] for name in ("pass_rate", "low", "high")] == [*final[["pass_rate", "low", "high"]]]
    ledger = pd.read_csv(results / "evaluation/ledger.csv").set_index("stage")
    assert ledger.loc["curve", "rollouts"] == 2 * 40 * 2  # methods, tasks, trials
    assert (results / "figures/curve.png").stat().st_size > 1000
    trained = [name for name in trained_baselines() if (results / name / "history.csv").read_text().count("\n") > 1]
    training = pd.read_csv(results / "evaluation/training.csv")
    assert {"adapters", "grpo_target", *trained} == {*training["stage"]}


def test_splits_never_mix_and_every_record_is_token_exact(project: Repository) -> None:
    calibration = load(project.folder / "artifacts/environments/calibration.jsonl", Rollout)
    test = [play.rollout for play in played(project.folder)]
    for purpose, split, records in (
        ("diagnosis", "discovery", rollouts(project)),
        ("calibration", "training", calibration),
        ("evaluation", "test", test),
    ):
        assert {(record.purpose, record.task.split) for record in records} == {(purpose, split)}
        for record in records:
            assert len(record.token_ids) == len(record.mask) == len(record.logprobs) > 0
            assert record.usage.completion_tokens == sum(record.mask)
            assert all((logprob < 0) <= (mask == 1) for logprob, mask in zip(record.logprobs, record.mask, strict=True))
    assert not {record.task.id for record in test} & {record.task.id for record in rollouts(project)}
    index = json.loads((project.folder / "results/adapters/index.json").read_text())
    assert {row["digest"] for row in index.values()} < {record.adapter for record in test}


def test_the_same_stage_run_again_from_nothing_gives_the_same_bytes(spare: Repository) -> None:
    before = (spare.folder / "artifacts/rollouts/discovery.jsonl").read_bytes()
    shutil.rmtree(spare.folder / ".cache/rollouts")
    spare.choose("machine.batch=5")
    said = spare.call("dvc", "repro", "-f", "-s", "compose", "rollouts")
    assert "Running stage 'rollouts'" in said
    assert (spare.folder / "artifacts/rollouts/discovery.jsonl").read_bytes() == before
    assert spare.call("git", "status", "--porcelain", "results/rollouts") == ""


def test_an_altered_model_is_refused_by_a_stage_and_restored_by_the_pipeline(project: Repository) -> None:
    path = project.folder / "artifacts/base/model.safetensors"
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[: len(whole) // 2])
    said = project.call("python", "stages/rollouts.py", status=2)
    assert said.strip().startswith("error: ") and "artifacts/base" in said and "Traceback" not in said
    project.call("dvc", "repro", "-q")
    assert path.read_bytes() == whole


def test_verify_holds_for_what_was_made_here_and_names_a_number_that_was_changed_by_hand(project: Repository) -> None:
    project.call("captrain", "verify")
    path = project.folder / "results/evaluation/main.csv"
    text = path.read_text()
    path.write_text(text.replace("base,", "base ,", 1))
    try:
        assert "results/evaluation" in project.call("captrain", "verify", status=1)
    finally:
        path.write_text(text)
