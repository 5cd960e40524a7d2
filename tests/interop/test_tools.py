"""Logs of agents' tools in the shapes that the tools document: dialogue, outcome, and what they say beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from captrain.contract import calls_of
from captrain.interop import Choices, Logs, read_logs
from captrain.records import Expected, Rollout

Row = dict[str, Any]
COMMAND = {"command": "pytest"}
DIALOGUE = [("user", "Fix it."), ("assistant", [("bash", COMMAND)]), ("tool", "1 failed"), ("assistant", "Done.")]
CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": json.dumps(COMMAND)}}


def saved(path: Path, *rows: object) -> Path:
    """Write one document, or several rows as lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def spoken(rollout: Rollout) -> list[object]:
    """Return each message with its calls, or else its text."""
    return [(message["role"], calls_of(message) or message["content"]) for message in rollout.messages]


def only(logs: Logs) -> Rollout:
    [rollout] = logs.rollouts
    return rollout


def swe_agent(folder: Path) -> Path:
    history = [
        {"role": "user", "content": "look at this demonstration", "is_demo": True},
        {"role": "user", "content": "Fix it.", "agent": "primary"},
        {"role": "assistant", "content": "x\n```\npytest\n```", "thought": "", "action": "pytest", "agent": "primary"},
        {"role": "user", "content": "1 failed", "agent": "primary"},
        {"role": "assistant", "content": "Done.", "action": "", "agent": "primary"},
    ]
    saved(folder / "report.json", {"r__r-1": {"resolved": False, "tests_status": STATUS}})
    saved(folder / "model.run.json", {"resolved_ids": ["r__r-2"], "unresolved_ids": ["r__r-1"]})
    info = {"exit_status": "submitted (exit_cost)", "submission": "a patch"}
    saved(folder / "r__r-1/r__r-1.traj", {"history": history, "trajectory": [], "info": info})
    return folder


STATUS = {
    "FAIL_TO_PASS": {"success": [], "failure": ["test_a"]},
    "PASS_TO_PASS": {"success": ["test_b"], "failure": []},
}


def mini_swe_agent(folder: Path) -> Path:
    messages = [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "```mswea_bash_command\npytest\n```"},
        {"role": "user", "content": "<returncode>1</returncode>\n1 failed"},
        {"role": "assistant", "content": "Done."},
        {"role": "exit", "content": "LimitsExceeded"},
    ]
    info = {"exit_status": "LimitsExceeded", "submission": "a patch", "config": {"model": {"model_name": "m"}}}
    saved(folder / "preds.json", {"r__r-1": {"model_patch": "x", "instance_id": "r__r-1"}})
    saved(folder / "r__r-1/report.json", {"r__r-1": {"resolved": False, "tests_status": STATUS}})
    saved(folder / "r__r-1/r__r-1.traj.json", {"info": info, "messages": messages, "instance_id": "r__r-1"})
    return folder


def openhands(folder: Path) -> Path:
    history = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "Fix it."}},
        {"id": 1, "source": "environment", "action": "recall", "args": {}},
        {"id": 2, "source": "agent", "action": "run", "args": COMMAND, "tool_call_metadata": {
            "function_name": "bash", "tool_call_id": "c",
            "model_response": {"model": "m", "choices": [{"message": {"tool_calls": [CALL]}}]},
        }},
        {"id": 3, "source": "agent", "observation": "run", "content": "1 failed"},
        {"id": 4, "source": "agent", "action": "finish", "args": {"final_thought": "Done."}},
    ]  # fmt: skip
    error = "RuntimeError: Agent reached maximum iteration."
    row = {"instance_id": "r__r-1", "history": history, "test_result": {"git_patch": "a patch"}, "error": error}
    saved(folder / "output.swebench_eval.jsonl", {"instance_id": "r__r-1", "test_result": {"report": {
        "resolved": False, "tests_status": STATUS}}})  # fmt: skip
    return saved(folder / "output.jsonl", row)


