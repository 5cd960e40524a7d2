"""Forecast of `captrain run` before its first stage."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from captrain.planning import Node, forecast_run, machine_speed, make_plan, stale_stages
from captrain.planning.assumptions import STAGE_START
from captrain.run import compose_configuration

ROOT = Path(__file__).parents[2]
PIPELINE = """
stages:
  first: {cmd: cp given first, deps: [given], outs: [first]}
  second: {cmd: cp first second, deps: [first], outs: [second]}
  third: {cmd: cp other third, deps: [other], outs: [third]}
"""


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has the speed of the reference."""
    monkeypatch.setattr("captrain.planning.plan.machine_speed", lambda: 1.0)


def forecast(stages: list[str]) -> float:
    """Forecast seconds, to two digits."""
    found = re.search(r"stages? to run, about ([\d.]+) (s|min|h) ", said := forecast_run(ROOT, stages))
    assert found, said
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]


@pytest.mark.parametrize(
    "stages",
    [["figures"], ["base", "adapters"], ["rollouts", "grpo_target", "evaluation@base"], ["rollouts", "figures"]],
)
def test_the_forecast_adds_up_the_seconds_of_the_plan(stages: list[str]) -> None:
    spec, _ = compose_configuration([], ROOT)
    *planned, _ = make_plan(spec, Node()).low
    seconds = {cost.stage: cost.seconds or 0 for whole in planned for cost in whole.parts or [whole]}
    expected = sum(seconds.get(stage, 0) + STAGE_START.value for stage in stages)
    assert forecast(stages) == pytest.approx(expected, rel=0.05)


def test_a_machine_of_half_the_speed_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = ["base", "environments", "adapters", "routes", "evaluation@base"]
    before = forecast(stages)
    monkeypatch.setattr("captrain.planning.plan.machine_speed", lambda: 0.5)
    assert forecast(stages) == pytest.approx(2 * before, rel=0.05)


def test_the_speed_of_this_machine_is_a_number_that_is_measured_at_once() -> None:
    start = time.process_time()  # wall time depends on what else runs
    assert 0.02 < machine_speed() < 50 and time.process_time() - start < 5


def test_fewer_stages_take_less_time() -> None:
    stages = ["base", "rollouts", "adapters", "grpo_target", "rejection_sft", "solutions", "evaluation"]
    assert forecast(stages[:-1]) < forecast(stages)


def test_stale_stages_are_those_that_changed_and_those_after_them(tmp_path: Path) -> None:
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
