"""Endpoints that fail: a stage ends with the error and without outputs, and a rerun gives the same bytes."""

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.answering import Answering, refuses, says
from support.waiting import PATIENCE, until

from captrain.agents import PolicySource, RolloutBatch, collect_batch
from captrain.agents.collection import AT_ONCE, OUTAGE, collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks import load_benchmark
from captrain.comparison.arms import Arm, ArmBatch, play_batch
from captrain.environments.openai import OpenAISynthesizer
from captrain.environments.synthesis import make_brief
from captrain.models.answers import Question as Asked
from captrain.models.answers import StructuredAnswers
from captrain.records import Capability
from captrain.run import Spec, compose_spec, entry_point
from captrain.run.machine import ModelAccess

ROOT = Path(__file__).parents[2]
COUNT = 24
BRIEF = 0.75
"""Timeout of requests to a hanging endpoint, in seconds."""
WORDS = {
    "500": "The engine is dead", "429": "Slow down", "html": "<title>Gateway</title>", "hang": "timed out",
    "nonsense": "answered with no message", "dies": "onnection",
}  # fmt: skip
"""Ways to fail, and a part of the expected message."""
SPEC: Spec = compose_spec(
    "smoke", 0,
    ["policy=openai", "policy.name=m", "policy.max_turns=1", "policy.retries=0", f"policy.timeout={PATIENCE}",
     f"rollouts.tasks={COUNT}", "rollouts.retries=0", f"evaluation.tasks={COUNT // 2}", "evaluation.trials=2",
     "machine.batch=4"],
    ROOT / "conf",
)  # fmt: skip


class Verdict(BaseModel, extra="forbid"):
    verdict: str


def rollouts() -> str:
    target = load_benchmark(SPEC.benchmark)
    policy = PolicySource(SPEC.policy, Path("base"), SPEC.machine)
    tasks = target.tasks("discovery", COUNT)
    batch = RolloutBatch("discovery", policy, SPEC.benchmark, tasks, "diagnosis", 0, 1, retries=0)
    return "".join(rollout.model_dump_json() for rollout in collect_batch(batch, target, "rollouts"))


def evaluation() -> str:
    [(_, played)] = play_batch(ArmBatch((Arm("base"),), Path("base"), SPEC))
    return "".join(rollout.model_dump_json() for rollout in played)


def access() -> ModelAccess:
    return ModelAccess(retries=1, timeout=PATIENCE, concurrency=4)


def labels() -> str:
    model = StructuredAnswers(access(), name="m", temperature=0.0, max_tokens=9)
    questions = [Asked("Judge.", f"rollout {number}", Verdict) for number in range(COUNT)]
    return str(model.ask(questions, "labels"))


def synthesis() -> str:
    target = load_benchmark(SPEC.benchmark)
    brief = make_brief(Capability(id="wrong_record", name="n", description="d"), target.tools, [])
    return OpenAISynthesizer(access(), name="m", temperature=0.0, max_tokens=9999).synthesize(brief, [])


WORKS: dict[str, Callable[[], str]] = {
    "rollouts": rollouts, "evaluation": evaluation, "labels": labels, "synthesis": synthesis,
}  # fmt: skip


class Endpoint:
    """An endpoint that is up or fails in one way. A dying one first answers a few requests."""

    def __init__(self) -> None:
        self.down, self.answered = "", 0

    def __call__(self, body: dict[str, Any]) -> Any:
        match self.down:
            case "500":
                return refuses(500, "The engine is dead")
            case "429":
                return refuses(429, "Slow down")
            case "html":
                return 200, b"<html><title>Gateway</title></html>", {"Content-Type": "text/html"}
            case "hang":
                time.sleep(3 * BRIEF)
            case "nonsense":
                return 200, {"hello": "world"}
            case "dies" if self.answered >= 5:
                raise ConnectionAbortedError
            case _:
                pass
        self.answered += 1
        if "response_format" not in body:
            return says("No.")
        if "rollout" in body["messages"][-1]["content"][:8]:
            return {"verdict": "NA"}
        return {"reasoning": "r", "code": (ROOT / "tests/answers/environments/wrong_record.py").read_text()}