def openhands_sdk(folder: Path) -> Path:
    events = [
        {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": [TEXT]}},
        {"kind": "ActionEvent", "source": "agent", "tool_name": "bash", "tool_call": {"id": "c", **CALL["function"]}},
        {"kind": "ObservationEvent", "source": "environment", "observation": {"content": [{"text": "1 failed"}]}},
        {"kind": "MessageEvent", "source": "agent", "llm_message": {"content": [{"type": "text", "text": "Done."}]}},
    ]
    report = {"resolved": False, "tests_status": STATUS}
    row = {"instance_id": "r__r-1", "history": events, "test_result": {"git_patch": "a patch", "report": report}}
    return saved(folder / "output.jsonl", {**row, "error": "max_iterations reached"})


TEXT = {"type": "text", "text": "Fix it."}
USE = {"type": "tool_use", "id": "c", "name": "bash", "input": COMMAND}


def claude_code(folder: Path) -> Path:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1 failed"}]}
    return saved(
        folder / "s.jsonl",
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "Fix it."}},
        {
            "type": "assistant",
            "sessionId": "s",
            "message": {"id": "m", "role": "assistant", "model": "m", "content": []},
        },
        {"type": "assistant", "sessionId": "s", "message": {"id": "m", "role": "assistant", "content": [USE]}},
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": [result]}},
        {"type": "user", "isSidechain": True, "message": {"role": "user", "content": "a task of a helper"}},
        {
            "type": "assistant",
            "message": {"id": "n", "role": "assistant", "content": [{"type": "text", "text": "Done."}]},
        },
        {"type": "result", "subtype": "error_max_turns", "is_error": True},
    )


def codex(folder: Path) -> Path:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "bash", "arguments": json.dumps(COMMAND), "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "1 failed"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
    ]
    meta = [{"type": "session_meta", "payload": {"id": "s"}}, {"type": "turn_context", "payload": {"model": "m"}}]
    return saved(folder / "s.jsonl", *meta, *({"type": "response_item", "payload": item} for item in items))


def openclaw(folder: Path) -> Path:
    called = {"type": "toolCall", "id": "c", "name": "bash", "arguments": COMMAND}
    messages = [
        {"role": "user", "content": [TEXT]},
        {"role": "assistant", "model": "m", "content": [{"type": "thinking", "thinking": "hm"}, called]},
        {"role": "toolResult", "toolCallId": "c", "content": [{"type": "text", "text": "1 failed"}]},
        {"role": "assistant", "model": "m", "content": [{"type": "text", "text": "Done."}]},
    ]
    return saved(
        folder / "s.jsonl", {"type": "session", "id": "s"}, *({"type": "message", "message": m} for m in messages)
    )


def terminal_bench(folder: Path) -> Path:
    trial = folder / "fix/fix.1-of-1.run"
    result = {
        "task_id": "fix", "trial_name": "fix.1-of-1.run", "is_resolved": False, "failure_mode": "agent_timeout",
        "parser_results": {"test_a": "failed", "test_b": "passed"},
    }  # fmt: skip
    saved(trial / "results.json", result)
    saved(folder / "results.json", {"results": [result], "accuracy": 0.0})
    shown = ["Fix it.", "1 failed"]
    answers: list[Row] = [{"commands": [{"keystrokes": "pytest\n"}]}, {"commands": []}]
    for number, (prompt, answer) in enumerate(zip(shown, answers, strict=True)):
        episode = trial / f"agent-logs/episode-{number}"
        episode.mkdir(parents=True)
        (episode / "prompt.txt").write_text(prompt, encoding="utf-8")
        (episode / "response.txt").write_text(json.dumps(answer), encoding="utf-8")
    return folder


def harbor(folder: Path) -> Path:
    trial = folder / "fix__abc"
    saved(folder / "result.json", {"n_total_trials": 1, "stats": {}})
    saved(trial / "config.json", {"task": {"path": "fix"}})
    saved(trial / "result.json", {
        "task_name": "fix", "trial_name": "fix__abc", "agent_info": {"name": "claude-code"},
        "verifier_result": {"rewards": {"reward": 0.0}}, "exception_info": {"exception_type": "AgentTimeoutError"},
    })  # fmt: skip
    claude_code(trial / "agent/sessions/projects/app")
    return folder


@pytest.mark.parametrize(
    ("write", "task", "limit"),
    [
        (swe_agent, "r__r-1", "exit_cost"),
        (mini_swe_agent, "r__r-1", "LimitsExceeded"),
        (openhands, "r__r-1", "max_iterations"),
        (openhands_sdk, "r__r-1", "max_iterations"),
        (claude_code, "s", "max_turns"),
        (codex, "s", ""),
        (openclaw, "s", ""),
        (terminal_bench, "fix", "agent_timeout"),
        (harbor, "fix", "time"),
    ],
)
def test_coding_agents_are_read_with_outcome_limit_and_what_the_grader_said(
    write: Callable[[Path], Path], task: str, limit: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "run")
    scores = tmp_path / "scores.csv"
    scores.write_text("session_id,reward\ns,0\n", encoding="utf-8")
    rollout = only(read_logs([path], scores if task == "s" else None))
    assert (rollout.task.id, rollout.outcome, rollout.error) == (f"chat/{task}", "failed", None)
    facts = rollout.task.facts
    assert facts.limit == limit
    if task == "fix" and write is terminal_bench:
        assert facts.grading == "failed tests: test_a"
        assert spoken(rollout)[:3] == [
            DIALOGUE[0],
            ("assistant", [("terminal", {"keystrokes": "pytest\n"})]),
            DIALOGUE[2],
        ]
        return
    said = [(role, text.splitlines()[-1] if isinstance(text, str) else text) for role, text in spoken(rollout)]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    assert said == DIALOGUE
    if task == "r__r-1":
        assert (facts.submission, facts.grading) == ("a patch", "failing tests: test_a")


