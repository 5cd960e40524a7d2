"""Tests of what is learnt by contrast from logs without a reference, on an invented domain with planted habits."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from support.domains import cellar

from captrain.contract import CheckedEnvironment
from captrain.diagnosis import Diagnosis, advise, diagnose
from captrain.interop import read_logs
from captrain.records import JsonObject, Message
from captrain.run import SelectionSettings

SELECTION = SelectionSettings(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200)


def diagnosed(
    folder: Path, reward: Callable[[CheckedEnvironment, JsonObject, list[Message]], float], count: int
) -> Diagnosis:
    """Diagnosis of chats of an agent with three bad habits, none of them with a reference."""
    environment = type("Cellar", (cellar.Cellar,), {"tools": cellar.TOOLS})()
    agent, rows = CheckedEnvironment(environment, "support.domains.cellar", "cellar"), list[JsonObject]()
    for task in agent.tasks("discovery", count):
        draw = random.Random(task.id)
        habits = {habit for habit, share in cellar.Demonstrations.habits.items() if draw.random() < share}
        messages = agent.play(task, cellar.Cellar().solution(task.data, habits))
        score = reward(agent, task.model_dump(), messages)
        rows.append({"task_id": task.id, "messages": messages, "reward": score, "tools": agent.tools})
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return diagnose(read_logs([log], None), SELECTION, runs=10, count=4, seed=0)


def judged(agent: CheckedEnvironment, task: JsonObject, messages: list[Message]) -> float:
    return float(agent.environment.score(task, messages)["success"])


def test_two_of_three_planted_habits_at_least_are_selected_without_a_reference_and_nothing_else(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, judged, 120)
    assert diagnosis.report is not None
    selected = {entry["id"] for entry in diagnosis.report["candidates"] if entry["selected"]}
    # A reading that is guessed is right in a third: so few rollouts need not tell that from luck.
    assert {"wrong_record", "missing_write"} <= selected <= {"missing_lookup", "wrong_record", "missing_write"}
    assert diagnosis.diagnosed.toolbox.kind("gauge") == "read", "learnt of what no change follows at the end"
    causes = {cause.cause: cause for row in diagnosis.diagnosed.rollouts for cause in row.causes}
    assert {str(cause.grade) for cause in causes.values()} == {"contrast"}
    assert all("failed rollouts" in cause.evidence and "by contrast" in cause.evidence for cause in causes.values())
    assert [fix.facts.count("not proven by replay") for fix in advise(diagnosis)[:2]] == [1, 1]


def test_outcomes_by_chance_show_no_need(tmp_path: Path) -> None:
    draw = random.Random(1)
    diagnosis = diagnosed(tmp_path, lambda *_: float(draw.random() < 0.5), 120)
    assert diagnosis.report is not None and not [e for e in diagnosis.report["candidates"] if e["selected"]]
