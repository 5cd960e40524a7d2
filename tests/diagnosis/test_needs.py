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


def _wrap_chats(folder: Path, passes_wrapped: int, trials: int = 1) -> Path:
    """A log of 4000 chats: 1000 are asked to wrap and do, 3000 are asked to look; half of the latter pass.

    With four trials of each task, one of them wraps and the other three look.
    """
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
        task = number % (4000 // trials)
        rows.append({"task_id": f"t{task}", "trial": number // 1000, "messages": messages, "reward": float(passed)})
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log


def test_a_call_is_a_cause_only_in_tasks_that_are_passed_without_it(tmp_path: Path) -> None:
    kinds: dict[str, ToolKind] = {"wrap_order": "write", "get_order": "read"}
    found = dict[tuple[int, int], dict[str, int]]()
    for passes, trials in ((370, 1), (0, 1), (0, 4)):
        logs = read_logs([_wrap_chats(tmp_path, passes, trials)], None)
        diagnosis = diagnose(logs, SELECTION, runs=10, count=4, seed=0, kinds=kinds)
        found[passes, trials] = {k: tally.primary for k, tally in diagnosis.account.causes.items() if tally.primary}
    # With one trial of each task, the tasks that need the call may be the hard ones.
    assert found == {(370, 1): {}, (0, 1): {}, (0, 4): {"extra_write": 500}}


def test_a_kind_of_task_that_fails_is_not_blamed_for_leaving_out_the_change_of_another(tmp_path: Path) -> None:
    kinds: dict[str, ToolKind] = {"get_order": "read"}
    rows = list[JsonObject]()
    for number in range(300):
        change = ("refund_order", "exchange_order", "cancel_order")[number % 3]
        kinds[change] = "write"
        messages: list[JsonObject] = [{"role": "user", "content": f"Order {number} is wrong, help me."}]
        for tool, result in (("get_order", json.dumps({"item": f"shirt {number}"})), (change, "done")):
            call = {"name": tool, "arguments": json.dumps({"order": number})}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": call}]})
            messages.append({"role": "tool", "tool_call_id": "c", "content": result})
        messages.append({"role": "assistant", "content": "Done."})
        reward = float(change == "refund_order" and number % 10 > 0)
        rows.append({"task_id": f"t{number}", "messages": messages, "reward": reward})
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    diagnosis = diagnose(read_logs([log], None), SELECTION, runs=10, count=4, seed=0, kinds=kinds)
    assert {name for name, tally in diagnosis.account.causes.items() if tally.primary} == set()


def test_a_shell_whose_last_command_failed_is_not_said_to_leave_an_earlier_one_uncorrected(tmp_path: Path) -> None:
    rows = list[JsonObject]()
    for number in range(100):
        passed = number % 2 == 0
        messages: list[JsonObject] = [{"role": "user", "content": f"Count the lines of file {number}."}]
        for command, fails in (("tset -d a", True), ("wc -l b", not passed)):
            call = {"name": "bash", "arguments": json.dumps({"command": command})}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": call}]})
            messages.append({"role": "tool", "tool_call_id": "c", "content": "Error: no" if fails else "7"})
        messages.append({"role": "assistant", "content": "Seven."})
        rows.append({"task_id": f"t{number}", "messages": messages, "reward": float(passed)})
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    diagnosis = diagnose(read_logs([log], None), SELECTION, runs=10, count=4, seed=0)
    assert {name for name, tally in diagnosis.account.causes.items() if tally.primary} == set()


def test_a_call_that_is_left_out_is_no_cause_in_a_task_that_also_passes_without_it(tmp_path: Path) -> None:
    rows = list[JsonObject]()
    for task in range(100):
        for trial, calls in enumerate((True, False, task >= 10)):
            messages: list[JsonObject] = [{"role": "user", "content": f"Order {task} is wrong, help me."}]
            for tool in ("get_order", "refund_order") if calls else ("get_order",):
                call = {"name": tool, "arguments": json.dumps({"order": task})}
                messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": call}]})
                messages.append({"role": "tool", "tool_call_id": "c", "content": f"{tool} {task}"})
            messages.append({"role": "assistant", "content": "Done."})
            rows.append({"task_id": f"t{task}", "trial": trial, "messages": messages, "reward": float(trial != 1)})
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds: dict[str, ToolKind] = {"get_order": "read", "refund_order": "write"}
    diagnosis = diagnose(read_logs([log], None), SELECTION, runs=10, count=4, seed=0, kinds=kinds)
    causes = {name: tally.primary for name, tally in diagnosis.account.causes.items() if tally.primary}
    assert causes == {"missing_write": 90}
