"""Tasksets of verifiers are probed by agents that do no work."""

import json
import shutil
from pathlib import Path

import pytest
from support.finished import Captrain
from support.needs import further
from support.quizzes import FLAWED, HONEST, Quiz, exact, sums

from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.contract import CheckedEnvironment
from captrain.environments.answers import PREDICTED, STORED
from captrain.environments.taskset import REPEATED, probe_taskset
from captrain.records import CheckResult, JsonObject, Message
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
        {check.name: check for check in probe_taskset(CheckedEnvironment(desk, "tests", "desk"), BOUNDS, 0).checks}
        for desk in (ServiceDesk(mix="mixed"), Generous(mix="mixed"))
    )
    assert all(check.passed for check in sound.values()) and sound[REPEATED].measured == 1
    echo = flawed["reward of an echo of the request"]
    assert not echo.passed and echo.measured is not None and echo.measured > 0.5 and echo.deviation is not None
    assert "on 12 tasks" in echo.detail and any("order" in line.lower() for line in echo.script)


def probed(quiz: Quiz) -> dict[str, CheckResult]:
    probes = probe_taskset(CheckedEnvironment(quiz, "tests", quiz.name), BOUNDS, 0)
    return {check.name: check for check in probes.checks}


@pytest.mark.parametrize("name", further(FLAWED, 8))
def test_a_taskset_that_pays_for_no_work_is_refused_with_the_answer_that_did_it(name: str) -> None:
    failed = [check for check in probed(FLAWED[name]).values() if not check.passed]
    assert failed and all(
        check.script and check.deviation is not None and " earns " in check.detail for check in failed
    )


@pytest.mark.parametrize("name", further(HONEST, 4))
def test_an_honest_taskset_is_accepted(name: str) -> None:
    checks = probed(HONEST[name])
    assert [check for check in checks.values() if not check.passed] == []
    stored = checks.get(STORED)
    assert stored is None if not HONEST[name].stores else stored is not None and stored.measured == 1


def test_a_rule_that_depends_on_the_words_of_the_prompt_is_said_in_words() -> None:
    check = probed(FLAWED["places told by the words of the question"])[PREDICTED]
    assert not check.passed
    assert 'the last number of the prompt where there is the word "buy", else the first number' in check.detail


def test_a_taskset_whose_reward_asks_another_machine_is_not_searched_and_the_report_says_so() -> None:
    class Remote(Quiz):
        asked = 0

        def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
            self.asked += 1
            return super().score(task, messages)

        def contacted(self) -> list[str]:
            return ["judge.example"] if self.asked else []

    remote = Remote("remote", sums, exact)
    probes = probe_taskset(CheckedEnvironment(remote, "tests", "remote"), BOUNDS, 0)
    assert PREDICTED not in {check.name for check in probes.checks} and remote.asked < 200
    assert "answers that pay: the reward asks judge.example" in probes.unprobed[0]


def test_a_search_that_has_no_time_says_that_it_was_cut_short() -> None:
    bounds = BOUNDS.model_copy(update={"seconds": 0.05})
    probes = probe_taskset(CheckedEnvironment(HONEST["sums"], "tests", "sums"), bounds, 0)
    assert all("cut short" in check.detail for check in probes.checks if check.name in (STORED, PREDICTED))


@pytest.mark.needs("verifiers")
@pytest.mark.parametrize(("name", "exploit"), [("shop-sums", ""), ("any-number", "texts without an answer")])
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
    assert (f"reward of {exploit}" in failed if exploit else failed == []) and "no passport" in page
    assert not exploit or (
        "all options and numbers to 1000 earns 1.00" in page and "says the answer in the task" in page
    )
    assert "not probed" in said
