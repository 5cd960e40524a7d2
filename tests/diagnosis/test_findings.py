"""Tests of what goes with failing and what to fix first, from chats whose faults are planted."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from captrain.benchmarks import Replay, ReplayCall, Replayed, installing
from captrain.capabilities import bare_view, sourced
from captrain.cli.app import app
from captrain.cli.logs import benchmark_of_project
from captrain.contract import tool_call
from captrain.diagnosis import Diagnosis, advise
from captrain.diagnosis import diagnose as explain
from captrain.diagnosis.findings import Collection
from captrain.diagnosis.rollouts import RepairStep
from captrain.interop import read_logs
from captrain.projects import init_project
from captrain.records import Rollout, Score, Task
from captrain.run import SelectionSettings

Chat = dict[str, Any]
CALLS = {
    "metric": ("get_metric", {"service": "api", "metric": "load"}),
    "restart": ("restart", {"service": "api"}),
    "page": ("page_person", {"person": "Ann"}),
}


def message(name: str, arguments: dict[str, str], number: int) -> Chat:
    call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def chat(task: str, names: Sequence[str], reward: int, reference: Sequence[str] = ()) -> Chat:
    messages: list[Chat] = [{"role": "user", "content": "The api is slow: page Ann if its load is high, or restart."}]
    for number, (name, arguments) in enumerate(CALLS[name] for name in names):
        messages += [message(name, arguments, number), {"role": "tool", "tool_call_id": f"c{number}", "content": "ok"}]
    messages.append({"role": "assistant", "content": "It is done."})
    steps = [message(*CALLS[name], number) for number, name in enumerate(reference)]
    return {"task_id": task, "messages": messages, "reward": reward} | ({"reference": steps} if steps else {})


def diagnosed(folder: Path, chats: Sequence[Chat]) -> Diagnosis:
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in chats))
    selection = SelectionSettings(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200)
    return explain(read_logs([log], None), selection, runs=10, count=4, seed=0)


@pytest.fixture
def unreferenced() -> list[Chat]:
    """Ten failures that restart blindly, and eight passes that look first."""
    failed = [chat(f"f{number}", ["restart"] + ["page"] * (number % 2), 0) for number in range(10)]
    return failed + [chat(f"p{number}", ["metric", "restart"], 1) for number in range(8)]


def test_without_references_the_look_up_that_every_failure_lacks_is_named_and_the_report_says_what_to_do(
    tmp_path: Path, unreferenced: list[Chat]
) -> None:
    diagnosed(tmp_path, unreferenced)
    done = CliRunner().invoke(
        app, ["diagnose", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")], env={"COLUMNS": "160"}
    )
    assert done.exit_code == 0, done.output
    name, line = "restart without an earlier get_metric", 'add to the prompt: "Call get_metric before restart."'
    deed = f"calls {name}"
    assert f"1. {deed}: 10 of 10 failures, 0 passed rollouts; the only fault in 10; not proven by replay" in done.output
    report, page = ((tmp_path / "out" / file).read_text() for file in ("report.md", "report.html"))
    assert f"| {name} | 10 of 10 | 0 of 8 |" in report and line in report
    assert "message 1: restart(api)" in report and "add the solution of each task to the logs as `reference`" in report
    assert report.index("Your agent mostly fails because it") < report.index("Calls that correlate with")
    assert f"<strong>{deed}</strong>" in page.replace("&#34;", '"') and "get_metric never called" in page
    [first, *_] = json.loads((tmp_path / "out/advice.json").read_text())
    assert first["subject"] == deed and "f0, message 1" in first["example"]


def garden(acts: str, has_reference: bool = True) -> list[Chat]:
    """Chats of a gardener, a letter each: it waters by the valve that the plan of a bed names (w) or by a guess (g),
    and sells a bed that it may (s) or may not (n) sell."""
    chats: list[Chat] = []
    for number, act in enumerate(acts):
        bed, valve, guess = {"bed": f"bed{number}"}, {"valve": f"valve{number}"}, {"valve": f"valve{number + 100}"}
        plan, water = ("bed_plan", bed, valve), ("open_valve", bed | valve, {"done": "yes"})
        lines = ("list_valves", {"row": f"row{number}"}, {"valves": [*valve.values(), *guess.values()]})
        read, sell = ("get_bed", bed, {"owner": f"owner{number}"}), ("sell_bed", bed, {"done": "yes"})
        due = {"w": [lines, plan, water], "g": [lines, plan, water], "s": [read, sell], "n": [read]}[act]
        taken = {"g": [lines, ("open_valve", bed | guess, {"done": "yes"})], "n": [read, sell]}.get(act, due)
        messages: list[Chat] = [
            {"role": "user", "content": f"{'Water' if act in 'wg' else 'Sell'} bed{number} in row{number}."}
        ]
        for place, (name, arguments, result) in enumerate(taken):
            answer = {"role": "tool", "tool_call_id": f"c{place}", "content": json.dumps(result)}
            messages += [message(name, arguments, place), answer]
        reference = {"reference": [message(name, arguments, place) for place, (name, arguments, _) in enumerate(due)]}
        messages.append({"role": "assistant", "content": "It is done."})
        entry: Chat = {"task_id": f"t{number}", "messages": messages, "reward": int(act in "ws")}
        chats.append(entry | (reference if has_reference else {}))
    return chats


def test_a_skipped_look_up_without_a_verb_in_its_name_is_the_cause_and_the_first_line_of_advice_names_it(
    tmp_path: Path,
) -> None:
    diagnosis = diagnosed(tmp_path, garden("g" * 11 + "w" * 10 + "sn"))
    causes = {name: (tally.primary, tally.secondary) for name, tally in diagnosis.account.causes.items()}
    assert causes == {"missing_lookup": (11, 0), "extra_write": (1, 0)}
    first = advise(diagnosis)[0]
    assert (first.subject, "11 of 12 failures" in first.facts) == (
        "calls open_valve with the wrong valve",
        True,
    )
    assert 'add to the prompt: "Call bed_plan before open_valve."' in first.actions
    assert "1 of 12 failures, 0 passed rollouts; the only fault in 1;" in advise(diagnosis)[1].facts


def test_a_look_up_that_other_changes_need_is_not_blamed_for_a_change_that_passes_without_it(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, garden("g" * 14 + "w" * 12 + "n" * 4 + "s" * 3, has_reference=False))
    assert {name: tally.primary for name, tally in diagnosis.account.causes.items()} == {"missing_lookup": 14}
    assert diagnosis.account.unexplained == 4
    [fix] = diagnosis.findings.fixes
    assert (fix.key[1], fix.counts["failures"]) == ("calls open_valve without an earlier bed_plan", 14)
    assert advise(diagnosis)[0].actions[0] == 'add to the prompt: "Call bed_plan before open_valve."'


def test_a_look_up_before_any_change_is_a_need_of_those_changes_that_each_show_it(tmp_path: Path) -> None:
    chats = garden("g" * 14 + "w" * 12 + "n" * 4 + "s" * 3, has_reference=False)
    for entry in chats[:7] + chats[14:20]:
        call = entry["messages"][-3]["tool_calls"][0]["function"]
        call["name"] = "flood"
    found_in = diagnosed(tmp_path, chats).diagnosed
    needs, found = found_in.needs, set[str]()
    assert needs is not None
    for rollout in read_logs([tmp_path / "log.jsonl"]).rollouts:
        calls = bare_view(rollout, found_in.toolbox).calls
        lacks, _ = needs.of(rollout, calls, sourced(calls, rollout.messages))
        found |= {lack.need.association.name for lack in lacks}
    assert found == {"flood without an earlier bed_plan", "open_valve without an earlier bed_plan"}


def test_outcomes_by_chance_bring_a_feature_to_light_no_more_often_than_the_level_says(tmp_path: Path) -> None:
    generator, runs = random.Random(0), 40
    rows = [
        chat(f"t{number}", generator.choices([*CALLS], k=generator.randint(1, 5)), generator.randint(0, 1))
        for number in range(runs * 40)
    ]
    hits = 0
    for number in range(runs):
        findings = diagnosed(tmp_path, rows[number * 40 : number * 40 + 40]).findings
        assert sum(row.p == row.p for row in findings.order) > 5
        hits += any(row.p_holm <= 0.05 for row in findings.order)
    assert hits <= 5, "of 40 families about 2 may err at .05"


def test_a_step_counts_over_the_rollouts_whose_reference_has_it(tmp_path: Path) -> None:
    due, free = ["metric", "restart"], ["metric", "page"]
    chats = [chat(f"a{number}", ["metric"], 0, due) for number in range(11)]
    chats += [chat(f"b{number}", due, 1, due) for number in range(4)] + [chat("c", ["metric"], 1, due)]
    chats += [chat(f"d{number}", free, 1, free) for number in range(6)] + [chat("e", [], 0)]
    diagnosis = diagnosed(tmp_path, chats)
    row = diagnosis.findings.steps[0]
    assert (row.name, row.failed, row.passed) == ("restart not called", (11, 11), (1, 5))
    fix = advise(diagnosis)[0]
    assert fix.subject == "does not call restart" and "11 of 12 failures" in fix.facts
    assert "reference step" not in fix.facts, "that a task asks for the step says nothing of the step"
    kinds = {row.name: (row.passed, row.failed) for row in diagnosis.findings.tasks}
    assert kinds["reference step: page_person"] == ((6, 11), (0, 11))


def test_where_trials_of_one_task_part_is_counted_over_tasks(tmp_path: Path) -> None:
    chats = [
        chat(f"t{task}", names, reward)
        for task in range(3)
        for names, reward in ((["metric", "restart"], 1), (["metric", "page"], 0), (["metric", "page", "page"], 0))
    ]
    chats += [chat("passed", ["metric"], 1), chat("cut", ["metric", "restart"], 1), chat("cut", ["metric"], 0)]
    findings = diagnosed(tmp_path, chats).findings
    assert findings.mixed == 4
    assert findings.partings == [(("restart", "page_person"), 3), (("restart", "(end)"), 1)]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_failures_without_a_reference_do_not_dilute_the_coverage_of_what_only_a_reference_shows(
    tmp_path: Path, share: float
) -> None:
    due = ["metric", "restart", "page"]
    failed = [chat(f"f{n}", ["metric", "restart"], 0, () if n < share * 20 else due) for n in range(20)]
    report = diagnosed(tmp_path, failed + [chat(f"p{n}", due, 1, due) for n in range(12)]).report
    assert report is not None
    coverage = {entry["id"]: entry["coverage"] for entry in report["candidates"]}
    assert coverage["missing_write"] == 1.0


def test_a_fix_of_failures_with_and_without_reference_names_the_kind_of_task_that_is_over_represented(
    tmp_path: Path,
) -> None:
    looped, due = ["restart"] * 6, ["metric", "restart"]
    chats = [chat(f"night_{n}", looped, 0, due if n % 3 == 0 else ()) for n in range(18)]
    chats += [chat(f"day_{n}", due, 1, due if n % 3 else ()) for n in range(18)]
    [fix, *_] = diagnosed(tmp_path, chats).findings.fixes
    assert fix.counts["failures"] == 12 and fix.kinds == [("with night in the id", 12)]


def test_two_steps_left_out_in_the_same_failures_are_one_item_with_a_line_for_the_prompt_each(tmp_path: Path) -> None:
    chats = list[Chat]()
    for number in range(24):
        order = {"order_id": f"#W{number}"}
        looked, refunded, closed = (message(name, order, 0) for name in ("get_order", "refund_order", "close_order"))
        done = [looked] if number % 2 else [looked, refunded, closed]
        said = [turn for call in done for turn in (call, {"role": "tool", "tool_call_id": "c0", "content": "ok"})]
        asked = {"role": "user", "content": f"Refund and close order #W{number}."}
        ending = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "bye"}]
        chats.append({"task_id": f"t{number}", "messages": [asked, *said, *ending], "reward": (number + 1) % 2,
                      "reference": [looked, refunded, closed]})  # fmt: skip
    [first, *others] = advise(diagnosed(tmp_path, chats))
    assert first.subject == "does not call close_order, and does not call refund_order"
    lines = [
        f'Do not close before {tool} is done, where the task needs it."' for tool in ("close_order", "refund_order")
    ]
    assert first.actions[:2] == [f'add to the prompt: "{lines[0]}', f'and: "{lines[1]}']
    assert not any("refund_order" in action for entry in others for action in entry.actions)


def test_a_gap_that_no_passed_rollout_defines_is_not_called_as_frequent(tmp_path: Path) -> None:
    due = ["metric", "page", "restart"]
    failed = [chat(f"f{number}", ["metric", "page"], 0, due) for number in range(12)]
    diagnosis = diagnosed(tmp_path, failed + [chat(f"p{number}", ["metric"], 1, ["metric"]) for number in range(12)])
    actions = [action for entry in advise(diagnosis) for action in entry.actions]
    assert diagnosis.report is not None
    assert [e["gap"] for e in diagnosis.report["candidates"] if e["id"] == "missing_write"] == [None]
    assert not any("as often" in action for action in actions)


@pytest.mark.parametrize("name", ["does not call restart", "calls restart with the wrong service"])
def test_a_changed_value_and_a_step_left_out_are_told_apart(tmp_path: Path, name: str) -> None:
    due = ["metric", "restart"]
    failed = [chat(f"f{number}", due if "wrong" in name else ["metric"], 0, due) for number in range(10)]
    for entry in failed if "wrong" in name else ():
        entry["messages"][3]["tool_calls"][0]["function"]["arguments"] = '{"service": "web"}'
    diagnosis = diagnosed(tmp_path, failed + [chat(f"p{number}", due, 1, due) for number in range(10)])
    assert advise(diagnosis)[0].subject == name


def test_repairs_that_replay_has_proven_take_the_place_of_differences(tmp_path: Path) -> None:
    due = ["metric", "restart", "page"]
    diagnosis = diagnosed(tmp_path, [chat(f"f{number}", ["metric"], 0, due) for number in range(3)])
    edit = {"step": "restart(api)", "kind": "insert", "message": 3, "evidence": "with it the check passes"}
    edit["cause"] = "missing_write"
    repairs = [
        RepairStep(**edit, needed=True, proven=True),
        RepairStep(**{**edit, "step": "page"}, needed=False, proven=True),
    ]
    collection = Collection(diagnosis.diagnosed.toolbox)
    for row, rollout in zip(diagnosis.diagnosed.rollouts, diagnosis.logs.rollouts, strict=True):
        collection.add(row.model_copy(update={"repairs": repairs}), rollout)
    [fix] = collection.findings().fixes
    assert fix.key[:2] == ("made", "restart") and fix.counts == {"failures": 3, "alone": 3, "proven": 3}
    assert fix.example.quote == "assistant: It is done." and fix.example.evidence == "with it the check passes"


EXAMPLE = Path(__file__).parents[2] / "docs/examples/servicedesk.jsonl"


def printed_rows(out: Path, *arguments: object) -> list[dict[str, Any]]:
    """Rows that `captrain diagnose` writes of each rollout."""
    done = CliRunner().invoke(app, ["diagnose", *map(str, arguments), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (out / "causes.jsonl").read_text().splitlines()]


def test_repairs_of_the_desk_are_proven_by_replay_and_a_passed_rollout_needs_none(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(line + "\n" for line in EXAMPLE.read_text().splitlines()[:12]))
    rows = printed_rows(tmp_path / "out", log)
    failed = [row["repairs"] for row in rows if row["outcome"] == "failed"]
    assert failed and all(any(step["needed"] for step in steps) for steps in failed)
    assert all(step["proven"] for steps in failed for step in steps)
    passed = [row.get("repairs", []) for row in rows if row["outcome"] == "passed"]
    assert passed and not any(step["needed"] for steps in passed for step in steps)


class World:
    """One that asks for a restart alone; it stands for the worlds of all rollouts, too."""

    reference, owed, kinds, trouble = (ReplayCall("restart", {"service": "api"}),), (), {}, ""

    def of(self, rollout: Rollout) -> "World":
        return self

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        tools = [[call.tool for call in replay.calls] for replay in replays]
        return [
            Replayed(("ok",) * len(made), (False,) * len(made), (True,) * len(made), {}, "restart" in made)
            for made in tools
        ]

    def passes(self, replay: Replay) -> bool:
        return self.play([replay])[0].passed


class Strict(World):
    """One in which the very call of the reference passes."""

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        calls = [replay.calls for replay in replays]
        return [
            Replayed(("ok",) * len(made), (False,) * len(made), (True,) * len(made), {}, self.reference[0] in made)
            for made in calls
        ]


def test_a_difference_that_costs_nothing_is_told_as_harmless(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(chat("f", ["page"], 0, ["restart"])) + "\n")
    selection = SelectionSettings(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200)
    worlds: Any = World()
    [row] = explain(read_logs([log]), selection, runs=2, count=1, seed=0, worlds=worlds).diagnosed.rollouts
    steps = {step.step: (step.kind, step.needed, step.proven) for step in row.repairs}
    assert steps == {"restart(api)": ("insert", True, True), "page_person(Ann)": ("drop", False, True)}
    assert row.primary is not None and row.cause("extra_write") is None


def test_a_milestone_that_a_proven_repair_meets_has_no_cause_of_its_own(tmp_path: Path) -> None:
    milestone = {"namespace": "SERVICE", "change": "snapshot", "values": {"name": "api", "state": "up"}}
    messages = [
        {"role": "user", "content": "Restart the api."},
        tool_call("restart", {"service": "web"}),
        {"role": "tool", "name": "restart", "content": "ok"},
        {"role": "assistant", "content": "It is done."},
    ]
    rollout = Rollout(
        id="r", environment="desk", task=Task(id="desk/1", split="discovery", data={"milestones": [milestone]}),
        trial=0, purpose="diagnosis", policy="script", messages=messages,
        outcome="failed", score=Score(reward=0.0, success=False, parts={"milestone 1": 0.0}),
    )  # fmt: skip
    log = tmp_path / "rollouts.jsonl"
    log.write_text(rollout.model_dump_json() + "\n")
    selection = SelectionSettings(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200)
    [unproven] = explain(read_logs([log]), selection, runs=2, count=1, seed=0).diagnosed.rollouts
    assert [cause.cause for cause in unproven.causes] == ["missing_write"]
    solution = [tool_call("restart", {"service": "api"})]
    worlds: Any = SimpleNamespace(of=Strict().of, reference=lambda _: solution, trouble="")
    [row] = explain(read_logs([log]), selection, runs=2, count=1, seed=0, worlds=worlds).diagnosed.rollouts
    assert [cause.cause for cause in row.causes] == ["wrong_argument"] and row.repairs[0].proven


def test_tools_as_says_what_a_tool_does_where_its_name_misleads(tmp_path: Path) -> None:
    log, kinds = tmp_path / "log.jsonl", tmp_path / "tools.yaml"
    chats = [chat("f", ["restart", "metric"], 0, ["restart"]), chat("p", ["restart"], 1, ["restart"])]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in chats))
    kinds.write_text("get_metric: write\n")
    as_named, as_told = (printed_rows(tmp_path / "out", log, *more)[0] for more in ([], ["--tools-as", kinds]))
    assert not as_named.get("repairs")
    assert [step["step"] for step in as_told["repairs"]] == ["get_metric(api, load)"]


def test_a_project_s_own_benchmark_proves_causes_and_brings_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_project(tmp_path, "calendar")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    target, machine = benchmark_of_project("calendar")
    assert target is not None and machine is not None and benchmark_of_project("servicedesk")[0] is None
    rows = list[Chat]()
    for number, task in enumerate(target.tasks("discovery", 8)):
        *steps, closing = target.reference(task)
        messages = target.play(task, [*(steps[:-1] if number % 2 else steps), closing])
        reward = target.score(task, messages).reward
        rows.append({"task_id": task.id, "messages": messages, "reward": reward, "tools": target.tools})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    causes = printed_rows(tmp_path / "found", tmp_path / "log.jsonl", "--benchmark", "calendar")
    failed = [row for row in causes if row["outcome"] == "failed"]
    assert failed and all(row["primary"] and any(step["needed"] for step in row["repairs"]) for row in failed)
    assert all(step["proven"] for row in failed for step in row["repairs"])
    assert "No reference in" not in (tmp_path / "found/report.md").read_text()


WORKER = """
import json, os, sys

