"""Folders of runs as tools leave them: what is a rollout, what is its result, and what is neither."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from captrain.cli.app import app

Row = dict[str, Any]
ASKED = {"role": "user", "content": "Mend the parser."}
SAID = {"role": "assistant", "content": "It is mended."}
TRAJECTORY: Row = {
    "history": [ASKED, {"role": "assistant", "content": "look", "thought": "look", "action": "ls"}, ASKED],
    "info": {"exit_status": "submitted", "submission": "a diff"},
}
STEP: Row = {"step_id": 1, "source": "user", "message": "Mend the parser."}
ATIF: Row = {
    "schema_version": "ATIF-v1.6",
    "agent": {"name": "desk", "version": "1", "model_name": "m-1"},
    "steps": [STEP, {"step_id": 2, "source": "agent", "message": "look"}, {**STEP, "step_id": 3}],
}
EVENTS = [
    {"id": 0, "source": "user", "action": "message", "args": {"content": "Mend the parser."}},
    {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls"}},
    {"id": 2, "source": "agent", "action": "finish", "args": {"final_thought": "Mended."}},
]


def verdict(task: str, *, resolved: bool) -> Row:
    return {task: {"resolved": resolved, "tests_status": {}}}


def session(name: str) -> list[Row]:
    return [{"type": message["role"], "sessionId": name, "message": message} for message in (ASKED, SAID)]


def harbor(task: str, *, passed: bool) -> dict[str, object]:
    tests = [{"name": f"test_{number}", "status": "failed", "message": "it is wrong"} for number in range(3)]
    return {
        f"job/{task}__1/agent/trajectory.json": {**ATIF, "session_id": task},
        f"job/{task}__1/agent/sessions/projects/-app/{task}.jsonl": session(task),
        f"job/{task}__1/result.json": {
            "task_name": task,
            "verifier_result": {"rewards": {"reward": float(passed)}},
            "exception_info": None,
        },
        f"job/{task}__1/verifier/ctrf.json": {"results": {"tests": tests}},
        "job/result.json": {"n_total_trials": 2, "stats": {"evals": {}}},
        "job/config.json": {"agents": [{"name": "desk"}], "datasets": [{"name": "d"}]},
    }


def terminal_bench(task: str, *, passed: bool) -> dict[str, object]:
    trial = f"run/{task}/{task}.1-of-1.run"
    request = {"model": "m-1", "messages": [ASKED], "original_response": "Look first."}
    result = {"trial_name": f"{task}.1-of-1.run", "task_id": task, "is_resolved": passed, "failure_mode": "unset"}
    return {
        f"{trial}/agent-logs/episode-0/prompt.txt": "Mend the parser.",
        f"{trial}/agent-logs/episode-0/response.txt": json.dumps({"commands": [{"keystrokes": "ls"}]}),
        f"{trial}/agent-logs/episode-0/debug.json": request,
        f"{trial}/agent-logs/episode-1/prompt.txt": "$ ls",
        f"{trial}/results.json": result,
        "run/run_metadata.json": {"run_id": "run", "task_ids": [task]},
    }


def terminal_bench_with_sessions(task: str, *, passed: bool) -> dict[str, object]:
    files = terminal_bench(task, passed=passed)
    [trial] = [Path(name).parent for name in files if name.endswith("results.json")]
    kept = {name: content for name, content in files.items() if "agent-logs" not in name}
    return {**kept, str(trial / "sessions/s.jsonl"): session(task)}


def swe_bench(place: str) -> Any:
    def files(task: str, *, passed: bool) -> dict[str, object]:
        name = f"a__{task}"
        return {
            f"trajs/{name}.traj": TRAJECTORY,
            place.format(name): verdict(name, resolved=passed),
            "all_preds.jsonl": [{"instance_id": name, "model_patch": "a diff"}],
            "metadata.json": {"name": "m-1"},
        }

    return files


def openhands(task: str, *, passed: bool) -> dict[str, object]:
    reply = {"choices": [{"message": {"role": "assistant", "content": "Look first."}}]}
    name = f"a__{task}"
    return {
        f"{task}/output.jsonl": [{"instance_id": name, "history": EVENTS, "test_result": {"git_patch": "a diff"}}],
        f"{task}/eval_outputs/{name}/report.json": verdict(name, resolved=passed),
        f"{task}/llm_completions/{name}/1.json": {"messages": [ASKED], "response": reply},
    }


def own(task: str, *, passed: bool) -> dict[str, object]:
    return {
        f"{task}.json": {"messages": [ASKED, SAID], "reward": int(passed), "task_id": task},
        "results.json": {"rate": 0.5, "tasks": [{"task": task, "comment": "it went well"}, {"task": "other"}]},
        "report.json": [{"task": task, "reward": 1}],
    }


def own_with_result(task: str, *, passed: bool) -> dict[str, object]:
    return {f"{task}/messages.json": [ASKED, SAID], f"{task}/result.json": {"success": passed, "seconds": 3}}


@pytest.mark.parametrize(
    ("files", "options"),
    [
        (harbor, []),
        (terminal_bench, []),
        (terminal_bench_with_sessions, []),
        (swe_bench("logs/{}/report.json"), []),
        (swe_bench("logs/run_evaluation/run/model/{}/report.json"), []),
        (swe_bench("evaluation/{}/report.json"), []),
        (openhands, []),
        (own, []),
        (own_with_result, ["--outcome", "success"]),
    ],
)
def test_a_folder_of_runs_gives_each_trial_once_and_no_other_file_is_a_fault(
    files: Any, options: list[str], tmp_path: Path
) -> None:
    for task, passed in (("one", True), ("two", False)):
        for name, content in files(task, passed=passed).items():
            path = tmp_path / "logs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = content if name.endswith(".jsonl") else [content]
            path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, rows)))
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path / "logs"), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 0, done.output + repr(done.exception)
    rows = [json.loads(line) for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    assert sorted((row["task"]["id"].rpartition("/")[2].removeprefix("a__"), row["outcome"]) for row in rows) == [
        ("one", "passed"), ("two", "failed"),
    ]  # fmt: skip
    assert "2 rollouts: 1 passed, 1 failed" in done.output
    assert "unreadable" not in done.output and "passed over" not in done.output


def test_reports_of_two_runs_that_disagree_give_no_outcome(tmp_path: Path) -> None:
    (tmp_path / "a__one.traj").write_text(json.dumps(TRAJECTORY))
    for run, resolved in (("r1", True), ("r2", False)):
        report = tmp_path / f"logs/run_evaluation/{run}/m/a__one/report.json"
        report.parent.mkdir(parents=True)
        report.write_text(json.dumps(verdict("a__one", resolved=resolved)))
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and "no outcome found" in str(done.exception)


def test_files_that_may_hold_dialogues_of_no_known_format_are_counted_aloud(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"messages": [ASKED, SAID], "reward": 1}))
    turns = [{"actor": actor, "utterance_of": "good day to you"} for actor in "ABA"]
    (tmp_path / "b.json").write_text(json.dumps({"day": {"talk": turns}}))
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--out", str(tmp_path.parent / "out")])
    assert done.exit_code == 0
    assert "passed over: 1 file of no known format, such as b.json; name it alone to see why" in done.output
