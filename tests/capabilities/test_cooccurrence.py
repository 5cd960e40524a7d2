"""Demands that failures share, and environments that demand them together."""

import contextlib
import json
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.needs import further

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks.loading import load_benchmark
from captrain.capabilities.verdicts import count_pairs, demands, needs
from captrain.contract import CheckedEnvironment, load_file, tool_call
from captrain.environments.evidence import make_standard
from captrain.environments.loading import load_environment, read_passports
from captrain.environments.publication import publish_pairs
from captrain.environments.synthesis import combine, examine, make_brief, synthesize_pairs
from captrain.environments.synthesizer import Attempt, Brief
from captrain.environments.templates import DEFICITS, PAIRS, TemplateSynthesizer
from captrain.records import Capability, Label, Message, Rollout, RolloutLabels, Score, Task, Verdict, publish
from captrain.run import compose_spec, publish_spec

ROOT = Path(__file__).parents[2]
SMOKE = compose_spec("smoke", 0, ["pairs.count=2", "evaluation.tasks=20"], ROOT / "conf")
BENCHMARK = load_benchmark(SMOKE.benchmark)
BOUNDS = compose_spec("default", 0, ["environments.seeds=20"], ROOT / "conf").environments
AGAINST = make_standard(BENCHMARK, SMOKE.evaluation.tasks, BOUNDS)
LETTER: dict[str, Verdict] = {"L": "LACKING", "P": "PRESENT", "-": "NA"}


def rows(**rollouts: Sequence[str]) -> list[RolloutLabels]:
    """Labels of rollouts by name (passed ones begin with "p"): one text a run, "a:L b:P"."""
    return [
        RolloutLabels(
            run=run, rollout=name, outcome="passed" if name.startswith("p") else "failed", count=1,
            labels={one[0]: Label(verdict=LETTER[one[2]]) for one in text.split()},
        )
        for name, runs in rollouts.items()
        for run, text in enumerate(runs)
    ]  # fmt: skip


def test_a_failed_rollout_needs_what_more_than_half_of_its_runs_found_lacking() -> None:
    labels = rows(
        often=["a:L b:P", "a:L b:L", "a:P b:-"], half=["a:L b:L", "a:P b:L"], once=["a:L", "b:P", "b:L"],
        nothing=["a:- b:-"], unasked=["c:L"], passed=["a:L b:L"],
    )  # fmt: skip
    assert needs(labels, ["a", "b"]) == {
        "often": frozenset("a"), "half": frozenset("b"), "once": frozenset("a"), "nothing": frozenset(),
        "unasked": frozenset(),
    }  # fmt: skip
    assert demands(labels, ["a", "b"])["often"] == demands(labels, ["a", "b"])["half"] == frozenset("ab")
    assert demands(labels, ["a", "b"])["nothing"] == frozenset()


def test_pairs_are_counted_in_larger_sets_too_and_the_most_frequent_comes_first() -> None:
    lacking = needs(rows(x=["a:L b:L c:L"], y=["c:L b:L"], z=["a:L"], w=["d:L a:L"]), "abcd")
    counts = count_pairs(lacking)
    assert [*counts.items()] == [(("b", "c"), 2), (("a", "b"), 1), (("a", "c"), 1), (("a", "d"), 1)]


# The environments of pairs.


def capability(name: str) -> Capability:
    return Capability(id=name, name=name.replace("_", " ").capitalize(), description=f"What {name} takes.")


def pair_brief(name: str) -> Brief:
    first, second = name.split("+")
    return Brief(combine(capability(first), capability(second), {}), BENCHMARK.tools)


def written(folder: Path, name: str) -> tuple[CheckedEnvironment, Path]:
    path = folder / f"{name}.py"
    path.write_text(TemplateSynthesizer().synthesize(pair_brief(name), []))
    return load_file(path), path


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def earned(target: CheckedEnvironment, task: Task, actions: Sequence[Message]) -> Score:
    return target.score(task, target.play(task, actions))


def both_broken(target: CheckedEnvironment, task: Task) -> list[list[Message]]:
    """The reference with the one step broken, and with the other."""
    breaks: Any = type(target.environment).breaks  # type: ignore[attr-defined]
    return [one(target.reference(task), task.data) for one in breaks]


def test_there_is_a_template_for_every_pair_of_the_four_families() -> None:
    assert len(PAIRS) == 6 and {name for pair in PAIRS for name in pair.split("+")} == {*DEFICITS}
    assert all(first < second for first, second in (pair.split("+") for pair in PAIRS))


@pytest.mark.parametrize("name", further(PAIRS, 2))
def test_a_pair_environment_earns_its_passport_without_a_rollout(tmp_path: Path, name: str) -> None:
    target, path = written(tmp_path, name)
    found = examine(path, AGAINST, pair_brief(name), SMOKE.machine, None, 0, trusted=True)
    assert target.name == name and found.environment == target.fingerprint
    assert [(check.name, check.detail) for check in found.checks if not check.passed] == []
    assert found.ledger == found.rollouts == []


