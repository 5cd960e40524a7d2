"""Forecast of `captrain run` before its first stage."""

import re
import subprocess
from pathlib import Path

import pytest
from support.waiting import until

from captrain.planning import forecast
from captrain.planning.assumptions import PRODUCTS
from captrain.planning.forecast import forecast_run, measure_products, stale_stages

ROOT = Path(__file__).parents[2]
PIPELINE = """
stages:
  first: {cmd: cp given first, deps: [given], outs: [first]}
  second: {cmd: cp first second, deps: [first], outs: [second]}
  third: {cmd: cp other third, deps: [other], outs: [third]}
"""


def minutes(monkeypatch: pytest.MonkeyPatch, pace: float, stages: list[str]) -> float:
    """Forecast on a machine that computes so many times as fast as the one the rates are of."""
    monkeypatch.setattr(forecast, "measure_products", lambda processes: pace * PRODUCTS.value)
    found = re.search(r"stages? to run, about ([\d.]+) min on this machine", said := forecast_run(ROOT, stages))
    assert found, said
    return float(found[1])


def test_a_forecast_is_the_plans_seconds_in_proportion_to_what_the_machine_computes_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = ["base", "rollouts", "adapters", "grpo_target", "rejection_sft", "solutions", "evaluation"]
    fast, slow = (minutes(monkeypatch, pace, stages) for pace in (0.2, 0.1))
    assert slow == pytest.approx(2 * fast, rel=0.1)
    assert minutes(monkeypatch, 0.1, stages[:-1]) < slow  # fewer stages, less time


def test_a_machine_with_other_work_makes_fewer_products() -> None:
    many = 8 * (len(list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*"))) or 1)
    # What else the machine has to do comes and goes, and is in both.
    until(lambda: 0 < measure_products(many) < measure_products(1) / 2)


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
