"""Logs of chatbots, crews and evaluations: one rollout for each run, or a refusal that says what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop import read_logs

Row = dict[str, Any]
CANCEL = ("assistant", [("cancel_order", {"order": 7})])
ASKED, SAID = ("user", "Cancel order 7."), ("assistant", "It is cancelled.")


def step(number: int, **details: object) -> Row:
    return {
        "id": f"step_{number}", "object": "thread.run.step", "created_at": number, "run_id": "run_1", "type": "any",
        "assistant_id": "asst_1", "thread_id": "thread_1", "status": "completed", "step_details": details,
    }  # fmt: skip


def message(number: int, role: str, text: str) -> Row:
    content = [{"type": "text", "text": {"value": text, "annotations": []}}]
    ids = {"id": f"msg_{number}", "object": "thread.message", "thread_id": "thread_1", "run_id": None}
    return {**ids, "created_at": number, "role": role, "content": content}


def activity(sender: str, conversation: str = "c1", kind: str = "message", **fields: object) -> Row:
    name = {"id": sender, "name": sender, "role": sender}
    return {"type": kind, "channelId": "emulator", "from": name, "conversation": {"id": conversation}, **fields}


def event(kind: str, **fields: object) -> Row:
    return {"event": kind, "timestamp": 1.0, **fields}


def kernel(role: str, **item: object) -> Row:
    return {"Role": {"Label": role}, "Items": [item], "ModelId": "gpt-4o"}


def task(agent: str, request: str, *messages: Row) -> Row:
    said = {"description": request, "name": None, "expected_output": "a text", "summary": "", "raw": "done"}
    return {**said, "pydantic": None, "json_dict": None, "agent": agent, "output_format": "raw", "messages": messages}


def sample(number: int, rule: str, score: float, **fields: object) -> Row:
    arguments = {"gen_args_0": {"arg_0": "2+2?", "arg_1": {"until": ["\n"]}}}
    return {
        "doc_id": number, "doc": {"question": "2+2?"}, "target": "4", "arguments": arguments, "resps": [["It is 4."]],
        "filtered_resps": ["4"], "filter": rule, "metrics": ["exact_match"], "exact_match": score, **fields,
    }  # fmt: skip


CALLED = {"type": "tool_calls", "tool_calls": [{"id": "c", "type": "function", "function": {
    "name": "cancel_order", "arguments": '{"order": 7}', "output": "done",
}}]}  # fmt: skip
CREATED = {"type": "message_creation", "message_creation": {"message_id": "msg_4"}}
LISTED = {"object": "list", "data": [step(3, **CREATED), step(2, **CALLED)]}
TRACKER = {"sender_id": "u1", "slots": {}, "latest_action_name": "action_listen", "events": [
    event("action", name="action_session_start"),
    event("user", text="Cancel order 7.", parse_data={"intent": {"name": "cancel"}}),
    event("slot", name="order", value="7"),
    event("action", name="action_cancel"), event("slot", name="cancelled", value=True),
    event("action", name="utter_done"), event("bot", text="It is cancelled."), event("action", name="action_listen"),
]}  # fmt: skip
HISTORY = [
    kernel("user", **{"$type": "TextContent", "Text": "Cancel order 7."}),
    kernel("assistant", **{"$type": "FunctionCallContent", "Id": "c", "PluginName": "Orders", "FunctionName": "cancel",
                           "Arguments": {"order": "7"}}),
    kernel("tool", **{"$type": "FunctionResultContent", "CallId": "c", "Result": "done"}),
    kernel("assistant", **{"$type": "TextContent", "Text": "It is cancelled."}),
]  # fmt: skip
TRANSCRIPT = [
    activity("user", kind="conversationUpdate", membersAdded=[{"id": "bot"}]),
    activity("user", text="Cancel order 7."),
    activity("bot", kind="trace", value={"intent": "cancel"}),
    activity("bot", text="It is cancelled."),
]
CREW = {"raw": "done", "pydantic": None, "json_dict": None, "token_usage": {}, "tasks_output": [
    task("Clerk", "Cancel it.", {"role": "user", "content": "Cancel order 7."},
         {"role": "assistant", "content": None, "tool_calls": [
             {"id": "c", "function": {"name": "cancel_order", "arguments": '{"order": 7}'}}]},
         {"role": "tool", "tool_call_id": "c", "content": "done"}),
    task("Writer", "Say it.", {"role": "user", "content": "Tell the customer."},
         {"role": "assistant", "content": "It is cancelled."}),
]}  # fmt: skip


def spoken(path: Path, document: object, *lines: object) -> list[list[object]]:
    """The messages of each rollout of a file: its role with its calls, or else its text."""
    (path / "log.json").write_text("\n".join(map(json.dumps, (document, *lines))) + "\n")
    names = ["log.json", "thread_1", "u1", "c1", "c2", "log", *(f"log.json:{n}" for n in (1, 2))]
    for column in ("file", "task_id", "trace_id"):
        (path / "scores.csv").write_text(f"{column},reward\n" + "".join(f"{name},1\n" for name in names))
        try:
            logs = read_logs([path / "log.json"], path / "scores.csv")
        except UserError:
            continue
        return [[(m["role"], calls_of(m) or m["content"]) for m in rollout.messages] for rollout in logs.rollouts]
    raise AssertionError("no score matches")


@pytest.mark.parametrize(
    ("rows", "dialogues"),
    [
        ([LISTED], [[CANCEL, ("tool", "done")]]),
        (
            [step(3, **CREATED), step(2, **CALLED), message(4, "assistant", SAID[1]), message(1, "user", ASKED[1])],
            [[ASKED, CANCEL, ("tool", "done"), SAID]],
        ),
        ([TRACKER], [[ASKED, ("assistant", [("action_cancel", {})]), ("tool", '{"cancelled": true}'), SAID]]),
        ([HISTORY], [[ASKED, ("assistant", [("Orders-cancel", {"order": "7"})]), ("tool", "done"), SAID]]),
        ([TRANSCRIPT], [[ASKED, SAID]]),
        ([*TRANSCRIPT, activity("user", "c2", text="Hello."), activity("bot", "c2", text="Hi.")],
         [[ASKED, SAID], [("user", "Hello."), ("assistant", "Hi.")]]),
        ([CREW], [[ASKED, CANCEL, ("tool", "done"), ("user", "Tell the customer."), SAID]]),
    ],
)  # fmt: skip
def test_a_run_is_one_rollout_with_its_calls_and_results(
    rows: list[object], dialogues: list[object], tmp_path: Path
) -> None:
    assert spoken(tmp_path, *rows) == dialogues


def test_a_crew_s_messages_name_the_agent_that_spoke(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({**CREW, "reward": 1, "task_id": "t1"}) + "\n")
    [rollout] = read_logs([tmp_path / "log.jsonl"]).rollouts
    assert [m["name"] for m in rollout.messages if m["role"] == "assistant"] == ["Clerk", "Writer"]
    assert (rollout.outcome, rollout.task.id) == ("passed", "chat/t1")


def test_samples_of_lm_eval_are_judged_by_their_metric_and_by_each_filter_apart(tmp_path: Path) -> None:
    path = tmp_path / "samples_sums_2025-01-01T00-00-00.jsonl"
    rows = [sample(n, rule, float(rule == "flexible" or n)) for n in range(2) for rule in ("strict", "flexible")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    logs = read_logs([path])
    found = {(r.task.id, r.policy.split("(")[1]): r.outcome for r in logs.rollouts}
    assert found == {
        ("chat/sums 0", "strict)"): "failed", ("chat/sums 1", "strict)"): "passed",
        ("chat/sums 0", "flexible)"): "passed", ("chat/sums 1", "flexible)"): "passed",
    }  # fmt: skip
    assert {r.messages[-1]["content"] for r in logs.rollouts} == {"It is 4."}
    assert [fact.text for fact in next(iter(logs.rollouts)).task.facts.expected] == ["4"]


CHOICE = {"gen_args_0": {"arg_0": "Sky?", "arg_1": " blue"}}
LIKELIHOODS = sample(0, "none", 1.0, arguments=CHOICE, resps=[[["-1", "True"]]])
LOGGED = [{"task_name": "t", "task": "Cancel it.", "agent": "Clerk", "status": "started"}]
NAMELESS = [{**row, "from": {"id": "x"}} for row in TRANSCRIPT]
BARE = {**CREW, "tasks_output": [{**part, "messages": []} for part in CREW["tasks_output"]]}


@pytest.mark.parametrize(
    ("document", "reason", "remedy"),
    [
        ([{"task_id": "a", "model_answer": "17", "reasoning_trace": "I saw 17."}], "a submission to GAIA", "--scores"),
        ([LIKELIHOODS], "likelihoods of choices", "generate_until"),
        (LOGGED, "no mark of a run", "model_dump_json"),
        (BARE, "no messages of its agents", "messages"),
        ({"object": "list", "data": [step(3, **CREATED)]}, "the ids of messages", "thread.message"),
        (NAMELESS, "do not tell the bot from the user", '"role": "bot"'),
    ],
)
def test_a_file_without_a_dialogue_is_refused_with_what_it_lacks(
    document: object, reason: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "log.json").write_text(json.dumps(document))
    with pytest.raises(UserError) as refused:
        read_logs([tmp_path / "log.json"])
    assert "log.json" in refused.value.problem and reason in refused.value.problem
    assert remedy in str(refused.value.remedy)


@pytest.mark.parametrize(
    "rows",
    [
        [{**step(2, **CALLED), "created_at": None}, message(1, "user", "Cancel it.")],
        [*TRANSCRIPT * 6, {"type": "message", "text": "Hello."}],
    ],
)
def test_a_row_of_a_thread_that_lacks_a_field_does_not_end_the_reading(rows: list[Row], tmp_path: Path) -> None:
    assert len(spoken(tmp_path, rows)) == 1


def test_transcripts_in_a_folder_are_found_by_their_suffix(tmp_path: Path) -> None:
    for name in ("c1", "c2"):
        rows = [activity("user", name, text="Hello."), activity("bot", name, text="Hi.")]
        (tmp_path / f"{name}.transcript").write_text(json.dumps(rows))
    (tmp_path / "scores.csv").write_text("trace_id,reward\nc1,1\nc2,0\n")
    logs = read_logs([tmp_path], tmp_path / "scores.csv")
    assert sorted(rollout.outcome for rollout in logs.rollouts) == ["failed", "passed"]
