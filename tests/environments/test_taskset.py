"""Tasksets of verifiers are probed by agents that do no work."""

import json
import shutil
from pathlib import Path

import pytest
from support.finished import Captrain

from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.contract import CheckedEnvironment
from captrain.environments.taskset import REPEATED, probe_taskset
from captrain.records import Message
from captrain.run import compose_spec

ROOT = Path(__file__).parents[2]
TASKSETS = ROOT / "tests/benchmarks/tasksets"
BOUNDS = compose_spec("smoke", 0, [], ROOT / "conf").environments


class Generous(ServiceDesk):
    """The desk, which also pays for a number that the request names."""

    def score(self, task: dict, messages: list[Message]) -> dict:
        last = messages[-1].get("content") or ""
        if messages[-1]["role"] == "assistant" and "order" in last.lower():
            return {"reward": 1.0, "success": True, "parts": {}}
        return super().score(task, messages)


def test_a_reward_for_words_of_the_request_is_named_with_the_play_that_earned_it() -> None:
    sound, flawed = (
        {check.name: check for check in probe_taskset(CheckedEnvironment(desk, "tests", "desk"), BOUNDS, 0)}
        for desk in (ServiceDesk(mix="mixed"), Generous(mix="mixed"))
    )
    assert all(check.passed for check in sound.values()) and sound[REPEATED].measured == 1
    echo = flawed["reward of an echo of the request"]
    assert not echo.passed and echo.measured is not None and echo.measured > 0.5 and echo.deviation is not None
    assert "of 6 tasks passed" in echo.detail and any("order" in line.lower() for line in echo.script)


@pytest.mark.needs("verifiers")
@pytest.mark.parametrize(("name", "exploit"), [("shop-sums", ""), ("any-number", "the answer '0 1 2 ... 1000'")])
def test_a_taskset_is_validated_by_name_and_its_exploit_is_named(
    name: str, exploit: str, captrain: Captrain, tmp_path: Path
) -> None:
    top = "2" if name == "shop-sums" else "1"
    shutil.copytree(TASKSETS, tasksets := tmp_path / "tasksets")
    (tasksets / name).mkdir()  # a folder of the taskset's name is no environment file
    command = ["validate", f"{tasksets}/{name}", "--scale", "0", top, "--out", str(tmp_path / "out")]
    status, said, _ = captrain(ROOT, *command)
    assert status == bool(exploit)
    report = json.loads((tmp_path / f"out/{name}.validation.json").read_text(encoding="utf-8"))
    page = (tmp_path / f"out/{name}.validation.md").read_text(encoding="utf-8")
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    assert failed == ([f"reward of {exploit}"] if exploit else []) and "no passport" in page
    assert "not probed" in said
