"""Formats of logs, detected from the content: each gives the same dialogue, tools and outcome."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.installations import interpreter
from support.waiting import PATIENCE

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop import Choices, Logs, export_rollouts, read_logs
from captrain.records import Rollout, Score, Task, publish

Message = dict[str, Any]
ASKED = [{"role": "user", "content": "Read A1."}]
TOOL = {"name": "read", "description": "", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}}
SEARCH = "answer_generation"
ARGUMENTS = '{"id": "A1"}'
VERIFIERS = {
    "task": {"id": "t"}, "ok": True, "errors": [],
    "traces": [{
        "tools": [TOOL], "rewards": {"a": {"score": 1.0, "weight": 0.5}, "b": {"score": 0.0, "weight": 0.5}},
        "nodes": [
            {"parent": None, "message": {"role": "user", "content": "Read A1."}},
            {"parent": 0, "message": {
                "role": "assistant", "content": "", "tool_calls": [{"id": "c", "name": "read", "arguments": ARGUMENTS}],
            }},
            {"parent": 0, "message": {"role": "assistant", "content": "a branch that was dropped"}},
            {"parent": 1, "message": {"role": "tool", "tool_call_id": "c", "content": "red"}},
            {"parent": 3, "message": {"role": "assistant", "content": "It is red."}},
        ],
    }],
}  # fmt: skip
NEMO_GYM = {
    "responses_create_params": {"input": ASKED, "tools": [{"type": "function", **TOOL}]}, "reward": 0.5,
    "response": {"output": [
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "read", "arguments": ARGUMENTS, "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "red"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is red."}]},
    ]},
}  # fmt: skip
ANTHROPIC = {
    "reward": 0.5,
    "tools": [{"type": "function", "function": TOOL}],
    "messages": [
        *ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "read", "input": {"id": "A1"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "red"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It is red."}]},
    ],
}
AGENTDOJO = {
    "suite_name": "s", "user_task_id": "t", "pipeline_name": "p", "utility": False, "security": True, "error": None,
    "messages": [
        {"role": "user", "content": [{"type": "text", "content": "Read A1."}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": "read", "args": {"id": "A1"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "red", "error": None},
        {"role": "assistant", "content": "It is red."},
    ],
}  # fmt: skip
ATIF = {
    "schema_version": "ATIF-v1.7", "session_id": "t", "agent": {"name": "a", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "what came before", "is_copied_context": True},
        {"step_id": 2, "source": "user", "message": "Read A1."},
        {
            "step_id": 3, "source": "agent", "message": "",
            "tool_calls": [{"tool_call_id": "c", "function_name": "read", "arguments": {"id": "A1"}}],
            "observation": {"results": [{"source_call_id": "c", "content": "red"}]},
        },
        {"step_id": 4, "source": "agent", "message": "It is red."},
    ],
}  # fmt: skip
GEN_AI = {
    "trace_id": "t", "attributes": {
        "gen_ai.input.messages": json.dumps([
            {"role": "user", "parts": [{"type": "text", "content": "Read A1."}]},
            {"role": "assistant", "parts": [
                {"type": "tool_call", "id": "c", "name": "read", "arguments": {"id": "A1"}},
            ]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "red"}]},
        ]),
        "gen_ai.output.messages": json.dumps([
            {"role": "assistant", "parts": [{"type": "text", "content": "It is red."}]}
        ]),
    },
}  # fmt: skip
INFERENCE = {
    "context": {"trace_id": "t"}, "attributes": {
        "llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "Read A1.",
        "llm.input_messages.1.message.role": "assistant",
        "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "read",
        "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": ARGUMENTS,
        "llm.input_messages.2.message.role": "tool", "llm.input_messages.2.message.content": "red",
        "llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": "It is red.",
    },
}  # fmt: skip
TAU_BENCH = {
    "task_id": 3, "trial": 1, "reward": 0.0,
    "info": {"task": {
        "user_id": "ada", "instruction": "Have A1 read.", "outputs": ["blue"],
        "actions": [{"name": "read", "kwargs": {"id": "A2"}}, {"name": "respond", "kwargs": {"content": "blue"}}],
    }},
    "traj": [
        {"role": "user", "content": "Read A1."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}},
            {"id": "never", "type": "function", "function": {"name": "erase", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "c", "name": "read", "content": "red"},
        {"role": "assistant", "content": "It is red."},
    ],
}  # fmt: skip
ROWS = {
    "tau-bench": TAU_BENCH,
    "verifiers": VERIFIERS,
    "NeMo Gym": NEMO_GYM,
    "Anthropic": ANTHROPIC,
    "AgentDojo": AGENTDOJO,
}
SPANS = {
    "GenAI": GEN_AI,
    "OpenInference": INFERENCE,
    "OpenLLMetry": {**INFERENCE, "attributes": {
        name.replace("llm.input_messages", "gen_ai.prompt").replace("llm.output_messages", "gen_ai.completion")
        .replace(".message.", ".").replace("tool_call.function.", ""): value
        for name, value in INFERENCE["attributes"].items()
    }},
    "OTLP": {"resourceSpans": [{"scopeSpans": [{"spans": [{
        "traceId": "t",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in GEN_AI["attributes"].items()],
    }]}]}]},
}  # fmt: skip


def dialogue(logs: Logs) -> list[tuple[str, object]]:
    """Return (role, text or calls) of each message of the only rollout."""
    [rollout] = logs.rollouts
    return [
        (message["role"], [call["function"] for call in message.get("tool_calls", [])] or message["content"])
        for message in rollout.messages
    ]


EXPECTED = [
    ("user", "Read A1."),
    ("assistant", [{"name": "read", "arguments": {"id": "A1"}}]),
    ("tool", "red"),
    ("assistant", "It is red."),
]


@pytest.mark.parametrize("layout", ["lines", "array", "document"])
@pytest.mark.parametrize("name", ROWS)
def test_formats_of_rows_are_detected_in_every_layout(name: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.jsonl" if layout == "lines" else "a.json")
    text = json.dumps([ROWS[name]] if layout == "array" else ROWS[name], indent=None if layout == "lines" else 1)
    path.write_text(text + "\n")
    logs = read_logs([path])
    assert dialogue(logs) == EXPECTED
    assert [rollout.outcome for rollout in logs.rollouts] == ["failed"]
    assert [tool["function"]["name"] for tool in logs.tools] == ["read"]


def test_a_tau_bench_row_has_its_reference_and_a_fault_is_no_failure(tmp_path: Path) -> None:
    refused = {"role": "tool", "tool_call_id": "c", "name": "read", "content": "Error: no such record"}
    late = {**TAU_BENCH, "task_id": 4, "info": {"error": "Traceback\nTimeout: slow"}}
    rows = [{**TAU_BENCH, "traj": [*TAU_BENCH["traj"][:2], refused]}, late, {**late, "traj": []}]
    rows.append({**TAU_BENCH, "info": {}})
    (tmp_path / "a.json").write_text(json.dumps(rows))
    logs = read_logs([tmp_path / "a.json"])
    first, fault = logs.rollouts
    assert (first.task.id, first.trial, first.messages[-1]["error"]) == ("chat/3", 1, True)
    assert first.task.data["script"] == "Have A1 read."
    calls = [call["function"] for message in first.reference for call in message.get("tool_calls", [])]
    assert calls == [{"name": "read", "arguments": {"id": "A2"}}]
    assert first.reference[-1]["informs"] == ["blue"]
    assert (fault.outcome, fault.score) == ("error", None) and "Timeout: slow" in (fault.error or "")
    reasons = [skipped.reason for skipped in logs.skipped]
    assert reasons == ["it ended before the first message: Timeout: slow", "its info has no task"]


def test_a_trajectory_takes_its_reward_from_the_result_beside_it(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/trajectory.json").write_text(json.dumps(ATIF))
    (tmp_path / "result.json").write_text(
        json.dumps({"task_name": "t", "verifier_result": {"rewards": {"reward": 1.0}}})
    )
    logs = read_logs([tmp_path / "agent/trajectory.json"])
    assert dialogue(logs) == EXPECTED
    assert [(rollout.outcome, rollout.task.id) for rollout in logs.rollouts] == [("passed", "chat/t")]


@pytest.mark.parametrize("name", SPANS)
def test_spans_take_their_rewards_from_a_table_of_scores(name: str, tmp_path: Path) -> None:
    path, scores = tmp_path / "spans.jsonl", tmp_path / "scores.csv"
    path.write_text(json.dumps(SPANS[name]) + "\n")
    scores.write_text("trace_id,reward\nt,1\n")
    logs = read_logs([path], scores)
    assert dialogue(logs) == EXPECTED and [rollout.outcome for rollout in logs.rollouts] == ["passed"]
    with pytest.raises(UserError, match=r"no outcome found(.|\n)*--scores FILE, (.|\n)*\ntrace_id,reward\nt,1"):
        read_logs([path])
    scores.write_text("trace_id,reward\nother,1\n")
    with pytest.raises(UserError, match=r"correct the file of --scores, (.|\n)*\ntrace_id,reward\nt,1"):
        read_logs([path], scores)
    scores.write_text("id,value\nt,1\n")
    with pytest.raises(UserError, match="trace_id,reward"):
        read_logs([path], scores)


@pytest.mark.parametrize("scored", ["0x{}", "{}", "0X{}"])
@pytest.mark.parametrize("named", ["{}", "0x{}"])
def test_trace_ids_match_with_and_without_prefix_in_either_case(scored: str, named: str, tmp_path: Path) -> None:
    trace, spans = "00f067aa0ba902b700f067aa0ba902b7", json.dumps(SPANS["OTLP"])
    (tmp_path / "spans.jsonl").write_text(spans.replace('"t"', json.dumps(named.format(trace))) + "\n")
    (tmp_path / "scores.csv").write_text(f"trace_id,reward\n{scored.format(trace.upper())},1\n")
    logs = read_logs([tmp_path / "spans.jsonl"], tmp_path / "scores.csv")
    assert [rollout.outcome for rollout in logs.rollouts] == ["passed"]


def rollout(number: int, *, passed: bool) -> Rollout:
    call = {"type": "function", "id": "c", "function": {"name": "read", "arguments": {"id": "A1"}}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "read", "tool_call_id": "c", "content": "red"},
        {"role": "assistant", "content": "It is red."},
    ]
    return Rollout(
        id=f"r{number}", environment="desk", task=Task(id=f"t{number}", split="discovery", data={}), trial=0,
        purpose="diagnosis", policy="p", messages=messages, reference=[messages[1]],
        score=Score(reward=float(passed), success=passed), outcome="passed" if passed else "failed",
    )  # fmt: skip


def test_an_inspect_export_is_read_back_with_its_reference(tmp_path: Path) -> None:
    publish(tmp_path / "rollouts.jsonl", [rollout(0, passed=False)])
    [log] = export_rollouts([tmp_path / "rollouts.jsonl"], "inspect", tmp_path / "logs")
    logs = read_logs([log])
    assert dialogue(logs) == EXPECTED and [entry.outcome for entry in logs.rollouts] == ["failed"]
    [entry] = logs.rollouts
    assert entry.reference[0]["tool_calls"][0]["function"] == {"name": "read", "arguments": {"id": "A1"}}


@pytest.mark.parametrize("suffix", ["eval", "json"])
def test_a_log_written_by_inspect_is_read(suffix: str, tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log, write_eval_log

    publish(tmp_path / "rollouts.jsonl", [rollout(0, passed=True)])
    [log] = export_rollouts([tmp_path / "rollouts.jsonl"], "inspect", tmp_path / "logs")
    write_eval_log(read_eval_log(str(log)), str(tmp_path / f"own.{suffix}"))
    logs = read_logs([tmp_path / f"own.{suffix}"])
    assert dialogue(logs) == EXPECTED and [entry.outcome for entry in logs.rollouts] == ["passed"]


def test_a_bare_list_of_simulations_is_read_without_its_tasks(tmp_path: Path) -> None:
    simulations = json.loads((Path(__file__).parents[1] / "logs/library.json").read_text())["simulations"]
    (tmp_path / "a.json").write_text(json.dumps(simulations))
    logs = read_logs([tmp_path / "a.json"])
    assert len(logs.rollouts) == len(simulations) and not any(entry.reference for entry in logs.rollouts)


def test_a_file_with_mostly_unreadable_entries_is_refused(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "narrator", "content": "Hello"}], "reward": 1}] * 12
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"messages": ASKED, "reward": 1}, *rows]))
    with pytest.raises(
        UserError, match=r"read as chat JSONL: 12 of 13 entries cannot be read(.|\n)*has no role(.|\n)*role"
    ):
        read_logs([path])


@pytest.mark.parametrize("reference", [[{"role": "user", "content": "x"}], [{"role": "assistant", "tool_calls": [1]}]])
def test_an_invalid_reference_is_refused(reference: object, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": ASKED, "reward": 1, "reference": reference}) + "\n")
    with pytest.raises(UserError, match="its reference"):
        read_logs([path])


WRITTEN = Path(__file__).parents[1] / "logs/written"
"""Logs of a scripted model that the named version of a library wrote."""
READS = ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("name", "task", "model", "outcomes", "roles", "tools"),
    [
        ("verifiers-0.4.0.jsonl", "record_selection/training/00000", "scripted", ["passed", "failed"],
         READS[:3] + READS[3:] * 2, 8),
        ("agentdojo-0.1.35-good.json", "banking-user_task_3", "good", ["passed"], READS[:3] + READS[3:] * 2, 2),
        ("agentdojo-0.1.35-bad.json", "banking-user_task_3", "bad", ["failed"], READS[:3] + READS[3:] * 2, 2),
        ("harbor-0.25.0", "read-a1", "m-1", ["failed"], READS, 1),
        ("openinference-instrumentation-openai-0.1.66.jsonl", "0x05ad", "m-1", ["failed", "passed"], READS, 1),
        ("opentelemetry-instrumentation-openai-0.62.4.jsonl", "0xd419", "m-1", ["failed", "passed"], READS, 1),
    ],
)  # fmt: skip
def test_files_written_by_the_libraries_are_read(
    name: str, task: str, model: str, outcomes: list[str], roles: list[str], tools: int, tmp_path: Path
) -> None:
    scores = None
    if name.startswith("open"):
        rows = [json.loads(line) for line in (WRITTEN / name).read_text().splitlines()]
        scores = tmp_path / "scores.csv"
        traces = dict.fromkeys(row["context"]["trace_id"] for row in rows)
        scores.write_text("trace_id,reward\n" + "".join(f"{trace},{at}\n" for at, trace in enumerate(traces)))
    logs = read_logs([WRITTEN / name], scores)
    rollouts = [*logs.rollouts]
    assert [rollout.outcome for rollout in rollouts] == outcomes and not logs.unread
    assert rollouts[0].task.id.startswith(f"chat/{task}") and {rollout.policy for rollout in rollouts} == {model}
    assert [message["role"] for message in rollouts[0].messages] == roles and len(logs.tools) == tools


def test_results_of_adks_evaluation_have_the_expected_calls_and_scores() -> None:
    logs = read_logs([WRITTEN / "google-adk-2.13.0.evalset_result.json"])
    rollouts = [*logs.rollouts]
    assert [(rollout.task.id, rollout.trial, rollout.outcome) for rollout in rollouts] == [
        ("chat/rome", 0, "passed"), ("chat/rome", 1, "failed"), ("chat/oslo", 0, "passed"),
    ]  # fmt: skip
    assert [skipped.reason for skipped in logs.skipped] == ["ADK did not evaluate this case"]
    failed = rollouts[1]
    assert [message["role"] for message in failed.messages] == ["user", "assistant", "tool", "assistant"]
    assert calls_of(failed.messages[1]) == [("get_weather", {"city": "Roma"})]
    assert [calls_of(message) for message in failed.reference] == [[("get_weather", {"city": "Rome"})]]
    assert failed.task.facts.grading == "tool_trajectory_avg_score 0"
    assert failed.task.data["expected"] == {"expected": "It is 20 degrees."}


def test_an_eval_set_of_adk_is_refused_alone_and_passed_over_in_the_folder_of_its_results(tmp_path: Path) -> None:
    cases = WRITTEN / "google-adk-2.13.0.evalset.json"
    with pytest.raises(UserError, match=r"holds only the expected conversations(.|\n)*evalset_result\.json"):
        read_logs([cases])
    document = json.loads(cases.read_text())
    (tmp_path / cases.name).write_text(json.dumps({**document, "eval_cases": document["eval_cases"] * 12}))
    results = WRITTEN / "google-adk-2.13.0.evalset_result.json"
    (tmp_path / results.name).write_text(results.read_text())
    logs = read_logs([tmp_path])
    assert len(logs.rollouts) == 3 and [skipped.source for skipped in logs.skipped] == [results.name]


def test_tools_that_were_never_called_are_listed(tmp_path: Path) -> None:
    name = "openinference-instrumentation-openai-0.1.66.jsonl"
    text = (WRITTEN / name).read_text().replace('\\"name\\": \\"read\\", \\"desc', '\\"name\\": \\"peek\\", \\"desc')
    (tmp_path / name).write_text(text)
    scores = tmp_path / "scores.csv"
    scores.write_text("trace_id,reward\n0x05ad2887335066a090dd85bf680a7fd2,1\n")
    assert {tool["function"]["name"] for tool in read_logs([tmp_path / name], scores).tools} == {"read", "peek"}


def test_the_last_transition_of_nemo_gym_is_read(tmp_path: Path) -> None:
    output = NEMO_GYM["response"]["output"]
    transitions = [[*ASKED, *output[:2]], [*ASKED, *output]]
    row = {**NEMO_GYM, "response": {"output": transitions}, "_ng_task_index": 4, "_ng_rollout_index": 2, "id": 1}
    row["responses_create_params"] = {**NEMO_GYM["responses_create_params"], "input": []}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    [rollout] = read_logs([tmp_path / "a.jsonl"]).rollouts
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert (rollout.task.id, rollout.trial) == ("chat/4", 2)


def test_chats_of_different_files_share_no_task_by_line_number(tmp_path: Path) -> None:
    for name, words in (("a", "Read A1."), ("b", "Cook an egg.")):
        rows = [{"messages": [{"role": "user", "content": words}], "reward": reward} for reward in (0, 1)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rollouts = [*read_logs([tmp_path]).rollouts]
    assert len({rollout.task.id for rollout in rollouts}) == len(rollouts) == 4


BFCL = WRITTEN / "bfcl-eval-2026.3.23"
PLAYED = ["passed", "failed", "failed"]


def test_bfcl_results_and_scores_are_read_together_whichever_is_named() -> None:
    [results, prompted], [scores, _] = sorted(BFCL.glob("result/*/*/*")), sorted(BFCL.glob("score/*/*/*"))
    assert [rollout.outcome for rollout in read_logs([BFCL]).rollouts] == PLAYED * 2
    for paths in ([results], [scores], [results, scores], [results.parents[1]]):
        rollouts = [*read_logs(paths).rollouts]
        assert [rollout.outcome for rollout in rollouts] == PLAYED
        assert {rollout.policy for rollout in rollouts} == {results.parents[1].name}
    # A prompted model writes its calls as text.
    assert [rollout.messages for rollout in rollouts] == [
        rollout.messages for rollout in read_logs([prompted]).rollouts
    ]


def test_the_bfcl_reference_is_the_rollout_itself_or_the_gold_calls() -> None:
    passed, shortened, slipped = read_logs(sorted(BFCL.glob("result/*/*/*"))[:1]).rollouts
    assert [calls_of(message) for message in passed.reference] == [
        calls_of(message) for message in passed.messages if message.get("tool_calls")
    ]
    assert len(shortened.reference) == 1 + sum(len(calls_of(message)) for message in shortened.messages)
    gold = [call for message in slipped.reference for call in calls_of(message)]
    played = [call for message in slipped.messages if message["role"] == "assistant" for call in calls_of(message)]
    assert gold[0] != played[0] and gold[1:] == played[1:]
    assert slipped.messages[2]["content"] and slipped.messages[2]["role"] == "tool"


def test_bfcl_results_with_missing_or_wrong_scores_are_refused(tmp_path: Path) -> None:
    [results, _], [scores, _] = sorted(BFCL.glob("result/*/*/*")), sorted(BFCL.glob("score/*/*/*"))
    alone = tmp_path / results.name
    alone.write_text(results.read_text())
    with pytest.raises(UserError, match="there is no score file to it: run `bfcl evaluate`"):
        read_logs([alone])
    beside = tmp_path / scores.name
    beside.write_text(scores.read_text())
    assert [rollout.outcome for rollout in read_logs([tmp_path]).rollouts] == PLAYED
    alone.write_text("".join(results.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match="it has 2 results, and its scores are of 3"):
        read_logs([alone])
    beside.write_text("".join(scores.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match="lists 1 failure, and its first line counts others"):
        read_logs([alone])


def test_single_turn_bfcl_failures_have_question_gold_calls_and_the_graders_words(tmp_path: Path) -> None:
    results = [{"id": f"simple_python_{n}", "result": f"[area(base={n}, unit='cm')]", "latency": 1} for n in (0, 1)]
    failure = {
        "id": "simple_python_1", "model_name": "m", "error": ["wrong base"], "error_type": "value_error",
        "prompt": {"question": [[{"role": "user", "content": "What is the area?"}]], "function": []},
        "possible_answer": [{"area": {"base": [10, 10.0], "unit": ["cm", ""]}}],
    }  # fmt: skip
    header = {"accuracy": 0.5, "correct_count": 1, "total_count": 2}
    (tmp_path / "a_result.json").write_text("".join(json.dumps(row) + "\n" for row in results))
    (tmp_path / "a_score.json").write_text("".join(json.dumps(row) + "\n" for row in (header, failure)))
    passed, failed = read_logs([tmp_path / "a_result.json"]).rollouts
    assert (passed.outcome, failed.outcome) == ("passed", "failed")
    assert failed.messages[0]["content"] == "What is the area?"
    assert calls_of(failed.messages[1]) == [("area", {"base": 1, "unit": "cm"})]
    assert calls_of(failed.reference[0]) == [("area", {"base": 10})]
    assert (failed.task.facts.grading, failed.task.facts.ending) == ("value_error: wrong base", "")


def test_results_of_bfcl_version_1_are_numbered_from_0_and_their_scores_from_1(tmp_path: Path) -> None:
    results = [{"idx": n, "result": f"[area(base={n})]", "latency": 1} for n in (0, 1)]
    failure = {
        "id": 2, "model_name": "m", "error": ["wrong base"], "error_type": "value_error",
        "prompt": {"question": "What is the area?", "function": {}}, "possible_answer": {"area": {"base": [10]}},
    }  # fmt: skip
    header = {"accuracy": 0.5, "correct_count": 1, "total_count": 2}
    path, scores = tmp_path / "gorilla_openfunctions_v1_test_simple_result.json", tmp_path / "simple_score.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in results))
    scores.write_text("".join(json.dumps(row) + "\n" for row in (header, failure)))
    for named in (path, scores):
        passed, failed = read_logs([named]).rollouts
        assert [(passed.task.id, passed.outcome), (failed.task.id, failed.outcome)] == [
            ("bfcl/simple_0", "passed"), ("bfcl/simple_1", "failed"),
        ]  # fmt: skip
        assert failed.messages[0]["content"] == "What is the area?"
        assert calls_of(failed.reference[0]) == [("area", {"base": 10})]


def test_a_numbered_chat_with_a_result_and_latency_is_not_bfcls(tmp_path: Path) -> None:
    row = {"idx": 0, "messages": ASKED, "result": "passed", "latency": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert [entry.outcome for entry in read_logs([tmp_path / "a.jsonl"], choices=Choices("result")).rollouts] == [
        "passed"
    ]


def test_bfcl_scores_of_another_run_are_refused(tmp_path: Path) -> None:
    header = {"accuracy": 0, "correct_count": 0, "total_count": 1}
    (tmp_path / "a_result.json").write_text(json.dumps({"id": "a_0", "result": "[f()]", "latency": 1}) + "\n")
    (tmp_path / "a_score.json").write_text(f'{json.dumps(header)}\n{{"id": "a_7", "error_type": "x"}}\n')
    with pytest.raises(UserError, match="its scores list a_7, which the results lack"):
        read_logs([tmp_path / "a_result.json"])


def toolbench_answer(query: str, layout: str) -> dict[str, Any]:
    """Return an answer of ToolBench: of a search that ended with an answer, with a tree, or with tries in a chain."""
    chain = [
        {"node_type": "Action", "description": "read"},
        {"node_type": "Action Input", "description": ARGUMENTS, "observation": "red"},
        {"node_type": "Thought", "description": "It is red."},
    ]
    tree: dict[str, Any] = {"node_type": "Action Input", "description": "", "children": []}
    for node in reversed(chain):
        tree = {**node, "children": [tree] if tree["description"] else []}
    asked = {"role": "user", "content": query}
    call = {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": ARGUMENTS}}
    seen = [{"role": "function", "name": "read", "content": "red"}, {"role": "assistant", "content": "It is red."}]
    search = {"query": query, "function": [TOOL], "valid_data": False}
    if layout == "messages":
        return {"win": False, SEARCH: {**search, "train_messages": [[asked, call], [asked, call, *seen]]}}
    held = {"trys": [{"chain": []}, {"chain": chain}]} if layout == "chain" else {
        "tree": {"tree": {"node_type": "Action Input", "description": "", "children": [{**tree, "children": []}, tree]}}
    }  # fmt: skip
    return {"win": False, **held, SEARCH: search}


@pytest.mark.parametrize("layout", ["messages", "tree", "chain"])
def test_an_answer_of_toolbench_is_its_last_path_and_queries_with_one_number_are_two_tasks(
    layout: str, tmp_path: Path
) -> None:
    for folder, query in (("G1", "Read A1."), ("G2", "Cook an egg.")):
        (tmp_path / folder).mkdir()
        text = json.dumps(toolbench_answer(query, layout))
        (tmp_path / folder / "10_DFS_woFilter_w2.json").write_text(text)
    first = read_logs([tmp_path / "G1"], choices=Choices("win"))
    assert dialogue(first) == EXPECTED and [tool["function"]["name"] for tool in first.tools] == ["read"]
    rollouts = [*read_logs([tmp_path], choices=Choices("win")).rollouts]
    assert len({rollout.task.id for rollout in rollouts}) == 2
    (tmp_path / "scores.csv").write_text("id,reward\n10,1\n")
    assert [rollout.outcome for rollout in read_logs([tmp_path / "G1"], tmp_path / "scores.csv").rollouts] == ["passed"]


@pytest.mark.needs("bfcl")
def test_the_installed_bfcl_eval_writes_the_files_that_are_read(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("drivers") / "bfcl_driver.py"
    subprocess.run([interpreter("bfcl"), driver, tmp_path], check=True, capture_output=True, timeout=PATIENCE)
    for path in (file for file in BFCL.rglob("*") if file.is_file()):
        assert (tmp_path / path.relative_to(BFCL)).read_bytes() == path.read_bytes()