@pytest.mark.parametrize("name", PAIRS)
def test_breaking_either_step_loses_most_of_the_reward(tmp_path: Path, name: str) -> None:
    target, _ = written(tmp_path, name)
    environment: Any = target.environment
    chosen = set()
    for task in target.tasks("training", 60):
        assert earned(target, task, target.reference(task)).reward == pytest.approx(1.0)
        ways = both_broken(target, task)
        for way in ways:
            score = earned(target, task, way)
            assert not score.success and score.reward < 0.5 and score.parts["skill"] < 1.0
        chosen.add(ways.index(environment.broken(task.model_dump())))
    assert chosen == {0, 1}


@pytest.mark.parametrize("name", PAIRS)
def test_skill_is_a_conjunction_and_more_writes_than_asked_for_never_pay(tmp_path: Path, name: str) -> None:
    target, _ = written(tmp_path, name)
    writes = {"cancel_order", "return_order", "wrap_order", "update_zip", "deny_request"}
    rng = random.Random(2)
    for task in target.tasks("training", 40):
        asked = [
            m
            for m in target.reference(task)
            if m.get("tool_calls") and m["tool_calls"][0]["function"]["name"] in writes
        ]
        ids = [order["id"] for order in task.data["orders"]]
        strays = [
            tool_call(tool, {"order_id": rng.choice(ids)}) for tool in ("wrap_order", "cancel_order", "deny_request")
        ]
        strays += [tool_call("update_zip", {"order_id": rng.choice(ids), "zip": "1234"})]
        for _ in range(4):
            done = rng.choices([*asked, *strays], k=len(asked))
            more = rng.choice([one for one in [*asked, *strays] if one not in asked or one in done])
            less_said, more_said = [*done, say("Done.")], [*done, more, say("Done.")]
            assert earned(target, task, more_said).reward <= earned(target, task, less_said).reward + 1e-9
        # One half of the conjunction alone: each order of a request by itself, or no write at all.
        for half in ([], *([one] for one in asked if len(asked) > 1)):
            assert earned(target, task, [*half, say("Done.")]).parts["skill"] <= 0.5


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_environment_tells_a_hint_of_every_order_that_it_asks_about(tmp_path: Path, name: str) -> None:
    target, _ = written(tmp_path, name)
    environment: Any = target.environment
    for task in target.tasks("training", 20):
        hint = environment.hint(task.model_dump())
        assert all(operation["order"] in hint for operation in task.data["operations"])


def test_the_other_rules_stay_binding_in_a_pair_environment(tmp_path: Path) -> None:
    """A refund decided without looking earns less, on whatever record; a gift-wrap in its place nothing."""
    target, _ = written(tmp_path, "missing_lookup+wrong_record")
    for task in target.tasks("training", 30):
        unchecked = [m for m in target.reference(task) if "get_order" not in str(m.get("tool_calls"))]
        assert earned(target, task, unchecked).reward == pytest.approx(0.55 + 0.45 * 2 / 3)
        # The decision alone, on the record furthest from the one that was meant, is no half of anything.
        assert earned(target, task, both_broken(target, task)[1]).parts["skill"] == 0.0
        wrapped = tool_call("wrap_order", {"order_id": task.data["operations"][0]["order"]})
        assert earned(target, task, [wrapped, say("Done.")]).reward <= 0.05 + 1e-9


# From labels to files.


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    found = collect(
        ScriptedPolicy(skill=0.5), BENCHMARK, BENCHMARK.tasks("discovery", 12), purpose="diagnosis", seed=0,
        journals=tmp_path_factory.mktemp("journals"), quiet=True,
    )  # fmt: skip
    assert sum(one.outcome == "failed" for one in found) >= 3
    return found


def lacking(rollouts: Sequence[Rollout], *sets: str) -> list[RolloutLabels]:
    """Labels by which failed rollouts lack these sets of capabilities, in turn."""
    failed = [one for one in rollouts if one.outcome == "failed"]
    return [
        RolloutLabels(
            run=0, rollout=one.id, outcome="failed", count=1,
            labels={name: Label(verdict="LACKING") for name in sets[at % len(sets)].split("+")},
        )
        for at, one in enumerate(failed)
    ]  # fmt: skip


class Unfaithful(TemplateSynthesizer):
    """Changes the target's tools, and remembers what it was asked for."""

    trusted = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Capability] = []

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        self.asked.append(brief.capability)
        return f"{super().synthesize(brief, attempts)}\n\nEnvironment.tools = TOOLS[1:]\n"


