"""Replication over seeds: tables from hand-made results, and the script on a pipeline of two quick stages."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp
from support.results import account
from support.scripts import SCRIPTS, load_script
from support.waiting import PATIENCE
from support.warm import EXECUTABLE, warm_commands

from captrain.comparison.differences import differences_over_seeds, rates_over_seeds, versus
from captrain.comparison.points import SweepPoint, write_table
from captrain.comparison.tables import evaluate, publish_evaluation
from captrain.ledger import LedgerEntry
from captrain.records import publish_json, publish_text
from captrain.run import Choice
from captrain.run.entry import TIMES, timed

FAMILIES = ["missing_lookup", "wrong_record", "missing_write", "wrong_argument"]


@pytest.fixture(scope="module")
def replicate() -> ModuleType:
    return load_script("replicate")


def make_results(results: Path, base: int, grpo: int, trace: int, selected: Sequence[str]) -> None:
    """Write the outputs of the stages evaluation and capabilities, with a number of ten tasks passed in both trials."""
    arms = {"idle": 0, "base": base, "grpo_target": grpo, "a": trace}
    stages = {"a": "adapters", "grpo_target": "grpo_target"}
    rows = [
        (
            f"t{task}",
            "any",
            arm,
            stages.get(arm, ""),
            trial,
            "passed" if task < passed else "failed",
            float(task < passed),
        )
        for arm, passed in arms.items()
        for task in range(10)
        for trial in range(2)
    ]
    outcomes = pd.DataFrame(rows, columns=["task", "kind", "arm", "stage", "trial", "outcome", "reward"])
    routes = pd.DataFrame({"task": [f"t{task}" for task in range(10)], "retrieval": "base", "chosen": "a"})
    ledger = [
        LedgerEntry(stage=stage, purpose="training", method=method, rollouts=640)
        for stage, method in (("adapters", "trace"), ("grpo_target", "grpo_target"))
    ]
    publish_evaluation(
        evaluate(outcomes, routes, ledger, ranked=["a"], controls={}, resamples=50, confidence=0.95, seed=0),
        results / "evaluation",
    )
    candidates = [{"id": name, "selected": name in selected} for name in [*FAMILIES, "premature_stop", "invalid_call"]]
    publish_json(results / "capabilities/selection.json", account(candidates))


def test_a_point_gives_one_row_per_method(replicate: ModuleType, tmp_path: Path) -> None:
    point = SweepPoint(Choice(experiment="rare", seed=3, overrides=[]))
    results = point.workspace(tmp_path) / "results"
    make_results(results, 2, 6, 9, [*FAMILIES[:3], "premature_stop"])
    rows = {row["method"]: row for row in replicate.gather([point], tmp_path)}
    rates = {name: row["pass_rate"] for name, row in rows.items()}
    assert rates == pytest.approx(
        {
            "idle": 0.0,
            "base": 0.2,
            "grpo_target": 0.6,
            "trace": 0.9,
            "router:retrieval": 0.2,
            "bound:oracle": 0.9,
            "bound:best_single": 0.9,
            "bound:random": 0.55,
        }
    )
    trace, base = rows["trace"], rows["base"]
    assert (trace["experiment"], trace["seed"], trace["rollouts_spent"], trace["label"]) == (
        "rare",
        3,
        640,
        "TRACE",
    )
    assert trace["over_grpo"] == pytest.approx(0.3) and trace["over_low"] <= 0.3 <= trace["over_high"]
    # The evaluation compared GRPO on the target with the base; the base's row has the opposite sign.
    assert base["over_grpo"] == pytest.approx(-0.4) and base["over_low"] <= -0.4 <= base["over_high"]
    assert trace["reading"] and rows["idle"]["over_grpo"] is rows["idle"]["reading"] is None
    assert trace["selected"] == "missing_lookup missing_write premature_stop wrong_record"


def test_cpu_seconds_need_all_stages_to_have_run_here(replicate: ModuleType, tmp_path: Path) -> None:
    point = SweepPoint(Choice(experiment="rare", seed=3, overrides=[]))
    results = point.workspace(tmp_path) / "results"
    make_results(results, 2, 6, 9, FAMILIES)
    publish_text(results / "grpo_target/index.json", "{}")
    with timed("grpo_target", results, point.workspace(tmp_path) / TIMES):
        sum(range(10**6))
    rows = {row["method"]: row for row in replicate.gather([point], tmp_path)}
    assert rows["grpo_target"]["cpu_s"] is not None and rows["trace"]["cpu_s"] is rows["base"]["cpu_s"] is None


def points_of(rates: Mapping[str, Sequence[float]], experiment: str = "single") -> list[dict[str, Any]]:
    """Make the points of three seeds, with the given rollouts."""
    return [
        {"experiment": experiment, "seed": seed, "method": name, "label": name, "pass_rate": rate, "rollouts_spent": 10}
        for name, values in rates.items()
        for seed, rate in enumerate(values)
    ]


def test_differences_are_paired_by_seed_with_t_intervals() -> None:
    points = points_of({"base": [0.2, 0.4, 0.3], "grpo_target": [0.5, 0.7, 0.65], "trace": [0.6, 0.8, 0.7]})
    rates = {row["method"]: row for row in rates_over_seeds(points)}
    assert list(rates) == ["base", "grpo_target", "trace"] and {row["seeds"] for row in rates.values()} == {3}
    half = 4.302653 * 0.1 / np.sqrt(3)  # the 97.5% quantile of t with two degrees of freedom
    assert rates["trace"]["low"] == pytest.approx(0.7 - half) and rates["trace"]["rollouts_spent"] == 10
    differences = {(row["first"], row["second"]): row for row in differences_over_seeds(points)}
    assert list(differences) == [("trace", "base"), ("grpo_target", "base"), ("trace", "grpo_target")]
    paired = differences["trace", "grpo_target"]
    values = np.array([0.1, 0.1, 0.05])
    half = 4.302653 * values.std(ddof=1) / np.sqrt(3)
    assert (paired["low"], paired["high"]) == pytest.approx((values.mean() - half, values.mean() + half))
    assert paired["p"] == pytest.approx(ttest_1samp(values, 0)[1])
    assert versus(differences.values(), "trace")["grpo_target"].low == pytest.approx(-paired["high"])


def test_interval_and_correction_decide_what_is_distinguishable() -> None:
    points = points_of(
        {
            "base": [0.2, 0.4, 0.3],
            "grpo_target": [0.5, 0.7, 0.65],
            "gepa": [0.42, 0.37, 0.52],
            "trace": [0.6, 0.8, 0.7],
            "router:retrieval": [0.6, 0.8, 0.7],
        }
    )
    said = {(row["first"], row["second"]): row["reading"] for row in differences_over_seeds(points)}
    assert said["trace", "base"] == "distinguishable"  # the same in each seed
    assert said["router:retrieval", "trace"] == "not distinguishable"  # the same method by another name
    assert said["gepa", "base"] == "not distinguishable"
    assert said["trace", "grpo_target"] == "not distinguishable after correction"
    assert ("gepa", "grpo_target") in said  # each baseline is compared with GRPO on the target


def test_a_full_disk_is_one_message(
    replicate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(SCRIPTS.parent)
    monkeypatch.setattr(replicate.points, "run", full)
    monkeypatch.setattr(sys, "argv", ["replicate.py", "--seeds", "0", "--experiments", "smoke"])
    with pytest.raises(SystemExit) as end:
        replicate.main()
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: the disk is full")


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", ".hidden"])
def test_tables_are_only_written_below_results(
    name: str, replicate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replicate.py", "--seeds", "0", "--experiments", "smoke", "--name", name]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        replicate.main()
    assert "is not a name of a file" in capsys.readouterr().err


def test_one_seed_has_a_mean_and_no_interval(replicate: ModuleType, tmp_path: Path) -> None:
    points = points_of({"base": [0.5], "grpo_target": [0.6], "trace": [0.7]}, "rare")
    write_table(rates_over_seeds(points), tmp_path / "summary.csv")
    assert (tmp_path / "summary.csv").read_text().splitlines()[3] == "rare,trace,trace,rewards,1,0.700000,,,10.000000"
    differences = differences_over_seeds(points)
    write_table(differences, tmp_path / "differences.csv")
    assert (tmp_path / "differences.csv").read_text().splitlines()[1] == "rare,trace,base,1,0.200000,,,,False,,"
    assert versus(pd.read_csv(tmp_path / "differences.csv").to_dict("records"), "base")["trace"].reading == ""


PIPELINE = """
stages:
  base:
    cmd: python stages/fake.py base
    params: [seed]
    deps: [stages/fake.py]
    outs: [artifacts/base]
    metrics:
      - results/base.json: {cache: false}
  evaluation:
    cmd: python stages/fake.py evaluation
    params: [experiment]
    deps: [artifacts/base, stages/fake.py]
    plots:
      - results/evaluation: {cache: false}
      - results/capabilities: {cache: false}
