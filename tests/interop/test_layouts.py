"""Rows in other tools' layouts: the same question, call, result and answer are read from each, with the outcome."""

import json
from pathlib import Path
from time import process_time

import pytest

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop import read_logs
from captrain.interop.logs.outcomes import Choices
from captrain.records import JsonObject as Row

ASKED, ANSWER = "Read A1.", "It is red."
QUESTION, SAID = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}
SPOKEN = [("user", ASKED), ("assistant", [("read", {"id": "A1"})]), ("tool", "red"), ("assistant", ANSWER)]
CALL = {"tool": "read", "tool_input": {"id": "A1"}}
TEMPLATE = {
    "ChatML": "<|im_start|>{}\n{}<|im_end|>\n",
    "Llama 3": "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>",
}


def read(folder: Path, document: object, outcome: str = "") -> list[tuple[str, list[tuple[str, object]]]]:
    """The outcome of each rollout, with who said or called what in it."""
    log = folder / "log.json"
    log.write_text(json.dumps(document))
    logs = read_logs([log], choices=Choices(outcome))
    return [
        (rollout.outcome, [(m["role"], calls_of(m) or m["content"]) for m in rollout.messages])
        for rollout in logs.rollouts
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"input": ASKED, "output": ANSWER, "intermediate_steps": [[{**CALL, "log": ""}, "red"]]},
        {"input": ASKED, "output": ANSWER, "intermediate_steps": [[["read", '{"id": "A1"}', ""], "red"]]},
        {"query": ASKED, "answer": "the right one", "agent_thoughts": [
            {"thought": "", **CALL, "observation": "red"},
            {"thought": ANSWER, "tool": "", "tool_input": "", "observation": ""}]},
        {"input": ASKED, "actualOutput": ANSWER, "expectedOutput": "It is blue.",
         "toolsCalled": [{"name": "read", "inputParameters": {"id": "A1"}, "output": "red"}]},
        {"problem_statement": ASKED, "output": ANSWER, "trajectory_steps": [
            {"action": "<function=read>\n<parameter=id>A1</parameter>\n</function>", "observation": "red"}]},
    ],
)  # fmt: skip
def test_steps_with_results_are_read_under_any_name_with_the_question_and_the_last_words(
    row: Row, tmp_path: Path
) -> None:
    assert read(tmp_path, [{**row, "success": False}]) == [("failed", SPOKEN)]


def test_the_tools_and_the_right_calls_of_a_row_are_no_trace(tmp_path: Path) -> None:
    gold = [{"name": "read", "arguments": {"id": "A1"}, "output": "red"}]
    tools = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
    for row in ({"expected_calls": gold}, {"tools": tools}):
        with pytest.raises(UserError, match="it holds no dialogue"):
            read(tmp_path, [{"task_id": "t", **row, "success": False}])


def test_a_list_whose_objects_hold_one_field_each_is_a_trace(tmp_path: Path) -> None:
    fields = [{"Goal": ASKED}, {"Action": "read[A1]"}, {"Observation": "red"}, {"Progress Rate": 0.5}]
    row = {"trajectory": [{**field, "id": 0} for field in fields], "success": True}
    assert read(tmp_path, [row]) == [
        ("passed", [SPOKEN[0], ("assistant", [("read", {"input": "A1"})]), ("tool", "red")])
    ]


@pytest.mark.parametrize("template", TEMPLATE.values(), ids=TEMPLATE)
def test_texts_in_a_chat_template_are_taken_apart(template: str, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "read", "arguments": {"id": "A1"}}\n</tool_call>'
    result = "<tool_response>\nred\n</tool_response>"
    prompt, opening = template.format("user", ASKED), template.partition("{}")[0]
    turns = [("assistant", call), ("user", result), ("assistant", ANSWER)]
    output = "".join(template.format(*turn) for turn in turns)
    [(outcome, spoken)] = read(tmp_path, [{"input": prompt, "output": output, "gts": "red", "score": 0.0}])
    assert opening and outcome == "failed"
    assert spoken == [*SPOKEN[:2], ("tool", result), SPOKEN[3]]


@pytest.mark.parametrize(
    "document",
    [
        {"evaluations": [{"reward": 1}, {"reward": 0}], "runs": [{"messages": [QUESTION, SAID]}] * 2},
        {"evaluations": [{"reward": 1}, {"reward": 0}], "runs": [[QUESTION, SAID]] * 2},
    ],
)  # fmt: skip
def test_outcomes_that_stand_before_the_dialogues_are_not_taken_for_rows(document: Row, tmp_path: Path) -> None:
    said = [("user", ASKED), ("assistant", ANSWER)]
    assert read(tmp_path, document) == [("passed", said), ("failed", said)]


