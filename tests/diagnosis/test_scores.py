"""Faults planted into solutions, and how a diagnosis is held to what is known of failures."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import SCRIPTS, load_script
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.interop import read_logs
from captrain.projects import init_project
from captrain.records import JsonObject


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Logs of the two benchmarks that need no package, four faults a class in each."""
    folder = tmp_path_factory.mktemp("planted")
    sys.path.insert(0, str(SCRIPTS))  # a script finds its neighbours where it lies
    script = load_script("plant_faults")
    flags = ["--per-class", "4", "--tasks", "60", "--benchmark", "servicedesk", "--benchmark", "calendar"]
    assert script.main([str(folder), *flags]) == 0
    yield folder
    sys.path.remove(str(SCRIPTS))


def rows(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_class_is_planted_each_fault_fails_and_untouched_solutions_pass(planted: Path) -> None:
    truth = rows(planted / "truth.jsonl")
    classes = Counter((row["file"], row["class"]) for row in truth)
    assert {name for file, name in classes if "desk" in file} >= {
        *("", "look-up skipped", "other record", "value off", "change left out", "change added"),
        *("operation swapped", "handed over", "stopped early", "answer without the value"),
    }
    assert all(number == 4 for (_, name), number in classes.items() if name) and len(truth) >= 70
    for file in {row["file"] for row in truth}:
        rollouts = {(r.task.id.partition("/")[2], r.trial): r for r in read_logs([planted / file]).rollouts}
        own = [row for row in truth if row["file"] == file]
        assert len(rollouts) == len(own)
        for row in own:
            rollout = rollouts[row["task_id"], row["trial"]]
            assert (rollout.outcome == "failed") == bool(row["class"]) == bool(row["accepted"])
            assert row["message"] is None or rollout.messages[row["message"]]["tool_calls"]


@pytest.fixture
def scorer() -> ModuleType:
    return load_script("score_diagnosis")


def scored(scorer: ModuleType, folder: Path, gold: Sequence[JsonObject], capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gold))
    assert scorer.main([str(folder / "gold.jsonl"), str(folder / "log"), "--misses"]) == 0
    return capsys.readouterr().out


