"""Replication over seeds: gathering from hand-made results, and the script itself on a pipeline of two quick stages."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from captrain.evaluation import evaluate, write
from captrain.points import Point
from captrain.records import LedgerEntry, publish_json, publish_text
from captrain.spec import Choice

SCRIPT = Path(__file__).parents[1] / "scripts" / "replicate.py"
FAMILIES = ["precondition_verification", "record_selection", "multi_step_completion", "argument_precision"]


@pytest.fixture(scope="module")
def replicate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replicate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["replicate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_results(results: Path, base: int, grpo: int, trace: int, selected: Sequence[str]) -> None:
    """What the evaluation and capabilities stages write, where so many of ten tasks are passed in both trials."""
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
    write(
        evaluate(outcomes, routes, ledger, ranked=["a"], controls={}, resamples=50, confidence=0.95, seed=0),
        results / "evaluation",
    )
    candidates = [{"id": name, "selected": name in selected} for name in [*FAMILIES, "closing", "valid_calls"]]
    publish_json(results / "capabilities/selection.json", {"candidates": candidates})


def test_a_point_is_gathered_into_one_row(replicate: ModuleType, tmp_path: Path) -> None:
    point = Point(Choice(experiment="rare", seed=3, overrides=[]))
    make_results(point.workspace(tmp_path) / "results", 2, 6, 9, [*FAMILIES[:3], "closing"])
    (row,) = replicate.gather([point], tmp_path).to_dict("records")
    assert (row["experiment"], row["seed"], row["rollouts"]) == ("rare", 3, 640)
    rates = {
        name: row[name]
        for name in ("base", "grpo_target", "trace", "router:retrieval", "bound:best_single", "bound:random")
    }
    assert rates == pytest.approx(
        {
            "base": 0.2,
            "grpo_target": 0.6,
            "trace": 0.9,
            "router:retrieval": 0.2,
            "bound:best_single": 0.9,
            "bound:random": 0.55,
        }
    )
    assert row["bound:oracle"] == pytest.approx(0.9)
    assert row["trace-grpo_target"] == pytest.approx(0.3) and row["low"] <= 0.3 <= row["high"]
    assert (row["planted_selected"], row["distractors_selected"], row["distractors_rejected"]) == (3, 1, 1)


def test_differences_are_paired_by_seed_and_intervals_are_students(replicate: ModuleType) -> None:
    rates = {"base": [0.2, 0.4, 0.3], "grpo_target": [0.5, 0.7, 0.6], "trace": [0.6, 0.8, 0.7]}
    points = pd.DataFrame({"experiment": "single", "seed": range(3), **rates})
    summary = replicate.summarise(points).set_index("quantity")
    assert list(summary.index) == [
        "base",
        "grpo_target",
        "trace",
        "trace-base",
        "grpo_target-base",
        "trace-grpo_target",
    ]
    assert summary["seeds"].tolist() == [3] * 6
    paired = summary.loc["trace-grpo_target"]
    assert [paired["low"], paired["mean"], paired["high"]] == pytest.approx([0.1] * 3)
    half = 4.302653 * 0.1 / np.sqrt(3)  # the 97.5% quantile of t with two degrees of freedom
    assert summary.loc["trace", "low"] == pytest.approx(0.7 - half)


def test_one_seed_has_a_mean_and_no_interval(replicate: ModuleType, tmp_path: Path) -> None:
    points = pd.DataFrame([{"experiment": "rare", "seed": 0, "base": 0.5, "grpo_target": 0.6, "trace": 0.7}])
    summary = replicate.summarise(points)
    assert summary["low"].isna().all() and summary.loc[2, "mean"] == pytest.approx(0.7)
    replicate.write(points, summary, tmp_path)
    assert (tmp_path / "summary.csv").read_text().splitlines()[3] == "rare,trace,1,0.700000,,"


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
    """A repository with a pipeline of two quick stages; a stage notes down that it ran."""
    publish_text(tmp_path / "dvc.yaml", PIPELINE)
    publish_text(tmp_path / "stages/fake.py", STAGE)
    publish_text(tmp_path / ".gitignore", "/.cache/\n")
    publish_text(tmp_path / ".dvc/config", "")
    shutil.copy(SCRIPT, tmp_path)
    for experiment in ("default", "rare", "bad"):
        publish_text(tmp_path / f"conf/experiment/{experiment}.yaml", "")
    make_results(tmp_path / "made", 2, 6, 9, FAMILIES)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def run(project: Path, *experiments: str) -> tuple[int, list[str], list[str]]:
    """Exit status, printed lines, and the stages that ran."""
    ran = project / "ran.txt"
    ran.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "replicate.py", "--seeds", "0", "--experiments", *experiments], cwd=project,
        env={**os.environ, "RAN": str(ran)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), ran.read_text().splitlines() if ran.exists() else []


@pytest.mark.slow
def test_points_share_the_base_resume_and_survive_a_failure(project: Path) -> None:
    status, said, ran = run(project, "default", "bad", "rare")
    assert status == 1 and "1 of 3 points failed" in said[-1]
    assert any("bad-0 FAILED" in one and "error: it cannot be" in one for one in said)
    once, *others = sorted(ran)
    assert once.startswith("base ") and others == [f"evaluation {name} 0" for name in ("bad", "default", "rare")]
    points = pd.read_csv(project / "results/replicates/points.csv")
    assert points["experiment"].tolist() == ["default", "rare"] and points["trace"].tolist() == [0.9, 0.9]
    status, said, ran = run(project, "default", "rare")
    assert (status, ran) == (0, [])
    assert sum("is whole" in one for one in said) == 2