def test_the_pairs_that_failed_rollouts_lack_most_often_get_environments_that_load_by_their_names(
    tmp_path: Path, rollouts: list[Rollout]
) -> None:
    known = [capability(name) for name in (*DEFICITS, "small_talk")]
    labels = lacking(rollouts, PAIRS[0], PAIRS[1], "small_talk+wrong_record", PAIRS[0], "small_talk")
    with contextlib.chdir(tmp_path):
        made = synthesize_pairs(labels, known, rollouts, 3, TemplateSynthesizer(), AGAINST, SMOKE.machine, 0)
        publish_pairs(made, Path("results"), Path("artifacts"))
        assert [*read_passports(Path("results"))] == [PAIRS[0], PAIRS[1]]
        passport = read_passports(Path("results"))[PAIRS[0]]
        target = load_environment(Path("results"), passport, SMOKE.machine)
        confined = load_environment(Path("results"), passport.model_copy(update={"trusted": False}), BASIC)
    assert target.name == confined.name == PAIRS[0] and passport.calibration_tasks == 0
    assert confined.tasks("training", 3) == target.tasks("training", 3)
    account = json.loads((tmp_path / "results/pairs.json").read_text())
    assert [*account] == [PAIRS[0], PAIRS[1], "small_talk+wrong_record"]
    assert account[PAIRS[0]] == {"lacking": account[PAIRS[0]]["lacking"], "environment": True, "reason": ""}
    assert account["small_talk+wrong_record"]["reason"].startswith("no template trains")
    assert (
        (tmp_path / "results/ledger.jsonl").read_text() == "" == (tmp_path / "artifacts/calibration.jsonl").read_text()
    )
    page = (tmp_path / f"results/{PAIRS[0]}.md").read_text()
    assert page.startswith(f"# {PAIRS[0]}: passed") and "not played on the base" in page


BASIC = SMOKE.machine.model_copy(update={"sandbox": "basic"})


def test_a_pair_whose_passport_fails_is_left_out_with_its_findings_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: list[Rollout]
) -> None:
    monkeypatch.setattr("captrain.environments.synthesis.is_own_text", lambda _text: True)  # no sandbox, which is slow
    known, drafts = [capability(name) for name in DEFICITS], Unfaithful()
    against = replace(AGAINST, bounds=BOUNDS.model_copy(update={"rounds": 1, "seeds": 10}))
    labels = lacking(rollouts, PAIRS[0])
    with contextlib.chdir(tmp_path):
        made = synthesize_pairs(labels, known, rollouts, 1, drafts, against, SMOKE.machine, 0)
        publish_pairs(made, Path("results"), Path("artifacts"))
    assert "schemas equal the target's" in made.account[PAIRS[0]]["reason"]
    assert (
        read_passports(tmp_path / "results") == {}
        and (tmp_path / f"results/rejected/{PAIRS[0]}.findings.json").exists()
    )
    [asked] = drafts.asked
    first, second = PAIRS[0].split("+")
    assert f"What {first} takes." in asked.description and f"What {second} takes." in asked.description
    assert asked.examples == [row.rollout for row in labels][:5]
    assert {one.id for one in make_brief(asked, [], rollouts).examples if one.outcome == "failed"} == {*asked.examples}


def stage(folder: Path, count: int, rollouts: Sequence[Rollout]) -> None:
    """Write the inputs of the stage."""
    chosen = SMOKE.model_copy(update={"pairs": SMOKE.pairs.model_copy(update={"count": count})})
    publish_spec(chosen, folder / "results/spec.yaml")
    publish(folder / "artifacts/labels/labels.jsonl", lacking(rollouts, PAIRS[0]))
    publish(folder / "artifacts/rollouts/discovery.jsonl", rollouts)
    publish(folder / "results/capabilities/capabilities.jsonl", [capability(name) for name in DEFICITS])


def test_the_stage_writes_the_environments_and_says_how_many(
    tmp_path: Path, rollouts: list[Rollout], capsys: pytest.CaptureFixture[str]
) -> None:
    stage(tmp_path, 1, rollouts)
    with contextlib.chdir(tmp_path):
        runpy.run_path(str(ROOT / "stages/pairs.py"), run_name="__main__")
    assert re.fullmatch(r"pairs +\d+\.\d s   1 pair environment\n", capsys.readouterr().out)
    assert [*read_passports(tmp_path / "results/pairs")] == [PAIRS[0]]


def test_without_pairs_the_stage_writes_empty_results_and_needs_neither_labels_nor_torch(tmp_path: Path) -> None:
    chosen = SMOKE.model_copy(update={"pairs": SMOKE.pairs.model_copy(update={"count": 0})})
    publish_spec(chosen, tmp_path / "results/spec.yaml")
    code = f"import runpy, sys; runpy.run_path({str(ROOT / 'stages/pairs.py')!r}, run_name='__main__')"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    line = r"pairs +\d+\.\d s   no pair environments: pairs\.count is 0\n"
    assert done.returncode == 0 and re.fullmatch(line, done.stdout), done.stderr
    assert json.loads((tmp_path / "results/pairs/pairs.json").read_text()) == {}
    assert (tmp_path / "artifacts/pairs/calibration.jsonl").read_text() == ""