def impatient(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the timeout of requests."""
    patch.setattr(f"{__name__}.PATIENCE", seconds)
    waiting = SPEC.policy.model_copy(update={"timeout": seconds})
    patch.setattr(f"{__name__}.SPEC", SPEC.model_copy(update={"policy": waiting}))


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("work", WORKS)
def test_an_outage_ends_the_stage_with_the_endpoints_error_and_a_rerun_gives_the_same_bytes(
    work: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, made = Endpoint(), list[str]()
    if (work, kind) == ("synthesis", "dies"):
        endpoint.answered = 5  # the stage asks one question
    program = entry_point(lambda: made.append(WORKS[work]()), stage=False)
    with Answering(endpoint) as server:
        server.use(monkeypatch)
        (tmp_path / "disturbed").mkdir()
        (tmp_path / "undisturbed").mkdir()
        with contextlib.chdir(tmp_path / "disturbed"):
            endpoint.down = kind
            with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
                if kind == "hang":
                    impatient(patch, BRIEF)
                program()
            said = capsys.readouterr().err
            assert end.value.code == 2 and not made
            assert WORDS[kind] in said and "finished work is kept" in said and "Traceback" not in said
            endpoint.down, before = "", endpoint.answered
            program()
            asked = endpoint.answered - before
        assert asked <= (COUNT - 5 if kind == "dies" and work != "synthesis" else 2 * COUNT)
        with contextlib.chdir(tmp_path / "undisturbed"):
            program()
    assert len(made) == 2 and made[0] == made[1]


def test_a_stage_without_an_endpoint_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from support.stages import stage

    from captrain.run import publish_spec

    shutil.copytree(ROOT / "stages", tmp_path / "stages")
    publish_spec(SPEC, tmp_path / "results/spec.yaml")
    endpoint = Endpoint()
    endpoint.down = "500"
    with Answering(endpoint) as server:
        server.use(monkeypatch)
        assert stage(tmp_path, "rollouts") == 2
        assert not (tmp_path / "artifacts/rollouts").exists() and not (tmp_path / "results/rollouts").exists()
        endpoint.down = ""
        assert stage(tmp_path, "rollouts") == 0
    summary = json.loads((tmp_path / "results/rollouts/summary.json").read_text())
    assert summary["outcomes"]["error"] == 0


def test_no_more_plays_begin_when_an_endpoint_is_down(tmp_path: Path) -> None:
    from captrain.errors import InfrastructureError

    begun = list[str]()

    def script(play: Any) -> Any:
        begun.append(play.key)
        raise InfrastructureError("no answer")

    target = load_benchmark(SPEC.benchmark)
    with pytest.raises(InfrastructureError, match=f"the last {OUTAGE} plays ended in an error, each time: no answer"):
        collect(
            ScriptedPolicy(script=script), target, target.tasks("discovery", 200), purpose="diagnosis", seed=0,
            journals=tmp_path, quiet=True,
        )  # fmt: skip
    assert OUTAGE <= len(begun) <= OUTAGE + AT_ONCE  # some plays were already under way


@pytest.mark.parametrize("work", ["rollouts", "labels"])
def test_a_hang_shows_on_the_progress_bar(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captrain.agents.collection.SILENCE", 0.5)
    monkeypatch.setattr("captrain.models.answers.SILENCE", 0.5)
    monkeypatch.setattr("captrain.agents.collection.dispatched", lambda: True)

    class Slow(Endpoint):
        def __call__(self, body: dict[str, Any]) -> Any:
            if not self.answered:
                until(lambda: silent in said.getvalue())
            return super().__call__(body)

    silent = {"rollouts": "none has ended for", "labels": "no answer for"}[work]
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with Answering(Slow()) as server, contextlib.chdir(tmp_path):
        server.use(monkeypatch)
        WORKS[work]()
