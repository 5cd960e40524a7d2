"""GEPA finds helpful lines with an exact budget, from training tasks only, with reproducible results."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.answering import Answering, refuses, says

from captrain.benchmarks.loading import load_benchmark
from captrain.comparison.baselines import gepa
from captrain.comparison.baselines.gepa import GEPAResult, optimise, publish_gepa
from captrain.comparison.baselines.reflection import Reflection, Walk, feedback
from captrain.contract import tool_call
from captrain.errors import InfrastructureError, UserError
from captrain.ledger import LedgerEntry
from captrain.projects.pipeline import shipped_stages
from captrain.records import Message, Rollout, Task, digest, remains
from captrain.run import Spec, compose_spec, publish_spec
from captrain.run.components import Component
from captrain.training.base.demonstrations import GUIDANCE

ROOT = Path(__file__).parents[2]
BUDGET = 640
LOOK, OLDEST, EVERY, COPY, FRIENDLY, SHORT = GUIDANCE
MODEL = "Say which order you mean, always."
SMALL = ["baselines.gepa.minibatch=8", "baselines.gepa.validation=20", "rollouts.retries=1", "machine.workers=1"]


@cache
def composed(*overrides: str, seed: int) -> Spec:
    return compose_spec("default", seed, [*SMALL, *overrides], ROOT / "conf")


def run_of(*overrides: str, seed: int = 0, policy: str = "support.prompted.Prompted", **settings: Any) -> Spec:
    return composed(*overrides, seed=seed).model_copy(
        update={"policy": Component.model_validate({"_target_": policy, **settings})}
    )


def found(run: Spec | None = None, budget: int = BUDGET, base: Path = Path("nowhere")) -> GEPAResult:
    return optimise(run or run_of(), base, budget)


def spent(one: GEPAResult) -> int:
    return sum(entry.rollouts for entry in one.ledger)


def published(one: GEPAResult | None, folder: Path) -> dict[str, bytes]:
    publish_gepa(one, folder)
    return written(folder)


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "candidates.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """Use the working folder for journals, answers and results."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[GEPAResult, Path]:
    """A search, and the folder of its results."""
    folder = tmp_path_factory.mktemp("searched")
    with contextlib.chdir(folder):
        one = found()
    published(one, folder / "gepa")
    return one, folder


def test_the_helpful_line_is_found_and_the_harmful_one_is_not(searched: tuple[GEPAResult, Path]) -> None:
    one, folder = searched
    index = json.loads((folder / "gepa/index.json").read_text())
    lines = list(one.best.lines)
    assert COPY in lines and FRIENDLY not in lines
    assert index == {
        "gepa": {"digest": digest(lines), "path": "", "guidance": lines, "rollouts": BUDGET, "discarded": 0}
    }
    first = one.candidates[0]
    assert first.lines == () and first.pass_rate < 0.55 < 0.8 < one.best.pass_rate


def test_a_reader_can_follow_the_search(searched: tuple[GEPAResult, Path]) -> None:
    one, folder = searched
    kept = rows(folder / "gepa")
    assert [row["candidate"] for row in kept] == list(range(len(kept))) and len(kept) > 10
    assert [row["chosen"] for row in kept].count(True) == 1
    assert kept[0]["parent"] is None and all(kept[row["parent"]]["accepted"] for row in kept[1:])
    for row in kept[1:]:
        parent, child = row["minibatch"]
        assert row["accepted"] == (child > parent) == (row["validation"]["scored"] == 20)
        # One line was added, dropped or replaced.
        assert 1 <= len(set(row["lines"]) ^ set(kept[row["parent"]]["lines"])) <= 2
    accepted = [tuple(row["lines"]) for row in kept if row["accepted"]]
    assert len(set(accepted)) == len(accepted)
    history = (folder / "gepa/history.csv").read_text().splitlines()
    assert history[0] == "step,rollouts,validation,lines,accepted" and len(history) == len(kept) + 1
    so_far = [int(line.split(",")[1]) for line in history[1:]]
    assert so_far == sorted(so_far) and so_far[0] == 20 and so_far[-1] <= BUDGET
    scored = sum(row[key]["scored"] for row in kept for key in ("validation", "choice"))
    assert scored == {entry.purpose: entry.rollouts for entry in one.ledger}["validation"]