def test_a_diagnosis_is_scored_by_primary_family_and_what_is_printed(
    scorer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def known(task: str, primary: str | None, **more: object) -> JsonObject:
        return {
            "file": "log.json", "task_id": task, "trial": 0, "primary": primary, "secondary": [],
            "suspect_reference": False, **more,
        }  # fmt: skip

    def said(task: str, *causes: str, **more: object) -> JsonObject:
        entries: list[JsonObject] = [{"cause": cause} for cause in causes]
        row = {"task": f"tau2/airline/{task}", "environment": "tau2/airline", "trial": 0, "outcome": "failed"}
        return {**row, "primary": entries[0] if entries else None, "secondary": entries[1:], **more}

    gold = [
        known("1", "wrong_record", secondary=["missing_lookup"]),
        known("2", "wrong_argument"),
        known("a/3", "suspect_reference", suspect_reference=True),
        known("4", "premature_stop", accepted=["premature_stop", "missing_write"], **{"class": "stopped early"}),
        known("5", None),
        known("6", "wrong_record"),
    ]
    causes = [
        said("1", "wrong_record", "missing_lookup"),
        said("2", "wrong_computation", repairs=[{"needed": True, "proven": True}]),
        said("a/3", "missing_write", suspicions=["the policy forbids it"]),
        said("4", "missing_write"),
        said("5", "loop", outcome="passed"),
        said("6", suspicions=["two records contradict"]),
    ]
    (tmp_path / "log").mkdir()
    (tmp_path / "log/causes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in causes))
    shown = " ".join(scored(scorer, tmp_path, gold, capsys).split())
    assert (
        "2/4 0.50 [0.15, 0.85] │ 3/4 0.75 [0.30, 0.95] │ 2/4 0.50 [0.15, 0.85] │ 3/4 0.75 [0.30, 0.95] │ 1/4" in shown
    )
    assert "2/5 0.40" in shown and "stopped early │ 1/1 1.00" in shown
    assert "suspect references: 1 of 1 flagged, 1 flagged falsely" in shown
    assert "untouched solutions with a cause: 1 of 1" in shown and "log.json 5: loop" in shown
    assert "log.json 2 (0): wrong_argument, printed wrong_computation" in shown
    with pytest.raises(SystemExit, match="is in no row"):
        scored(scorer, tmp_path, [known("7", "loop")], capsys)


def test_planted_faults_are_named_and_untouched_solutions_are_not(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_project(tmp_path, "calendar")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    truth, wrong = rows(planted / "truth.jsonl"), list[str]()
    for name, flags in (("servicedesk", []), ("calendar", ["--benchmark", "calendar"])):
        out, log = tmp_path / name, f"planted_{name}.jsonl"
        done = CliRunner().invoke(app, ["diagnose", str(planted / log), "--out", str(out), *flags])
        assert done.exit_code == 0, done.output
        causes = {(row["task"].partition("/")[2], row["trial"]): row for row in rows(out / "causes.jsonl")}
        for row in (row for row in truth if row["file"] == log):
            said = causes[row["task_id"], row["trial"]]
            printed = [cause["cause"] for cause in [said.get("primary"), *said.get("secondary", [])] if cause]
            is_right = printed[0] in row["accepted"] if printed and row["class"] else not printed and not row["class"]
            wrong += [] if is_right else [f"{row['class']}: {row['task_id']} {printed}"]
    assert wrong == []


def test_root_steps_of_agentrx_are_scored_apart_by_the_parity_of_their_ids(
    scorer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"failure_id": 1, "step_number": 9}, {"failure_id": 2, "step_number": 5}]
    gold = [{"trajectory_id": n, "failures": steps, "root_cause": {"failure_id": 2}} for n in (2, 3, 4, 6)]
    (tmp_path / "gold.json").write_text(json.dumps(gold))
    messages = {2: 4, 3: 2, 4: 8}
    causes: list[JsonObject] = [
        {"task": f"chat/{n}", "outcome": "failed", "primary": {"message": messages[n]}} for n in messages
    ]
    causes.append({"task": "chat/6", "outcome": "passed"})
    (tmp_path / "causes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in causes))
    assert scorer.main([str(tmp_path / "gold.json"), str(tmp_path)]) == 0
    even, odd = capsys.readouterr().out.splitlines()
    assert "even ids: root step exact 1/2" in even and "within two messages 1/2" in even
    assert "odd ids: root step exact 0/1" in odd and "within two messages 1/1" in odd and "silent 0/1" in odd


def test_root_steps_of_who_and_when_are_scored_from_the_folder_of_its_tasks(
    scorer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[JsonObject] = []
    for number, message in enumerate([3, 5, None]):
        task = {"question_ID": f"q{number}", "question": "?", "ground_truth": "8", "history": [], "mistake_step": "3"}
        (tmp_path / f"{number}.json").write_text(json.dumps(task))
        found.append({"task": f"chat/q{number}", "outcome": "failed", "primary": message and {"message": message}})
    (tmp_path / "causes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    assert scorer.main([str(tmp_path), str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Who&When: root step exact 1/3" in printed and "within two messages 2/3" in printed
    assert "silent 1/3" in printed


@pytest.mark.needs("shared")
def test_the_tasks_of_who_and_when_are_scored(
    scorer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = Path(__file__).parents[3] / "shared/data/strangers/whowhen", tmp_path / "found"
    done = CliRunner().invoke(app, ["diagnose", str(tasks), "--out", str(out)])
    assert done.exit_code == 0 and scorer.main([str(tasks), str(out)]) == 0
    assert "/22" in capsys.readouterr().out