def test_a_text_as_reference_is_the_right_answer_and_no_dialogue(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"messages": [QUESTION, SAID], "reference": "blue", "reward": 0}))
    [rollout] = read_logs([tmp_path / "log.jsonl"]).rollouts
    assert rollout.task.data["expected"] == {"reference": "blue"} and rollout.reference == []


def test_numbered_messages_are_a_dialogue(tmp_path: Path) -> None:
    row = {"original_task": ASKED, "message_2": SAID, "message_1": QUESTION, "success": True}
    assert read(tmp_path, [row]) == [("passed", [("user", ASKED), ("assistant", ANSWER)])]


def test_messages_whose_texts_captrain_does_not_know_are_refused(tmp_path: Path) -> None:
    turns = [{"role": role, "body": {"words": ASKED}} for role in ("user", "assistant")]
    with pytest.raises(UserError, match="no message of its user holds a text.*role, body") as refusal:
        read(tmp_path, [{"messages": turns, "reward": 0}])
    assert '{"messages"' in refusal.value.remedy


def test_a_score_is_named_as_outcome_whatever_its_name(tmp_path: Path) -> None:
    row = {"id": "r", "input": [QUESTION], "output": [SAID], "scores": {"Factuality": 1}}
    with pytest.raises(UserError) as refusal:
        read(tmp_path, [row])
    assert refusal.value.remedy == "add --outcome scores.Factuality"
    assert read(tmp_path, [row], "scores.Factuality") == [("passed", [("user", ASKED), ("assistant", ANSWER)])]


def test_the_example_of_a_score_table_holds_when_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(f"{json.dumps({'messages': [QUESTION, SAID]})}\n" * 3)
    with pytest.raises(UserError) as refusal:
        read_logs([tmp_path / "log.jsonl"])
    (tmp_path / "scores.csv").write_text(refusal.value.remedy.partition("like this:\n")[2])
    assert len(read_logs([tmp_path / "log.jsonl"], tmp_path / "scores.csv").rollouts) == 3


def test_a_table_of_scores_that_lacks_rows_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("".join(
        json.dumps({"task_id": name, "messages": [QUESTION, SAID]}) + "\n" for name in "abc"
    ))  # fmt: skip
    (tmp_path / "scores.csv").write_text("task_id,reward\na,1\n")
    with pytest.raises(UserError) as refusal:
        read_logs([tmp_path / "log.jsonl"], tmp_path / "scores.csv")
    assert refusal.value.remedy.startswith("add a row for each rollout") and "\nb,1" in refusal.value.remedy


def test_a_result_beside_a_dialogue_is_not_reported_as_a_file_without_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "messages.json").write_text(json.dumps([QUESTION, SAID]))
        (tmp_path / name / "report.json").write_text(json.dumps({"passed": name == "one"}))
    with pytest.raises(UserError) as refusal:
        read_logs([tmp_path])
    assert "no dialogue" not in str(refusal.value) and refusal.value.remedy == "add --outcome passed"
    assert [rollout.outcome for rollout in read_logs([tmp_path], choices=Choices("passed")).rollouts] == [
        "passed", "failed",
    ]  # fmt: skip


def test_results_of_promptfoo_are_read_with_what_the_grader_says(tmp_path: Path) -> None:
    def row(number: int, output: object, **more: object) -> Row:
        prompt = {"raw": json.dumps([QUESTION]), "label": "a long text"}
        return {"testIdx": number, "promptIdx": 0, "prompt": prompt, "response": {"output": output}, **more}

    wrong = {"success": False, "failureReason": 1, "error": "not blue", "gradingResult": {"reason": "not blue"}}
    calls = [{"type": "function", "function": {"name": "read", "arguments": '{"id": "A1"}'}}]
    rows = [row(0, ANSWER, **wrong, provider="openai:m"), row(1, calls, success=True, failureReason=0),
            row(2, None, success=False, failureReason=2, error="timeout")]  # fmt: skip
    (tmp_path / "log.json").write_text(json.dumps({"evalId": "e", "results": {"version": 3, "results": rows}}))
    failed, passed, broken = read_logs([tmp_path / "log.json"]).rollouts
    assert (failed.outcome, failed.task.data["grading"], failed.error) == ("failed", "not blue", None)
    assert failed.policy.startswith("openai:m")
    assert passed.outcome == "passed" and calls_of(passed.messages[-1]) == [("read", {"id": "A1"})]
    assert (broken.outcome, broken.error) == ("error", "timeout")