@pytest.mark.parametrize("named", ["", "results.json", "fix/fix.1-of-1.run", "fix/fix.1-of-1.run/results.json"])
def test_the_summary_of_a_terminal_bench_run_stands_for_its_trials(named: str, tmp_path: Path) -> None:
    logs = read_logs([terminal_bench(tmp_path) / named])
    assert (only(logs).task.id, only(logs).outcome, logs.unread, logs.skipped) == ("chat/fix", "failed", 0, [])


@pytest.mark.parametrize(
    ("results", "outcomes"),
    [
        ([("t", 0.0), ("t", 1.0)], ["failed", "passed"]),
        ([("t", 1.0), ("t", 1.0)], ["passed", "passed"]),  # the results name two trials
        ([("t", 0.0), ("u", 0.0)], ["failed", "failed"]),
    ],
)
def test_equal_dialogues_with_results_of_their_own_are_rollouts_of_their_own(
    results: list[tuple[str, float]], outcomes: list[str], tmp_path: Path
) -> None:
    for number, (task, reward) in enumerate(results):
        trial = tmp_path / f"run/{task}__{number}"
        codex(trial / "agent/sessions")
        result = {"verifier_result": {"rewards": {"reward": reward}}, "exception_info": None}
        saved(trial / "result.json", {"task_name": task, "trial_name": trial.name, **result})
    logs = read_logs([tmp_path / "run", tmp_path / "run"])
    assert [rollout.outcome for rollout in logs.rollouts] == outcomes
    assert len({rollout.id for rollout in logs.rollouts}) == len({(r.task.id, r.trial) for r in logs.rollouts}) == 2


def test_multi_agent_logs_keep_every_message_in_its_place(tmp_path: Path) -> None:
    history = [
        {"role": "human", "content": "How many?"},
        {"role": "Orchestrator (thought)", "content": "Ask the surfer."},
        {"role": "Orchestrator (-> WebSurfer)", "content": "Search."},
        {"role": "WebSurfer", "content": "Seven."},
        {"role": "Orchestrator (termination condition)", "content": "FINAL ANSWER: 7"},
    ]
    labelled = {
        "history": history,
        "question": "How many?",
        "question_ID": "q",
        "ground_truth": "8",
        "is_correct": False,
    }
    logs = read_logs([saved(tmp_path / "1.json", {**labelled, "mistake_agent": "WebSurfer", "mistake_step": "3"})])
    assert spoken(only(logs))[2:4] == [("assistant", [("WebSurfer", {"request": "Search."})]), ("tool", "Seven.")]
    assert len(only(logs).messages) == len(history) and only(logs).messages[1]["name"] == "Orchestrator"
    assert only(logs).task.facts.expected == (Expected("ground_truth", "8"),)
    assert "mistake" not in only(logs).model_dump_json()
    (tmp_path / "scores.csv").write_text("file,reward\n2.json,0\n", encoding="utf-8")
    bare = only(read_logs([saved(tmp_path / "2.json", history)], tmp_path / "scores.csv"))
    assert spoken(bare) == spoken(only(logs))


def test_messages_of_autogen_s_teams_are_read_as_a_result_or_as_a_file_each(tmp_path: Path) -> None:
    def event(kind: str, content: object, source: str = "fixer") -> Row:
        return {"source": source, "models_usage": None, "metadata": {}, "content": content, "type": kind}

    call = {"id": "c", "name": "bash", "arguments": json.dumps(COMMAND)}
    events = [
        event("TextMessage", "Fix it.", "user"),
        event("ThoughtEvent", "I run it."),
        event("ToolCallRequestEvent", [call]),
        event("ToolCallExecutionEvent", [{"call_id": "c", "name": "bash", "content": "1 failed", "is_error": True}]),
        event("MultiModalMessage", ["Done.", {"data": "x"}]),
    ]
    result = {"messages": events, "stop_reason": "Maximum number of turns 1 reached.", "reward": 0, "task_id": "t"}
    rollout = only(read_logs([saved(tmp_path / "a.jsonl", result)]))
    assert (spoken(rollout), rollout.task.facts.limit) == (DIALOGUE, result["stop_reason"])
    assert (rollout.messages[1]["name"], rollout.messages[2]["error"]) == ("fixer", True)
    (tmp_path / "scores.csv").write_text("file,reward\nb.json,0\nc.jsonl,1\n", encoding="utf-8")
    files = [saved(tmp_path / "b.json", events), saved(tmp_path / "c.jsonl", *events)]
    failed, passed = read_logs(files, tmp_path / "scores.csv").rollouts
    assert (failed.outcome, passed.outcome) == ("failed", "passed")
    assert spoken(failed) == spoken(passed) == DIALOGUE