@pytest.mark.parametrize("budget", [20, 21, 100, 333, 641])
def test_the_budget_is_spent_to_the_last_rollout(budget: int, opened: list[Task]) -> None:
    one = found(budget=budget)
    # Each rollout opens its task once, so the count equals the rollouts played.
    assert spent(one) == len(opened) == budget
    assert {(entry.stage, entry.method, entry.item) for entry in one.ledger} == {("gepa", "gepa", "gepa")}


def test_a_search_for_one_prompt_ends_with_it_and_spends_the_rest_on_choosing() -> None:
    one = found(run_of("baselines.gepa.prompts=1"))
    accepted = [candidate for candidate in one.candidates if candidate.accepted]
    assert len(accepted) == 2 and spent(one) == BUDGET
    assert sum(len(candidate.choice) for candidate in accepted) > 0.35 * BUDGET


def test_the_search_spends_most_of_the_budget_and_finalists_the_rest(
    searched: tuple[GEPAResult, Path],
) -> None:
    one, _ = searched
    choice = [len(candidate.choice) for candidate in one.candidates if candidate.choice]
    assert 0.1 * BUDGET <= sum(choice) <= 0.35 * BUDGET
    assert 1 < len(choice) <= gepa.FINALISTS and max(choice) - min(choice) <= 1 and one.best.choice


@pytest.mark.parametrize("stays", [False, True])
def test_errors_are_counted_but_not_scored(stays: bool, opened: list[Task]) -> None:
    one = found(run_of(skill=1.0, better=1.0, faults=0.15, stays=stays))
    assert spent(one) == len(opened) == BUDGET
    errors = {entry.purpose: entry.errors for entry in one.ledger}
    assert min(errors.values()) > 0
    # An agent that never fails has a pass rate of 1, whatever the number of errors.
    assert one.candidates[0].pass_rate == 1.0
    validated = sum(len(candidate.search + candidate.choice) for candidate in one.candidates)
    assert validated == {entry.purpose: entry.rollouts - entry.errors for entry in one.ledger}["validation"]


def test_a_batch_of_errors_ends_the_search() -> None:
    with pytest.raises(InfrastructureError, match="plays ended in an error, each time: the line went dead"):
        found(run_of(faults=1.0, stays=True))


def test_only_training_tasks_are_used_and_validation_tasks_are_not_learnt_from(opened: list[Task]) -> None:
    found(run_of("baselines.gepa.validation=10"))
    assert {task.split for task in opened} == {"training"}
    # 10 for validation and 16 to learn from: a multiple of the minibatch, so no task repeats within one.
    journals = [remains(path, Rollout) for path in Path(".cache/rollouts").glob("*.jsonl")]
    set_aside, learnt = (
        {rollout.task.id for rollouts in journals for rollout in rollouts if rollout and rollout.purpose == purpose}
        for purpose in ("validation", "training")
    )
    assert len(set_aside) == 10 and len(learnt) == 16 and not set_aside & learnt


def test_no_rollout_is_counted_twice(searched: tuple[GEPAResult, Path]) -> None:
    one, folder = searched
    rollouts = [r for path in (folder / ".cache/rollouts").glob("*.jsonl") for r in remains(path, Rollout) if r]
    assert len(rollouts) == len({rollout.id for rollout in rollouts}) == spent(one) == BUDGET


def test_equal_seeds_give_equal_bytes_and_another_seed_another_search(
    tmp_path: Path, searched: tuple[GEPAResult, Path]
) -> None:
    first = written(searched[1] / "gepa")
    assert published(found(), tmp_path / "second") == first
    assert published(found(run_of(seed=1)), tmp_path / "third")["candidates.jsonl"] != first["candidates.jsonl"]


def prepared(folder: Path, run: Spec) -> None:
    publish_spec(run, folder / "results/spec.yaml")
    for stage, rollouts in (("rollouts", 200), ("environments", 140), ("adapters", 300)):
        path = folder / f"results/{stage}/ledger.jsonl"
        path.parent.mkdir(parents=True)
        entry = LedgerEntry(stage=stage, purpose="training", method="trace", rollouts=rollouts)
        other = entry.model_copy(update={"method": "another"})
        path.write_text(entry.model_dump_json() + "\n" + other.model_dump_json() + "\n")


