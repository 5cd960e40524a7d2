"""Tests of what is learnt by contrast from logs without a reference, on an invented domain with planted habits."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from support.domains import cellar

from captrain.benchmarks import ToolKind
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


def _wrap_chats(folder: Path, passes_wrapped: int) -> Path:
    """A log of 4000 chats: 1000 are asked to wrap and do, 3000 are asked to look; half of the latter pass."""
    rows = list[JsonObject]()
    for number in range(4000):
        is_wrapped = number < 1000
        name = "wrap_order" if is_wrapped else "get_order"
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps({"order": number})}}
        messages = [
            {"role": "user", "content": f"Please {'wrap' if is_wrapped else 'show'} order {number}."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
            {"role": "assistant", "content": "It is done."},
        ]
        passed = number < passes_wrapped if is_wrapped else number % 2 == 0
        rows.append({"task_id": f"t{number}", "messages": messages, "reward": float(passed)})
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log


def test_a_call_that_a_harder_kind_of_task_needs_is_no_cause(tmp_path: Path) -> None:
    kinds: dict[str, ToolKind] = {"wrap_order": "write", "get_order": "read"}
    found = dict[int, list[str]]()
    for passes in (370, 0):
        logs = read_logs([_wrap_chats(tmp_path, passes)], None)
        diagnosis = diagnose(logs, SELECTION, runs=10, count=4, seed=0, kinds=kinds)
        found[passes] = [name for name, tally in diagnosis.account.causes.items() if tally.primary]
    assert found == {370: [], 0: ["extra_write"]}, "over a third of the first chats with this call pass"