@pytest.mark.parametrize(
    ("prediction", "truth", "outcome"),
    [
        ("17 056", "17,056", "passed"),
        ("The Castle", "THE CASTLE.", "passed"),
        ("a, b", "a; b", "passed"),
        ("7", "8", "failed"),
    ],
)
def test_answers_are_right_by_the_rule_of_gaia(prediction: str, truth: str, outcome: str, tmp_path: Path) -> None:
    steps = [
        {"task": "How many?"},
        {
            "model_output": "Thought",
            "tool_calls": [{"name": "search", "arguments": {"q": "x"}}],
            "observations": "seven",
        },
    ]
    row = {
        "question": "How many?",
        "prediction": prediction,
        "true_answer": truth,
        "intermediate_steps": steps,
        "task_id": "t",
    }
    rollout = only(read_logs([saved(tmp_path / "a.jsonl", row)]))
    assert (rollout.outcome, rollout.task.facts.submission) == (outcome, prediction)
    assert spoken(rollout)[1:3] == [("assistant", [("search", {"q": "x"})]), ("tool", "seven")]


def test_spans_of_vercels_sdk_are_read(tmp_path: Path) -> None:
    prompt = [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [{"type": "tool-call", "toolCallId": "c", "toolName": "bash", "input": COMMAND}],
        },
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c", "output": "1 failed"}]},
    ]
    span = {"spanContext": {"traceId": "t"}, "attributes": {
        "ai.prompt.messages": json.dumps(prompt), "ai.response.text": "Done.", "ai.model.id": "m",
    }}  # fmt: skip
    (tmp_path / "scores.csv").write_text("trace_id,reward\nt,0\n", encoding="utf-8")
    rollout = only(read_logs([saved(tmp_path / "a.json", [span])], tmp_path / "scores.csv"))
    assert (spoken(rollout), rollout.policy) == (DIALOGUE, "m")


@pytest.mark.parametrize(
    "row",
    [
        {"trace": [{"tool": "bash", "args": COMMAND, "result": "1 failed"}]},
        {"steps": [{"thought": "hm", "action": {"name": "bash", "arguments": COMMAND}, "observation": "1 failed"}]},
        {"turn_history": {"thoughts": ["hm"], "actions": ["bash[pytest]"], "observations": ["1 failed"]}},
    ],
)
def test_home_made_traces_of_steps_are_read(row: Row, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jsonl", {**row, "query": "Fix it.", "summary": {"max_reward": 0.5}})
    messages = only(read_logs([path], choices=Choices(outcome="summary.max_reward"))).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert [name for name, _ in calls_of(messages[1])] == ["bash"] and messages[2]["content"] == "1 failed"


@pytest.mark.parametrize(
    "step",
    [
        {"tool_calls": [{"name": "bash", "args": COMMAND, "result": "1 failed"}, {"name": "ls", "output": "a.py"}]},
        {"calls": [{"tool": "bash", "input": COMMAND}, {"tool": "ls"}], "results": ["1 failed", {"content": "a.py"}]},
    ],
    ids=["in the calls", "in a list beside them"],
)
def test_a_step_may_hold_a_list_of_calls_and_the_last_step_only_words(step: Row, tmp_path: Path) -> None:
    row = {"task": "Fix it.", "steps": [step, {"answer": "Done."}], "success": False}
    assert spoken(only(read_logs([saved(tmp_path / "a.jsonl", row)]))) == [
        ("user", "Fix it."),
        ("assistant", [("bash", COMMAND), ("ls", {})]),
        ("tool", "1 failed"),
        ("tool", "a.py"),
        ("assistant", "Done."),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Thought: run it\nAction: bash\nAction Input: {'command': 'pytest'}",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "pytest"}}\n</tool_call>',
        '<function_call>[{"function": "bash", "args": {"command": "pytest"}}]',
        "<function=bash><parameter=command>pytest</parameter></function>",
        '{"function_call": {"action": "bash", "action_input": {"command": "pytest"}}}',
        '```json\n{"tool": "bash", "parameters": {"command": "pytest"}}\n```',
    ],
)
def test_calls_left_as_text_are_calls_if_they_were_executed_and_marked_if_not(text: str, tmp_path: Path) -> None:
    def rollout(answer: str) -> Rollout:
        said = [*({"role": role, "content": content} for role, content in (("user", "Fix it."), ("assistant", text)))]
        messages = [*said, {"role": "user", "content": answer}, {"role": "assistant", "content": "Done."}]
        return only(read_logs([saved(tmp_path / "a.jsonl", {"messages": messages, "reward": 0})]))

    done, idle = rollout("Observation: 1 failed"), rollout("Go on.")
    assert spoken(done)[1:3] == [("assistant", [("bash", COMMAND)]), ("tool", "Observation: 1 failed")]
    assert idle.messages[1]["unexecuted"] == ["bash"] and idle.messages[2]["role"] == "user"


ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "SELECT 1"}]}