"""
STAGE = """
import os, shutil, sys
from pathlib import Path
import yaml
choice = yaml.safe_load(Path("params.yaml").read_text())
with open(os.environ["RAN"], "a") as file:
    file.write(f"{sys.argv[1]} {choice['experiment']} {choice['seed']}\\n")
if sys.argv[1] == "base":
    Path("artifacts").mkdir(exist_ok=True)
    Path("artifacts/base").write_text(str(choice["seed"]))
    Path("results").mkdir(exist_ok=True)
    Path("results/base.json").write_text("{}")
elif choice["experiment"] == "bad":
    sys.exit("error: it cannot be")
else:
    for name in ("evaluation", "capabilities"):
        shutil.copytree(f"made/{name}", f"results/{name}", dirs_exist_ok=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a pipeline of two quick stages, which record that they ran."""
    publish_text(tmp_path / "dvc.yaml", PIPELINE)
    publish_text(tmp_path / "stages/fake.py", STAGE)
    publish_text(tmp_path / ".gitignore", "/.cache/\n")
    publish_text(tmp_path / ".dvc/config", "")
    shutil.copy(SCRIPTS / "replicate.py", tmp_path)
    for experiment in ("default", "rare", "bad"):
        publish_text(tmp_path / f"conf/experiment/{experiment}.yaml", "")
    make_results(tmp_path / "made", 2, 6, 9, FAMILIES)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def run(project: Path, *experiments: str) -> tuple[int, list[str], list[str]]:
    """Exit status, printed lines, and the stages that ran."""
    ran = project / "ran.txt"
    ran.unlink(missing_ok=True)
    python = str(warm_commands() / "python")
    done = subprocess.run(
        [python, "replicate.py", "--seeds", "0", "--experiments", *experiments], cwd=project,
        env={**os.environ, "RAN": str(ran), EXECUTABLE: python}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), ran.read_text().splitlines() if ran.exists() else []


def test_points_share_the_base_resume_and_survive_a_failure(project: Path) -> None:
    status, said, ran = run(project, "default", "bad", "rare")
    assert status == 1 and "1 of 3 points failed" in said[-1]
    assert any("bad-0 FAILED" in one and "error: it cannot be" in one for one in said)
    once, *others = sorted(ran)
    assert once.startswith("base ") and others == [f"evaluation {name} 0" for name in ("bad", "default", "rare")]
    assert sum("selected in 1 of 1 points" in one for one in said) == 2
    points = pd.read_csv(project / "results/replicates/points.csv")
    trace = points[points["method"] == "trace"]
    assert list(trace["experiment"]) == ["default", "rare"] and list(trace["pass_rate"]) == [0.9, 0.9]
    before = {path.name: path.read_bytes() for path in (project / "results/replicates").iterdir()}
    assert sorted(before) == ["differences.csv", "points.csv", "summary.csv"]
    status, said, ran = run(project, "default", "rare")
    assert (status, ran) == (0, [])
    assert sum("is whole" in one for one in said) == 2
    assert before == {path.name: path.read_bytes() for path in (project / "results/replicates").iterdir()}
    status, said, ran = run(project, "rare", "--join")
    assert (status, ran) == (0, []) and sum("is whole" in line for line in said) == 1
    assert before == {path.name: path.read_bytes() for path in (project / "results/replicates").iterdir()}
    (project / "results/replicates/points.csv").unlink()
    status, said, ran = run(project, "rare", "--join")
    assert (status, said, ran) == (2, [], []), "there is nothing to join, which is said before anything runs"
