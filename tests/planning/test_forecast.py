"""Forecast of `captrain run` before its first stage."""

import re
import subprocess
from pathlib import Path

from captrain.planning import forecast_run, stale_stages

ROOT = Path(__file__).parents[2]
PIPELINE = """
stages:
  first: {cmd: cp given first, deps: [given], outs: [first]}
  second: {cmd: cp first second, deps: [first], outs: [second]}
  third: {cmd: cp other third, deps: [other], outs: [third]}
"""


def minutes(stages: list[str]) -> float:
    found = re.search(r"stages? to run, about ([\d.]+) min ", said := forecast_run(ROOT, stages))
    assert found, said
    return float(found[1])


def test_fewer_stages_are_forecast_to_take_less_time() -> None:
    stages = ["base", "rollouts", "adapters", "grpo_target", "rejection_sft", "solutions", "evaluation"]
    assert minutes(stages[:-1]) < minutes(stages)


def test_stages_to_run_are_those_that_changed_and_what_comes_after(tmp_path: Path) -> None:
    def call(*command: str) -> None:
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "dvc.yaml").write_text(PIPELINE)
    (tmp_path / "params.yaml").write_text("experiment: default\nseed: 0\noverrides: []\n")
    for name in ("given", "other"):
        (tmp_path / name).write_text("one")
    call("dvc", "init", "--no-scm")
    assert sorted(stale_stages(tmp_path)) == ["first", "second", "third"]
    call("dvc", "repro")
    assert stale_stages(tmp_path) == []
    (tmp_path / "given").write_text("two")
    assert stale_stages(tmp_path) == ["first", "second"]