@pytest.mark.parametrize(
    ("fields", "outcome", "limit", "grading"),
    [
        ({"failure_reason": "wrong rows", "gold_sql": "SELECT 2"}, "failed", "", "wrong rows"),
        ({"mask_sample": True, "failure_labels": ["sandbox"]}, "error", "", ""),
        ({"agent_timed_out": True}, "failed", "time", ""),
        ({"judge_error": "no answer"}, "error", "", ""),
    ],
)
def test_what_nemo_gym_says_beside_the_reward_is_kept(
    fields: Row, outcome: str, limit: str, grading: str, tmp_path: Path
) -> None:
    row = {"responses_create_params": {"input": "Count."}, "response": {"output": [ANSWER]}, "reward": 0.0, **fields}
    rollout = only(read_logs([saved(tmp_path / "a.jsonl", row)]))
    facts = rollout.task.facts
    assert (rollout.outcome, facts.limit, facts.grading) == (outcome, limit, grading)
    assert ("gold_sql" in fields) == (facts.expected == (Expected("gold_sql", "SELECT 2"),))


def test_the_target_explanation_and_limit_of_an_inspect_sample_are_kept(tmp_path: Path) -> None:
    sample = {
        "id": 1, "epoch": 1, "target": "8", "limit": {"type": "token", "limit": 9},
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "7"}],
        "scores": {"match": {"value": "I", "answer": "7", "explanation": "7 is not 8"}},
    }  # fmt: skip
    path = saved(tmp_path / "a.json", {"eval": {"model": "m"}, "samples": [sample]})
    facts = only(read_logs([path])).task.facts
    assert (facts.limit, facts.grading, facts.submission) == ("token", "7 is not 8", "7")
    assert facts.expected == (Expected("target", "8"),)


def test_a_failure_without_the_agent_or_with_an_error_in_its_row_is_no_failure_of_the_agent(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    rows = [
        {"messages": asked, "reward": 0},
        {"messages": [*asked, {"role": "assistant", "content": "A"}], "reward": 0},
    ]
    logs = read_logs([saved(tmp_path / "a.jsonl", rows[0], {**rows[1], "error": "502 from the server"}, rows[1])])
    assert [rollout.error for rollout in logs.rollouts] == [
        "the log holds no message of the agent", "502 from the server", None,
    ]  # fmt: skip


def test_tau2_without_actions_has_no_reference_and_its_limit_is_named(tmp_path: Path) -> None:
    simulation = {
        "task_id": "0", "trial": 0, "termination_reason": "max_steps", "reward_info": {"reward": 0.0},
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "no"}],
    }  # fmt: skip
    outcomes = [{"db": "x"}]
    criteria = {"actions": None, "communicate_info": None, "acceptable_outcomes": outcomes}
    log = {"info": {}, "tasks": [{"id": "0", "evaluation_criteria": criteria}], "simulations": [simulation]}
    rollout = only(read_logs([saved(tmp_path / "a.json", log)]))
    assert (rollout.reference, rollout.task.facts.limit) == ([], "max_steps")
    assert rollout.task.facts.expected == (Expected("acceptable_outcomes", json.dumps(outcomes)),)


def test_arguments_in_pythons_notation_are_parsed(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": "{'id': '#1', 'note': None, 'many': ('a', 'b')}"}}
    row = {"messages": [{"role": "assistant", "tool_calls": [call]}], "reward": 1}
    rollout = only(read_logs([saved(tmp_path / "a.jsonl", row)]))
    assert calls_of(rollout.messages[0]) == [("f", {"id": "#1", "note": None, "many": ["a", "b"]})]