def test_records_of_openai_s_evals_are_joined_by_sample(tmp_path: Path) -> None:
    event = {"run_id": "r", "event_id": 0, "sample_id": "s.1"}
    rows = [
        {"spec": {"eval_name": "e"}},
        {**event, "type": "sampling", "data": {"prompt": [QUESTION], "sampled": [ANSWER]}},
        {**event, "type": "match", "data": {"correct": False, "expected": "blue", "picked": "red"}},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [rollout] = read_logs([tmp_path / "log.jsonl"]).rollouts
    assert (rollout.task.id, rollout.outcome) == ("chat/s.1", "failed")
    assert [message["content"] for message in rollout.messages] == [ASKED, ANSWER]


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_trace_of_a_bedrock_agent_is_one_dialogue(wrapped: bool, tmp_path: Path) -> None:
    request = {"text": json.dumps({"system": "Read.", "messages": [QUESTION]})}
    given = {"function": "read", "parameters": [{"name": "id", "type": "string", "value": "A1"}]}
    steps = [
        {"modelInvocationInput": request},
        {"rationale": {"text": "look"}},
        {"invocationInput": {"invocationType": "ACTION_GROUP", "actionGroupInvocationInput": given}},
        {"observation": {"type": "ACTION_GROUP", "actionGroupInvocationOutput": {"text": "red"}}},
        {"modelInvocationInput": request},
        {"observation": {"type": "FINISH", "finalResponse": {"text": ANSWER}}},
    ]
    events = [{"trace": {"orchestrationTrace": step}} if wrapped else {"orchestrationTrace": step} for step in steps]
    (tmp_path / "log.json").write_text(json.dumps([{"sessionId": "s", "trace": event} for event in events]))
    (tmp_path / "scores.csv").write_text("session_id,reward\ns,1\n")
    [rollout] = read_logs([tmp_path / "log.json"], tmp_path / "scores.csv").rollouts
    spoken = [(m["role"], calls_of(m) or m["content"]) for m in rollout.messages]
    assert spoken == [("system", "Read."), *SPOKEN] and rollout.outcome == "passed"


CALLED = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"id": "A1"}'}}
ACTING = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
WHOLE = [QUESTION, ACTING, {"role": "tool", "tool_call_id": "c1", "content": "red"}]
REPLY = {"choices": [{"message": SAID}]}
JSON_CALL = [{"name": "read", "arguments": {"id": "A1"}}]


@pytest.mark.parametrize(
    "row",
    [
        {"object": "chat.completion", "messages": WHOLE, **REPLY},
        {"request_id": "r", "request_body": {"messages": WHOLE}, "response_body": REPLY},
        {"task": {"question": ASKED}, "steps": [
            {"observation": {"question": ASKED}, "action": [CALLED], "chat_completions": WHOLE[:2]},
            {"observation": {"c1": "red"}, "action": ANSWER, "chat_completions": [*WHOLE, SAID]}]},
        {"conversations": [QUESTION, {"role": "assistant", "function_call": JSON_CALL},
                           {"role": "observation", "content": "red"}, SAID]},
    ],
)  # fmt: skip
def test_a_request_with_its_reply_is_a_whole_dialogue(row: Row, tmp_path: Path) -> None:
    assert read(tmp_path, [{**row, "success": True}]) == [("passed", SPOKEN)]


def test_rows_as_content_of_a_message_are_not_dropped(tmp_path: Path) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"state": "red"}]}
    [(_, spoken)] = read(tmp_path, [{"messages": [QUESTION, ACTING, result, SAID], "reward": 1}])
    assert spoken[2] == ("tool", '[{"state": "red"}]')


def test_what_was_seen_before_the_first_action_is_no_result(tmp_path: Path) -> None:
    steps = [{"action": None, "observation": "a hall"}, {"action": "look", "observation": "a desk"}]
    [(_, spoken)] = read(tmp_path, [{"goal": ASKED, "history": steps, "success": True}])
    acted = [("assistant", [("action", {"input": "look"})]), ("tool", "a desk")]
    assert spoken == [("user", ASKED), ("user", "a hall"), *acted]


