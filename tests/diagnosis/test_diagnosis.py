"""`captrain diagnose` through the command line, on the hand-made file and on the shared ones."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.diagnosing import diagnose

from captrain.errors import UserError
from captrain.records import Capability, Rollout, RolloutLabels, load

LIBRARY = Path(__file__).parents[1] / "logs" / "library.json"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "tau2"
FILES = ("report.md", "rollouts.jsonl", "candidates.jsonl", "labels.jsonl", "selection.json")


def larger(path: Path, times: int) -> Path:
    """The hand-made file with each task several times over, as further tasks."""
    data = json.loads(LIBRARY.read_text())
    simulations, tasks = data["simulations"], data["tasks"]
    data["simulations"] = [{**one, "task_id": f"{one['task_id']}-{k}"} for k in range(times) for one in simulations]
    data["tasks"] = [{**one, "id": f"{one['id']}-{k}"} for k in range(times) for one in tasks]
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def ranked(out: Path) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in json.loads((out / "selection.json").read_text())["candidates"]}


def test_few_rollouts_are_said_to_conclude_nothing_and_nothing_is_selected(tmp_path: Path) -> None:
    said = diagnose(LIBRARY, "--out", tmp_path)
    why = "4 passed and 6 failed rollouts; at least 10 of each are needed to conclude anything"
    assert f"Nothing can be concluded: {why}" in said.replace("\n", " ") and "selected" not in said
    # With 4 passed rollouts, 6 more make the 10 that any conclusion needs.
    assert "collect 6 more that pass and as many that fail" in said and "collect 1 more" not in said
    report = (tmp_path / "report.md").read_text()
    assert report.index(why) < report.index("## Outcomes")
    assert not any(row["selected"] for row in ranked(tmp_path).values())
    assert all(row["reason"].startswith("too few rollouts") for row in ranked(tmp_path).values())


def test_text_of_the_logs_is_text_in_the_report_and_on_the_page(tmp_path: Path) -> None:
    hostile = "<script>x</script> | **bold** [a](http://b) \x1b[31m \u202e sk-abcdefghijklmnop1234"
    data = json.loads(LIBRARY.read_text())
    for simulation, task in zip(data["simulations"], [*data["tasks"]] * len(data["simulations"]), strict=False):
        simulation["task_id"] = task["id"] = f"{task['id'].split(' ')[0]} {hostile}"
        for message in simulation["messages"]:
            message["content"] = f"{message.get('content') or ''} {hostile}"
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(data))
    printed = diagnose(path, "--out", tmp_path / "out")
    report, page = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))
    assert "&lt;script&gt;" in report and "\\*\\*bold\\*\\* \\[a\\]" in report
    assert "<script>x" not in report and "<script>x" not in page
    assert not {"\x1b", "\u202e"} & {*printed, *report} and "sk-abcdefghijklmnop1234" not in report


def test_logs_of_one_outcome_give_a_report_without_a_ranking(tmp_path: Path) -> None:
    data = json.loads(LIBRARY.read_text())
    data["simulations"] = [one for one in data["simulations"] if one["reward_info"]["reward"] == 1.0]
    path = tmp_path / "passed.json"
    path.write_text(json.dumps(data))
    assert "4 passed and 0 failed rollouts; captrain compares" in diagnose(path, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "selection.json").exists() and (tmp_path / "out" / "report.md").exists()


def test_further_trials_of_the_same_tasks_are_no_further_evidence(tmp_path: Path) -> None:
    path, out = tmp_path / "a.json", tmp_path / "out"
    data = json.loads(LIBRARY.read_text())
    data["simulations"] = [{**one, "trial": 10 * k + one["trial"]} for k in range(6) for one in data["simulations"]]
    path.write_text(json.dumps(data))
    diagnose(path, "--out", out)
    assert ranked(out)["wrong_argument"]["gap"] > 0.3
    assert not any(row["selected"] for row in ranked(out).values())


def test_enough_rollouts_give_a_ranking_with_evidence_by_message(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = diagnose(larger(tmp_path / "a.json", 6), "--out", out)
    rows = ranked(out)
    assert rows["wrong_argument"]["gap"] > 0.3
    assert rows["extra_write"]["coverage"] == pytest.approx(1 / 6, abs=1e-6)
    # What the user asked for and the record forbids is no slip of the agent's: it complied.
    assert rows["undue_compliance"]["coverage"] == pytest.approx(1 / 6, abs=1e-6)
    assert "Nothing can be concluded" not in said
    selected = [name for name, row in rows.items() if row["selected"]]
    assert selected and all(re.search(rf"{name} .* yes ", said) for name in selected)
    report = (out / "report.md").read_text()
    assert "message 6, wrong_argument (Wrong argument) (traced): renew_loan: weeks 3 should be 2" in report
    assert "> assistant: renew_loan(loan_id='L-4', weeks=3)" in report
    assert "message 6, missing_information (Missing information) (traced): 3.50 was known but not told" in report


def test_faults_of_simulator_and_infrastructure_are_listed_and_not_contrasted(tmp_path: Path) -> None:
    said = diagnose(LIBRARY, "--out", tmp_path)
    counts = "12 rollouts: 4 passed, 7 failed, 1 without a verdict (error), 1 with a fault of the simulated user"
    assert counts in said.replace("\n", " ")
    assert "\n6. does something that the policy forbids: the primary cause of 1 of 7 failures\n" in said
    assert "\nWhat else to do\n7. The simulated user spoilt 1 of 7 failures\n" in said
    assert "\n8. An error stopped 1 rollout\n   -> repair the infrastructure, and play these tasks again\n" in said
    report = (tmp_path / "report.md").read_text()
    assert "## What else to do\n\n7. **The simulated user spoilt 1 of 7 failures**\n" in report
    assert "tau2/library/fee (error, trial 2): the simulation ended with infrastructure_error" in report
    assert "tau2/library/renew (failed, trial 3): message 5: the user left its instructions" in report
    # What the log counts as failed stays in its pass rate.
    assert "| tau2/library | 11 | 4 | 4 |" in report
    labelled = {row.rollout for row in load(tmp_path / "labels.jsonl", RolloutLabels)}
    assert len(labelled) == 10 and len(load(tmp_path / "rollouts.jsonl", Rollout)) == 12
    assert all(candidate.name for candidate in load(tmp_path / "candidates.jsonl", Capability))


def test_the_page_shows_each_failure_beside_its_reference_and_quotes_nothing_as_markup(tmp_path: Path) -> None:
    data = json.loads(LIBRARY.read_text())
    data["simulations"][1]["messages"][1]["content"] = (
        "<script>alert(1)</script> My card is C-17, renew L-4 by 2 weeks."
    )
    path = tmp_path / "a.json"
    path.write_text(json.dumps(data))
    diagnose(path, "--out", tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert page.count("<details id=") == 7 == page.count("<h4>The reference</h4>")
    assert '<a href="#cause-wrong_argument">' in page and 'id="cause-wrong_argument"' in page
    assert 'class="failing"' in page and "Nothing can be concluded from these logs" in page


def test_what_could_not_be_read_stands_in_the_report(tmp_path: Path) -> None:
    data = json.loads(LIBRARY.read_text())
    data["simulations"][1]["reward_info"] = None
    path = tmp_path / "a.json"
    path.write_text(json.dumps(data))
    diagnose(path, "--out", tmp_path / "out")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "1 entry could not be read" in report and "a.json, simulation 1" in report
    assert "no outcome found" in report


def test_equal_logs_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        diagnose(LIBRARY, "--out", "out")
    for name in (*FILES, "advice.json", "tools.json"):
        assert (tmp_path / "a/out" / name).read_bytes() == (tmp_path / "b/out" / name).read_bytes()


def test_thresholds_can_be_set(tmp_path: Path) -> None:
    path = larger(tmp_path / "a.json", 6)
    diagnose(path, "--out", tmp_path / "none", "--delta", 1.0, "--coverage", 0.9)
    assert not any(row["selected"] for row in ranked(tmp_path / "none").values())
    diagnose(path, "--out", tmp_path / "one", "--count", 1)
    assert sum(row["selected"] for row in ranked(tmp_path / "one").values()) == 1


def test_a_file_that_is_no_log_ends_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text("{}")
    with pytest.raises(
        UserError,
        match=r"there is no rollout in .*notes\.json(.|\n)*docs/formats\.md says what each needs",
    ):
        diagnose(path, "--out", tmp_path)


@pytest.mark.needs("shared")
def test_the_shared_files_are_explained_in_seconds(tmp_path: Path) -> None:
    files = sorted(SHARED.glob("gpt-oss*.json"))
    before = os.times()
    said = diagnose(*files, "--out", tmp_path)
    after = os.times()
    # Of processors: whoever else is at work here has a share of the clock.
    seconds = sum(after[:4]) - sum(before[:4])
    assert seconds < 25, "with replay, tau2's world and its start among them"
    assert "50 rollouts: 19 passed, 31 failed" in said


def test_a_suspect_reference_is_never_counted_for_the_agent_in_any_file(tmp_path: Path) -> None:
    data = json.loads(LIBRARY.read_text())
    for agent in ("a", "b"):
        copied = [
            {**one, "reward_info": {**(one["reward_info"] or {}), "reward": 0.0}} if one["task_id"] == "renew" else one
            for one in data["simulations"]
            for _ in range(3)
        ]
        log = {**data, "simulations": [{**one, "trial": trial} for trial, one in enumerate(copied)]}
        log["info"] = {**data.get("info", {}), "agent_info": {"llm": agent}}
        (tmp_path / f"{agent}.json").write_text(json.dumps(log))
    files, out = (tmp_path / "a.json", tmp_path / "b.json"), tmp_path / "out"
    diagnose(*files, "--out", out)
    causes = {row["rollout"]: row for row in map(json.loads, (out / "causes.jsonl").read_text().splitlines())}
    labels = [json.loads(line) for line in (out / "labels.jsonl").read_text().splitlines()]
    suspects = {name for name, row in causes.items() if row["standing"] == "suspect"}
    assert {row["rollout"] for row in labels if row.get("suspect")} == suspects
    lacking = [row for row in labels if any(label["verdict"] == "LACKING" for label in row["labels"].values())]
    assert any(row.get("suspect") for row in lacking) and all(not row["count"] for row in lacking if row.get("suspect"))
    failed = [row for row in causes.values() if row["outcome"] == "failed"]
    of_suspects = sum(row["standing"] == "suspect" for row in failed)
    report, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    assert f"| suspect_reference | Suspect reference | {of_suspects} |" in report
    assert report.count("(its reference is suspect)") == of_suspects and "cause-suspect_reference" in page
    fixes = {entry["subject"]: entry["facts"] for entry in json.loads((out / "advice.json").read_text())}
    assert fixes["is scored against a suspect reference"].startswith(f"{of_suspects} of {len(failed)} failures")
    counted = json.loads((out / "selection.json").read_text())["rollouts"]
    assert counted["passed"] + counted["failed"] == sum(row["standing"] == "contrasted" for row in causes.values())


def test_agents_are_columns_paired_by_task_and_a_task_that_none_passes_is_suspect(tmp_path: Path) -> None:
    data = json.loads(LIBRARY.read_text())
    for name in ("first", "second"):
        data["info"]["agent_info"] = {"llm": name}
        simulations = [{**simulation, "seed": name} for simulation in data["simulations"]]
        for simulation in simulations:
            if simulation["task_id"] == "keep":
                simulation["reward_info"] = {**simulation["reward_info"], "reward": 0.0}
        (tmp_path / f"{name}.json").write_text(json.dumps({**data, "simulations": simulations}))
    said = diagnose(tmp_path / "first.json", tmp_path / "second.json", "--out", tmp_path / "out")
    assert "Failures of each agent by primary cause" in said and "first (8 failed)" in said and "second (8" in said
    report = (tmp_path / "out/report.md").read_text()
    assert "first minus second: +0.000 (+0.000 to +0.000), on 4 tasks that both played." in report
    assert "none of 4 rollouts of 2 agents passes the task" in report
    suspects = [json.loads(line)["task"] for line in (tmp_path / "out/suspects.jsonl").read_text().splitlines()]
    assert set(suspects) == {"tau2/library/keep"}
    assert "the logs have 2 agents" in said and not any(row["selected"] for row in ranked(tmp_path / "out").values())


@pytest.mark.parametrize("is_common", [True, False])
def test_a_task_that_four_agents_fail_alike_is_suspect_and_one_that_they_fail_variously_is_hard(
    tmp_path: Path, is_common: bool
) -> None:
    def calls(*tools: str) -> list[Any]:
        functions = [{"name": tool, "arguments": '{"room": "R1"}'} for tool in tools]
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
            for function in functions
        ]

    reference, made = calls("air", "lock", "lamp", "heat"), ["air", "lock", "lamp", "heat"]
    for agent in range(4):
        kept = [tool for tool in made if tool != made[0 if is_common else agent]]
        row = {"task_id": "room", "model": f"a{agent}", "reward": 0, "reference": reference}
        row["messages"] = [
            {"role": "user", "content": "Close R1."},
            *calls(*kept),
            {"role": "assistant", "content": "Ok."},
        ]
        (tmp_path / f"{agent}.jsonl").write_text(json.dumps(row) + "\n")
    diagnose(*(tmp_path / f"{agent}.jsonl" for agent in range(4)), "--out", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out/suspects.jsonl").read_text().splitlines()]
    reason = (
        "none of 4 rollouts of 4 agents passes the task, and all differ from the reference in one thing: insert air(R1)"
    )
    assert [row["reasons"] for row in rows] == ([[reason]] * 4 if is_common else [])