def stage(folder: Path, *, code: int = 0, **variables: str) -> str:
    """Run the stage with the command of the pipeline."""
    _, script, name = shipped_stages()["gepa"]["cmd"].split()
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, ROOT / script, name], cwd=folder, env={**os.environ, "PYTHONPATH": places, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:]
    return done.stdout


def test_a_killed_stage_resumes_to_the_same_result(tmp_path: Path, searched: tuple[GEPAResult, Path]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    prepared(folder, run_of())
    stage(folder, code=-signal.SIGKILL, KILLED_IN_BATCH="17")
    assert not (folder / "results/gepa").exists()
    stage(folder, code=-signal.SIGKILL, KILLED_IN_BATCH="9")
    journals = len(list((folder / ".cache/rollouts").glob("*.jsonl")))
    assert journals > 20
    assert COPY in stage(folder)
    assert written(folder / "results/gepa") == written(searched[1] / "gepa")


def test_a_disabled_stage_writes_empty_results_and_says_so(tmp_path: Path) -> None:
    prepared(tmp_path, run_of("baselines.gepa.run=false"))
    said = stage(tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert " s   not run: baselines.gepa.run is false" in said
    assert not [line for line in said.splitlines() if line.endswith((" torch", " transformers", " gepa"))]
    results = written(tmp_path / "results/gepa")
    assert results["index.json"] == b"{}\n" and not results["ledger.jsonl"] and not results["candidates.jsonl"]
    assert results["history.csv"].splitlines() == [b"step,rollouts,validation,lines,accepted"]


def test_a_failing_proposer_fails_the_stage_without_spending_the_budget(
    monkeypatch: pytest.MonkeyPatch, opened: list[Task]
) -> None:
    asked: list[int] = []

    def broken(self: Walk, reflection: Reflection) -> None:
        asked.append(reflection.step)
        if reflection.step == 3:
            raise KeyError("no such line")

    monkeypatch.setattr(Walk, "propose", broken)
    with pytest.raises(KeyError, match="no such line"):
        found()
    # The first candidate's validation, and a minibatch per step.
    assert asked == [1, 2, 3] and len(opened) == 20 + 3 * 8


def test_a_policy_without_guidance_and_a_small_budget_are_rejected() -> None:
    with pytest.raises(UserError, match="ScriptedPolicy takes no guidance"):
        found(run_of(policy="captrain.agents.scripted.ScriptedPolicy"))
    with pytest.raises(UserError, match=r"baselines.gepa.validation = 20 is more than the 19 rollouts"):
        found(budget=19)


def texts(body: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in body["messages"])


def writes(*answers: Any) -> Callable[[dict[str, Any]], Any]:
    """Give the answers in turn, then repeat the last one."""
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def answer(*lines: str) -> dict[str, Any]:
    return {"reasoning": "Because.", "lines": list(lines)}


def test_a_language_model_reflects_on_rollouts_and_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("baselines.gepa.model=some/model", helps=MODEL)
    # A malformed answer, a helpful one, and a harmful one.
    with Answering(writes(answer("Two\nlines"), answer("- " + MODEL), answer(MODEL, FRIENDLY))) as server:
        server.use(monkeypatch)
        one = found(run)
    assert one.best.lines == (MODEL,) and spent(one) == BUDGET
    first, again = texts(server.requests[0]), texts(server.requests[1])
    assert "update_zip" in first and "where a right solution makes" in first and 'outcome="failed"' in first
    assert "line break" in again and server.requests[0]["model"] == "some/model"
    results = published(one, tmp_path / "first")
    asked = json.loads(results["asked.json"])
    # The malformed answer is not counted.
    assert asked["model"] == "some/model" and asked["answers"] == len(server.answered) - 1 > 3
    assert min(asked["prompt_tokens"], asked["completion_tokens"]) > 0
    # A rerun needs no server.
    assert published(found(run), tmp_path / "second") == results


def test_a_model_that_does_not_answer_fails_the_stage(monkeypatch: pytest.MonkeyPatch, opened: list[Task]) -> None:
    run = run_of("baselines.gepa.model=some/model", "machine.asking.retries=1")
    with Answering(lambda body: refuses(401, "Incorrect API key")) as server:
        server.use(monkeypatch)
        with pytest.raises(UserError, match="OPENAI_API_KEY"):
            found(run)
    assert len(opened) == 20 + 8
    with Answering(writes(answer())) as server:
        server.use(monkeypatch)
        with pytest.raises(UserError, match="the lines are those of now"):
            found(run)


def test_a_served_policy_is_prompted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that transfers every customer to a human once a line is in its prompt."""

    def acts(body: dict[str, Any]) -> Any:
        told = body["messages"][0]["content"].endswith(f"\n- {SHORT}")
        return says("", ("transfer_to_human", "{}")) if told else says("Hm.")

    served = {"name": "m", "temperature": 0.0, "max_turns": 2, "max_tokens": 9, "retries": 0}
    run = run_of("benchmark.mix=rare", policy="captrain.agents.openai.OpenAIPolicy", **served)
    with Answering(acts) as server:
        server.use(monkeypatch)
        one = found(run, budget=200)
    assert one.best.lines[-1] == SHORT and one.candidates[0].pass_rate == 0.0 < one.best.pass_rate


def test_the_embedded_model_is_prompted_too(tiny: Path) -> None:
    settings = {"temperature": 1.0, "max_turns": 2, "max_tokens": 4}
    run = run_of("baselines.gepa.validation=8", policy="captrain.agents.local.LocalPolicy", **settings)
    one = found(run, budget=90, base=tiny)
    assert spent(one) == 90 and one.best.lines == () and one.best.pass_rate < 1.0


def rollout(kind: str, actions: Callable[[list[Message]], list[Message]]) -> Rollout:
    target = load_benchmark(run_of().benchmark)
    task = next(task for task in target.tasks("training", 60) if task.data["kind"] == kind)
    messages = target.play(task, actions(target.reference(task)))
    score = target.score(task, messages)
    return Rollout(
        id="r", environment=target.name, task=task, trial=0, purpose="training", policy="p", messages=messages,
        reference=target.reference(task), score=score, outcome="passed" if score.success else "failed",
    )  # fmt: skip


def test_feedback_has_tool_errors_scores_and_the_first_difference() -> None:
    assert feedback(rollout("copy", lambda right: right)) == (
        "passed with reward 1; score: database 1, information 1, closing 1"
    )
    wrong = tool_call("update_zip", {"order_id": "#99", "zip": "1"})
    failed = feedback(rollout("copy", lambda right: [right[0], wrong, right[-1]]))
    assert failed.startswith("failed with reward 0; score: database 0, information 1, closing 1; ")
    assert 'tool update_zip said: {"error": "invalid call"}' in failed
    assert 'call 2 was update_zip {"order_id": "#99", "zip": "1"}, where a right solution makes update_zip' in failed
    short = feedback(rollout("copy", lambda right: [right[0], right[-1]]))
    assert "it ended where a right solution makes update_zip" in short
    long = feedback(rollout("copy", lambda right: [*right[:-1], right[1], right[-1]]))
    assert "it made all calls of a right solution, and then update_zip" in long
    unsaid = feedback(rollout("status", lambda right: [*right[:-1], {"role": "assistant", "content": "Bye."}]))
    assert "what it said, or left unsaid, is not" in unsaid


def test_lines_with_words_of_failures_are_proposed_more_often() -> None:
    failed = rollout("copy", lambda right: [right[0], right[-1]])
    passed = rollout("human", lambda right: right)
    walk = Walk(list(GUIDANCE), 0)
    drawn = Counter(walk.propose(Reflection((), [failed, passed], frozenset(), step)) for step in range(600))
    assert set(drawn) == {(line,) for line in GUIDANCE}
    assert drawn[(COPY,)] > 1.5 * drawn[(FRIENDLY,)]
    everything = frozenset((line,) for line in GUIDANCE)
    assert walk.propose(Reflection((), [failed], everything, 1)) is None
    # Dropping is the last option, and unknown lines stay.
    kept = walk.propose(Reflection(("Mine.", *GUIDANCE), [failed], frozenset(), 1))
    assert kept is not None and kept[0] == "Mine." and len(kept) == len(GUIDANCE)
