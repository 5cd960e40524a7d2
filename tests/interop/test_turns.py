"""Dialogues in other tools' notations: the same question, call, result and answer are read from each of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.contract import calls_of
from captrain.interop import read_logs
from captrain.records import Rollout

Row = dict[str, Any]
CALL, ANSWER = {"name": "read", "args": {"id": "A1"}}, "It is red."
ASKED = {"role": "user", "content": "Read A1."}
SAID = {"role": "assistant", "content": ANSWER}
CALLED = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"id": "A1"}'}}
SPOKEN = [("user", "Read A1."), ("assistant", [("read", {"id": "A1"})]), ("tool", "red"), ("assistant", ANSWER)]


def spoken(rollout: Rollout) -> list[object]:
    return [(message["role"], calls_of(message) or message["content"]) for message in rollout.messages]


PYDANTIC_AI = [
    {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "Read A1."}]},
    {
        "kind": "response",
        "parts": [{"part_kind": "tool-call", "tool_name": "read", "args": '{"id": "A1"}', "tool_call_id": "c1"}],
    },
    {"kind": "request", "parts": [{"part_kind": "tool-return", "tool_name": "read", "content": "red"}]},
    {"kind": "response", "parts": [{"part_kind": "text", "content": ANSWER}]},
]
LETTA = [
    {"message_type": "user_message", "content": "Read A1."},
    {"message_type": "reasoning_message", "reasoning": "look"},
    {"message_type": "tool_call_message", "tool_call": {"name": "read", "arguments": '{"id": "A1"}'}},
    {"message_type": "tool_return_message", "tool_return": "red", "status": "success"},
    {"message_type": "assistant_message", "content": ANSWER},
]
BEDROCK = [
    {"role": "user", "content": [{"text": "Read A1."}]},
    {"role": "assistant", "content": [{"toolUse": {"toolUseId": "c", "name": "read", "input": {"id": "A1"}}}]},
    {"role": "user", "content": [{"toolResult": {"toolUseId": "c", "content": [{"text": "red"}]}}]},
    {"role": "assistant", "content": [{"text": ANSWER}]},
]
GEMINI_CLI = [
    {"type": "user", "content": "Read A1."},
    {
        "type": "gemini",
        "content": "",
        "toolCalls": [{**CALL, "result": [{"functionResponse": {"name": "read", "response": {"output": "red"}}}]}],
    },
    {"type": "gemini", "content": ANSWER},
]
OPENCODE = [
    {"info": {"role": "user"}, "parts": [{"type": "text", "text": "Read A1."}]},
    {
        "info": {"role": "assistant"},
        "parts": [
            {"type": "step-start"},
            {"type": "tool", "tool": "read", "state": {"status": "completed", "input": {"id": "A1"}, "output": "red"}},
        ],
    },
    {"info": {"role": "assistant"}, "parts": [{"type": "text", "text": ANSWER}]},
]
GOOSE = [
    {"role": "user", "content": [{"type": "text", "text": "Read A1."}]},
    {
        "role": "assistant",
        "content": [{"type": "toolRequest", "toolCall": {"value": {"name": "read", "arguments": {"id": "A1"}}}}],
    },
    {"role": "user", "content": [{"type": "toolResponse", "toolResult": {"value": [{"type": "text", "text": "red"}]}}]},
    {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
]
ADK = [
    {"author": "user", "content": {"role": "user", "parts": [{"text": "Read A1."}]}},
    {"author": "desk", "content": {"role": "model", "parts": [{"functionCall": CALL}]}},
    {"author": "desk", "content": {"role": "user", "parts": [{"functionResponse": {"response": {"result": "red"}}}]}},
    {"author": "desk", "content": {"role": "model", "parts": [{"text": ANSWER}]}},
]
HOME_MADE = [
    {"speaker": "Customer", "utterance": "Read A1."},
    {"speaker": "bot", "tool_calls": [CALL]},
    {"speaker": "tool", "utterance": "red"},
    {"speaker": "bot", "utterance": ANSWER},
]
SEMANTIC_KERNEL = [
    {"role": "user", "items": [{"content_type": "text", "text": "Read A1."}]},
    {"role": "assistant", "items": [{"content_type": "function_call", "name": "read", "arguments": '{"id": "A1"}'}]},
    {"role": "tool", "items": [{"content_type": "function_result", "name": "read", "result": "red"}]},
    {"role": "assistant", "items": [{"content_type": "text", "text": ANSWER}]},
]
LLAMA_INDEX = [
    {"role": "user", "additional_kwargs": {}, "blocks": [{"block_type": "text", "text": "Read A1."}]},
    {"role": "assistant", "additional_kwargs": {"tool_calls": [CALLED]}, "blocks": [{"text": ""}]},
    {"role": "tool", "additional_kwargs": {"tool_call_id": "c1"}, "blocks": [{"block_type": "text", "text": "red"}]},
    {"role": "assistant", "additional_kwargs": {}, "blocks": [{"block_type": "text", "text": ANSWER}]},
]
ELEVEN_LABS = [
    {"role": "user", "message": "Read A1.", "tool_calls": [], "tool_results": []},
    {
        "role": "agent",
        "message": None,
        "tool_calls": [{"type": "webhook", "tool_name": "read", "params_as_json": '{"id": "A1"}'}],
        "tool_results": [{"type": "webhook", "tool_name": "read", "result_value": "red", "is_error": False}],
    },
    {"role": "agent", "message": ANSWER, "tool_calls": [], "tool_results": []},
]
RETELL = [
    {"role": "user", "content": "Read A1."},
    {"role": "tool_call_invocation", "tool_call_id": "c1", "name": "read", "arguments": '{"id": "A1"}'},
    {"role": "tool_call_result", "tool_call_id": "c1", "content": "red"},
    {"role": "agent", "content": ANSWER},
]
VAPI = [
    {"role": "user", "message": "Read A1.", "time": 1},
    {"role": "tool_calls", "message": "", "toolCalls": [CALLED], "time": 2},
    {"role": "tool_call_result", "name": "read", "toolCallId": "c1", "result": "red", "time": 3},
    {"role": "bot", "message": ANSWER, "time": 4},
]
API_BANK = [
    {"role": "User", "text": "Read A1."},
    {"role": "API", "api_name": "read", "param_dict": {"id": "A1"}, "result": {"output": "red", "exception": None}},
    {"role": "AI", "text": ANSWER},
]
CHOICES = [
    {"message": {"role": "user", "content": "Read A1."}},
    {"message": {"role": "assistant", "content": "", "toolCalls": [CALLED]}},
    {"message": {"role": "tool", "content": "red"}},
    {"message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"},
]
NEWEST_FIRST = [
    {
        "created_at": 2e9 - place,
        "role": role,
        "content": [{"type": "text", "text": {"value": text}}],
        "tool_calls": calls,
    }
    for place, (role, text, calls) in enumerate(
        [("assistant", ANSWER, []), ("tool", "red", []), ("assistant", "", [CALLED]), ("user", "Read A1.", [])]
    )
]
NOTATIONS = {
    "pydantic-ai": PYDANTIC_AI, "Letta": LETTA, "Bedrock": BEDROCK, "Gemini CLI": GEMINI_CLI, "OpenCode": OPENCODE,
    "goose": GOOSE, "ADK": ADK, "home-made": HOME_MADE, "Semantic Kernel": SEMANTIC_KERNEL, "LlamaIndex": LLAMA_INDEX,
    "ElevenLabs": ELEVEN_LABS, "Retell": RETELL, "Vapi": VAPI, "API-Bank": API_BANK, "choices": CHOICES,
    "newest first": NEWEST_FIRST,
}  # fmt: skip


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("place", ["messages", "events", "file"])
def test_turns_of_any_notation_are_read(name: str, place: str, tmp_path: Path) -> None:
    log, scores = tmp_path / "log.json", tmp_path / "scores.csv"
    turns = NOTATIONS[name]
    log.write_text(json.dumps(turns if place == "file" else {"task_id": "log", place: turns}))
    scores.write_text("task_id,reward\nlog,0\n")
    [rollout] = read_logs([log], scores).rollouts
    assert spoken(rollout) == SPOKEN and rollout.outcome == "failed"


FIRST = {"messages": [ASKED]}
SECOND = {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]},
                       {"role": "tool", "tool_call_id": "c1", "content": "red"}]}  # fmt: skip
REPLIES = [{"choices": [{"message": {"role": "assistant", "content": text}}]} for text in ("", ANSWER)]
PHOENIX = {
    "context.trace_id": "t1",
    "attributes.llm.input_messages": [{"message.role": "user", "message.content": "Read A1."}],
    "attributes.llm.output_messages": [{"message.role": "assistant", "message.content": ANSWER}],
}


@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        (
            [
                {"object": "trace", "id": "t1", "workflow_name": "w"},
                {"object": "trace.span", "trace_id": "t1", "span_data": {"type": "agent", "name": "a"}},
                {
                    "trace_id": "t1",
                    "span_data": {"type": "generation", "input": SECOND["messages"], "output": [SAID]},
                },
                {"trace_id": "t1", "span_data": {"type": "function", "name": "read", "input": "{}", "output": "red"}},
            ],
            SPOKEN,
        ),
        ([{"trace_id": "t1", "inputs": SECOND, "output": REPLIES[1]}], SPOKEN),
        ([PHOENIX], [SPOKEN[0], SPOKEN[-1]]),
        ([{"input": FIRST, "output": REPLIES[0]}, {"input": SECOND, "output": REPLIES[1]}], SPOKEN),
        ([{"op_name": "chat", "trace_id": name, "weave_task_id": "t1", "attributes": {}, "inputs": call,
           "output": reply}
          for name, call, reply in (("a", FIRST, REPLIES[0]), ("b", SECOND, REPLIES[1]))], SPOKEN),
        ([{"session_id": "t1", **call, "response": reply, "status": "success"}
          for call, reply in ((FIRST, REPLIES[0]), (SECOND, REPLIES[1]))], SPOKEN),
        ([{"session_id": "t1", "request": json.dumps(call), "response": json.dumps(reply)}
          for call, reply in ((FIRST, REPLIES[0]), (SECOND, REPLIES[1]))], SPOKEN),
    ],
)  # fmt: skip
def test_calls_of_a_model_are_joined_by_their_trace_or_file(
    rows: list[Row], messages: list[object], tmp_path: Path
) -> None:
    log, scores = tmp_path / "t1.jsonl", tmp_path / "scores.csv"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores.write_text("trace_id,reward\nt1,1\n")
    [rollout] = read_logs([log], scores).rollouts
    assert spoken(rollout) == messages


def test_numbered_steps_of_a_file_are_one_run_whose_score_stands_beside_it(tmp_path: Path) -> None:
    for name, score in (("one", "1.0\n"), ("two", "0.0\n")):
        steps = [{"step_num": number, "action": f"click({number})", "response": "I click."} for number in (1, 2)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "traj.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        (tmp_path / name / "result.txt").write_text(score)
    logs = read_logs([tmp_path])
    assert [(rollout.task.id, rollout.outcome) for rollout in logs.rollouts] == [
        ("chat/one", "passed"), ("chat/two", "failed"),
    ]  # fmt: skip
    assert [message["content"] for message in next(iter(logs.rollouts)).messages] == ["I click.", "I click."]


@pytest.mark.parametrize(
    ("document", "remedy"),
    [
        ("#### mend it\n\nI mended it.\n", "a transcript in Markdown or plain text holds no calls"),
        ({"results": [{"execution_results": [{"tool": "a", "parameters": {"q": 1}}]}] * 2},
         "add --messages execution_results"),
        ({"results": [{"execution_results": [{"tool": "a", "parameters": {"q": 1}, "result": "b"}]}] * 2},
         "--scores FILE"),
        ([{"type": "user", "name": name, "text": "likes tea a lot"} for name in "ab"], "docs/formats.md"),
        ([{"type": "PushEvent", "actor": {"login": name}} for name in "ab"], "docs/formats.md"),
        ([{"step": step, "action": "click", "result": "ok", "task_id": f"t{step}"} for step in (1, 2)],
         "docs/formats.md"),
        ([{"speaker": "Ann", "utterance": "Read A1."}, {"speaker": "Ben", "utterance": ANSWER}], "docs/formats.md"),
    ],
)  # fmt: skip
def test_what_no_rule_reads_is_refused_with_what_to_type(document: object, remedy: str, tmp_path: Path) -> None:
    log = tmp_path / "log.md"
    log.write_text(document if isinstance(document, str) else json.dumps(document))
    done = CliRunner().invoke(app, ["diagnose", str(log), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and remedy in str(done.exception)


def test_calls_that_are_texts_of_json_are_no_foreign_turn(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [json.dumps(CALLED)]}
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"turns": [ASKED, said, {"role": "tool", "content": "red"}, SAID], "reward": 1}))
    [rollout] = read_logs([log]).rollouts
    assert spoken(rollout) == SPOKEN


@pytest.mark.parametrize(
    ("times", "is_reversed"),
    [
        (["9:59", "10:00"], False),
        (["12/31/2024 23:59", "01/01/2025 00:00"], False),
        (["31.12.2024", "01.01.2025"], False),
        (["Tuesday", "Monday"], False),
        ([3.5, 0.2], False),
        (["2024-12-31T23:59:00Z", "2025-01-01 00:00:00"], False),
        (["2025-01-01T00:00:01.5Z", "2025-01-01T00:00:01Z"], True),
        ([1_700_000_001, 1_700_000_000], True),
    ],
)
@pytest.mark.parametrize("is_newest_first", [True, False])
def test_messages_are_reversed_only_if_their_times_and_speakers_both_say_so(
    times: list[object], is_reversed: bool, is_newest_first: bool, tmp_path: Path
) -> None:
    turns = [SAID, ASKED] if is_newest_first else [ASKED, SAID]
    rows = [{**turn, "time": time} for turn, time in zip(turns, times, strict=True)]
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"messages": rows, "reward": 1}))
    [rollout] = read_logs([log]).rollouts
    said = [(turn["role"], turn["content"]) for turn in turns]
    assert spoken(rollout) == (said[::-1] if is_reversed and is_newest_first else said)