def test_a_message_of_an_api_is_the_agent_s(tmp_path: Path) -> None:
    turns = [{"role": "userMessage", "content": ASKED}, {"role": "apiMessage", "content": ANSWER}]
    assert read(tmp_path, [{"messages": turns, "reward": 1}]) == [("passed", [("user", ASKED), ("assistant", ANSWER)])]


def test_the_first_of_several_lists_is_read_and_no_other(tmp_path: Path) -> None:
    names = [f"list_{letter}" for letter in "jihgfedcba"]
    document = {name: [{"messages": [QUESTION, {**SAID, "content": name}], "success": True}] * 2 for name in names}
    assert {spoken[1][1] for _, spoken in read(tmp_path, document)} == {names[0]}
    row = {f"{name}_{number}": {**turn, "content": name} for name in "jihgfedcba"
           for number, turn in enumerate((QUESTION, SAID))}  # fmt: skip
    [(_, spoken)] = read(tmp_path, [{**row, "success": True}])
    assert spoken == [("user", "j"), ("assistant", "j")]


def test_many_results_in_a_message_with_words_after_them_are_read_at_once(tmp_path: Path) -> None:
    said = "<tool_response>\nred\n</tool_response>\n" * 28 + "And now?"
    turns = [("user", ASKED), ("assistant", "Wait."), ("user", said)]
    prompt = "".join(TEMPLATE["ChatML"].format(*turn) for turn in turns)
    start = process_time()
    [(_, spoken)] = read(tmp_path, [{"input": prompt, "output": ANSWER, "score": 1}])
    assert spoken[2] == ("user", said) and process_time() - start < 5


@pytest.mark.parametrize(
    ("own", "beside", "outcomes"),
    [
        ({"success": True}, [{"score": 0}, {"score": 0}], ["passed", "passed"]),
        ({"info": {"passed": False}}, [{"score": 1}, {"score": 1}], ["failed", "failed"]),
        ({"is_solved": "no"}, [{"reward": 1}, {"reward": 1}], ["failed", "failed"]),
        ({"status": "completed"}, [{"reward": 1}, {"reward": 0}], ["passed", "failed"]),
    ],
)
def test_numbers_beside_the_rollouts_never_override_an_outcome_of_their_own(
    own: Row, beside: list[Row], outcomes: list[str], tmp_path: Path
) -> None:
    document = {"runs": [{"messages": [QUESTION, SAID], **own}] * 2, "summary": beside}
    try:
        read_outcomes = [outcome for outcome, _ in read(tmp_path, document)]
    except UserError as refusal:  # the field of the rollouts is proposed
        assert not refusal.remedy.endswith(("score", "reward"))
        read_outcomes = [outcome for outcome, _ in read(tmp_path, document, refusal.remedy.split()[-1])]
    assert read_outcomes == outcomes


def test_metrics_of_a_whole_set_are_no_outcomes_of_its_rollouts(tmp_path: Path) -> None:
    metrics = [{"metric": "mean", "score": 1}, {"metric": "median", "score": 0}]
    with pytest.raises(UserError, match="no outcome found"):
        read(tmp_path, {"runs": [{"messages": [QUESTION, SAID]}] * 2, "metrics": metrics})


@pytest.mark.parametrize("own", [0, 1, 2], ids=["request", "action", "result"])
@pytest.mark.parametrize("result", ["red", "5", "blue 15"])
def test_the_last_step_is_kept_where_each_step_repeats_its_request(own: int, result: str, tmp_path: Path) -> None:
    seen = {"role": "tool", "tool_call_id": "c1", "content": "blue 15"}
    whole = [QUESTION, ACTING, seen, ACTING, {**seen, "content": result}]
    steps = [
        {"messages": whole[: before + own], "tool_calls": JSON_CALL, "observation": end}
        for before, end in ((1, "blue 15"), (3, result))
    ]
    [(_, spoken)] = read(tmp_path, [{"steps": steps, "success": False}])
    assert spoken == [*SPOKEN[:2], ("tool", "blue 15"), SPOKEN[1], ("tool", result)]