task = None
for line in sys.stdin:
    request = json.loads(line)
    number, operation = request["id"], request["op"]
    task = request.get("task_id") or task
    reply = {"ok": True, "result": {"messages": []}}
    if operation == "reference" and task.endswith("_2"):
        reply = {"ok": False, "error": {"type": "KeyError", "message": "no such scenario"}}
    if operation == "replay" and task.endswith("_1"):
        os._exit(3)
    if operation == "replay":
        reply = {"ok": False, "error": {"type": "BadRequest", "message": "no argument_1", "refused": True}}
    print(json.dumps({"id": number, **reply}), flush=True)
"""
"""A benchmark that opens tasks 0 and 1, of which it takes no calls of the one, and dies of the other."""


def test_a_world_that_fails_leaves_causes_unproven_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / ".cache/installations/bfcl/bin/python"
    python.parent.mkdir(parents=True)
    (tmp_path / "worker.py").write_text(WORKER)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'worker.py'}\n")
    python.chmod(0o755)
    (python.parents[1] / installing.MARK).touch()
    monkeypatch.chdir(tmp_path)
    chats = [chat(f"multi_turn_base_{number}", ["metric"], 0, ["metric", "restart"]) for number in range(3)]
    chats += [chat("another", ["metric"], 0, ["metric", "restart"])]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in chats))
    rows = printed_rows(tmp_path / "out", tmp_path / "log.jsonl")
    assert [row["primary"]["cause"] for row in rows] == ["missing_write"] * 4
    assert not any(step["proven"] for row in rows for step in row["repairs"])
    refused, dead, unopened = (row["unproven"] for row in rows[:3])
    assert "no argument_1" in refused and "died" in dead and "no such scenario" in unopened
    assert "unproven" not in rows[3]
    report = (tmp_path / "out/report.md").read_text()
    note = "3 rollouts could not be replayed, so their causes are not proven. The first is chat/multi\\_turn\\_base\\_0"
    assert report.count("could not be replayed") == 1 and note.replace("\\", "") in report.replace("\\", "")


class Guarded(World):
    """One that takes a restart with its token alone."""

    reference = (ReplayCall("restart", {"service": "api", "access_token": "abc"}),)

    def of(self, rollout: Rollout) -> "Guarded":
        return self

    def reference_of(self) -> list[Chat]:
        return [message(self.reference[0].tool, self.reference[0].arguments, 0)]

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        played = [[call.arguments.get("access_token") == "abc" for call in replay.calls] for replay in replays]
        return [Replayed(("ok",) * len(p), (False,) * len(p), (True,) * len(p), {}, any(p)) for p in played]


def test_a_credential_that_reading_drops_is_the_reference_s_where_the_rollout_is_played_again(tmp_path: Path) -> None:
    log, world = tmp_path / "log.jsonl", Guarded()
    entry = chat("p", ["restart"], 1)
    entry["messages"][1] = message("restart", {"service": "api", "access_token": "abc"}, 0)
    log.write_text(json.dumps(entry) + "\n")
    logs = read_logs([log])
    assert "abc" not in next(iter(logs.rollouts)).model_dump_json()
    worlds: Any = SimpleNamespace(of=world.of, reference=lambda _: world.reference_of(), trouble="")
    selection = SelectionSettings(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200)
    [row] = explain(logs, selection, runs=2, count=1, seed=0, worlds=worlds).diagnosed.rollouts
    assert row.causes == [] and row.repairs == []