def test_messages_of_steps_that_do_not_repeat_those_before_are_no_whole_dialogue(tmp_path: Path) -> None:
    steps = [{"messages": [{"role": "user", "content": text}], "action": f"open[{text}]", "observation": text}
             for text in ("a", "b")]  # fmt: skip
    [(_, spoken)] = read(tmp_path, [{"goal": ASKED, "steps": steps, "success": False}])
    assert [said for role, said in spoken if role == "tool"] == ["a", "b"]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"type": "human", "data": {"content": ""}},
        {"role": "user", "parts": [{"inline_data": {"mime_type": "image/png", "data": "iVBO"}}]},
    ],
)
def test_a_dialogue_whose_user_says_no_word_is_read(turn: Row, tmp_path: Path) -> None:
    system = {"role": "system", "content": ASKED}
    answer = {"type": "ai", "data": {"content": ANSWER}} if "type" in turn else SAID
    [(outcome, spoken)] = read(tmp_path, [{"messages": [system, turn, answer], "success": True}])
    assert (outcome, spoken[0], spoken[-1]) == ("passed", ("system", ASKED), SPOKEN[-1])


def bedrock(step: Row, session: str = "s") -> Row:
    return {"sessionId": session, "trace": {"orchestrationTrace": step}}


def test_sessions_of_bedrock_agents_are_told_apart_with_all_that_the_user_asked(tmp_path: Path) -> None:
    more = {"role": "user", "content": "And A2?"}
    asked = [{"modelInvocationInput": {"text": json.dumps({"messages": messages})}}
             for messages in ([QUESTION], [QUESTION, SAID, more])]  # fmt: skip
    said = {"observation": {"finalResponse": {"text": ANSWER}}}
    inner = {**bedrock({"observation": {"finalResponse": {"text": "inner"}}}), "collaboratorName": "desk"}
    rows = [bedrock(asked[0]), inner, bedrock(asked[0]), bedrock(said), bedrock(asked[0], "t"), bedrock(asked[1]),
            bedrock(said), {"trace": bedrock(said, "t")}]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scores.csv").write_text("session_id,reward\ns,1\nt,0\n")
    rollouts = [*read_logs([tmp_path / "log.jsonl"], tmp_path / "scores.csv").rollouts]
    told = [(r.task.id, r.outcome, [message["content"] for message in r.messages]) for r in rollouts]
    assert told == [
        ("chat/s", "passed", [ASKED, ANSWER, "And A2?", ANSWER]), ("chat/t", "failed", [ASKED, ANSWER]),
    ]  # fmt: skip


BODY = {"content": {"application/json": [{"name": "id", "type": "string", "value": "A1"}]}}


@pytest.mark.parametrize(
    ("kind", "given", "seen", "call"),
    [
        ("actionGroup", {"apiPath": "/read", "verb": "post", "requestBody": BODY}, {"text": "red"},
         ("/read", {"id": "A1"})),
        ("agentCollaborator", {"agentCollaboratorName": "desk", "input": {"text": ASKED, "type": "TEXT"}},
         {"agentCollaboratorName": "desk", "output": {"text": "red"}}, ("desk", {"input": ASKED})),
        ("codeInterpreter", {"code": "1"}, {"executionOutput": "red", "executionTimeout": False},
         ("codeInterpreterInvocation", {"code": "1"})),
    ],
)  # fmt: skip
def test_calls_of_bedrock_agents_keep_their_arguments(
    kind: str, given: Row, seen: Row, call: tuple[str, Row], tmp_path: Path
) -> None:
    steps = [
        {"modelInvocationInput": {"text": json.dumps({"messages": [QUESTION]})}},
        {"invocationInput": {f"{kind}InvocationInput": given}},
        {"observation": {f"{kind}InvocationOutput": seen}},
    ]
    (tmp_path / "log.json").write_text(json.dumps([*map(bedrock, steps)]))
    (tmp_path / "scores.csv").write_text("session_id,reward\ns,1\n")
    [rollout] = read_logs([tmp_path / "log.json"], tmp_path / "scores.csv").rollouts
    assert calls_of(rollout.messages[1]) == [call] and rollout.messages[2]["content"] == "red"


@pytest.mark.parametrize("template", TEMPLATE.values(), ids=TEMPLATE)
@pytest.mark.parametrize("before", ["", "<|begin_of_text|>", "<|endoftext|><|endoftext|>", "<s> "])
@pytest.mark.parametrize("opened", [True, False])
def test_a_prompt_in_a_template_is_taken_apart_whatever_stands_before_it(
    template: str, before: str, opened: bool, tmp_path: Path
) -> None:
    opening, _, end = template.partition("{}")[2].partition("{}")
    opening = template.partition("{}")[0] + "assistant" + opening if opened else ""
    prompt = before + template.format("user", ASKED) + opening
    row = {"prompt": prompt, "completion": ANSWER + end + "<|end_of_text|>", "reward": 0}
    assert read(tmp_path, [row]) == [("failed", [SPOKEN[0], SPOKEN[3]])]
