"""Logs as strangers bring them: any outcome, any container, many tools, and what a log holds of the truth."""

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop import Choices, Logs, read_logs
from captrain.records import Rollout

Row = dict[str, Any]
ASKED = {"role": "user", "content": "Read A1."}
SAID = {"role": "assistant", "content": "It is red."}
CALLED = ("bash", {"command": "cat A1"})


def chat(**fields: object) -> Row:
    return {"messages": [ASKED, SAID], **fields}


def saved(path: Path, *rows: object) -> Path:
    """Write one document, or several rows as lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def outcomes(logs: Logs) -> list[str]:
    return [rollout.outcome for rollout in logs.rollouts]


def only(logs: Logs) -> Rollout:
    [rollout] = logs.rollouts
    return rollout


def spoken(rollout: Rollout) -> list[object]:
    """Each message as its role with its calls, or else its text."""
    return [(m["role"], calls_of(m) or m["content"]) for m in rollout.messages]


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("resolved", False, True),
        ("is_correct", 0, 1),
        ("result", "FAILED", "passed"),
        ("outcome", "unsuccessful", "success"),
        ("label", "wrong", "correct"),
        ("metrics.reward", 0.0, 1.0),
        ("evaluation.taskSuccess", False, True),
    ],
)
def test_a_field_that_looks_like_an_outcome_is_named_and_taken(
    field: str, bad: object, good: object, tmp_path: Path
) -> None:
    def row(value: object) -> Row:
        first, _, second = field.partition(".")
        return chat(**{first: {second: value} if second else value}, duration=3.2, id=7)

    path = saved(tmp_path / "a.jsonl", row(bad), row(good))
    with pytest.raises(UserError, match=f"no outcome found; `{field}` looks like one") as refusal:
        read_logs([path])
    assert str(path) in refusal.value.problem and refusal.value.remedy == f"add --outcome {field}"
    assert outcomes(read_logs([path], choices=Choices(outcome=field))) == ["failed", "passed"]


def test_the_command_takes_outcome_mark_messages_and_agent(tmp_path: Path) -> None:
    rows = [{"talk": [ASKED, SAID], "eval": {"points": n}, "who": "ab"[n % 2]} for n in range(4)]
    options = ["--messages", "talk", "--outcome", "eval.points", "--pass-at", "2", "--agent", "who"]
    path = saved(tmp_path / "a.jsonl", *rows)
    result = CliRunner().invoke(app, ["diagnose", str(path), *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in written] == ["failed", "failed", "passed", "passed"]
    assert [row["policy"] for row in written] == ["unknown (a)", "unknown (b)"] * 2


def test_messages_may_be_text_and_a_row_with_an_error_needs_no_outcome(tmp_path: Path) -> None:
    rows = [{"messages": json.dumps([ASKED, SAID]), "eval": value} for value in ({"ok": True}, {"ok": False}, None)]
    path = saved(tmp_path / "a.jsonl", *rows[:2], {**rows[2], "error": "timeout"})
    logs = read_logs([path], choices=Choices(outcome="eval.ok"))
    assert outcomes(logs) == ["passed", "failed", "error"] and not logs.skipped


@pytest.mark.parametrize(
    ("rewards", "mark", "expected", "note"),
    [
        (
            [0.02, 0.97, 1],
            None,
            "ffp",
            "2 of 3 rewards are between 0 and 1 (0.02 to 0.97): only a reward of 1 passes",
        ),
        (
            [0.02, 0.97, 1],
            0.9,
            "fpp",
            "2 of 3 rewards are between 0 and 1 (0.02 to 0.97): 1 of them pass",
        ),
        ([-1, 1, -1], None, "fpf", "counted as failed: 2 rewards of -1"),
        ([-3.5, 20, 80], 50, "ffp", ""),
    ],
)
def test_no_reward_is_dropped_without_a_word(
    rewards: list[float], mark: float | None, expected: str, note: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.jsonl", *(chat(reward=reward, task_id=n) for n, reward in enumerate(rewards)))
    logs = read_logs([path], choices=Choices(pass_at=mark))
    assert "".join(outcome[0] for outcome in outcomes(logs)) == expected
    assert any(line.startswith(note) for line in logs.notes) or not note


@pytest.mark.parametrize("reward", [2, 80, -0.5, -2])
def test_a_reward_out_of_range_is_refused_with_a_mark_to_type(reward: float, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jsonl", chat(reward=1), chat(reward=reward))
    with pytest.raises(UserError, match=f"line 2: a reward is outside of 0 to 1: {reward}") as refusal:
        read_logs([path])
    assert f"--pass-at {reward}" in refusal.value.remedy


@pytest.mark.parametrize("column", ["trace_id", "task_id", "id", "instance_id"])
def test_a_table_of_scores_fits_every_format(column: str, tmp_path: Path) -> None:
    atif = {
        "schema_version": "ATIF-v1.5", "session_id": "s2", "agent": {"name": "a", "version": "1"},
        "steps": [{"step_id": 1, "source": "user", "message": "Hi"}, {"step_id": 2, "source": "agent", "message": "A"}],
    }  # fmt: skip
    paths = [saved(tmp_path / "a.jsonl", chat(task_id="s0"), chat(task_id="s1")), saved(tmp_path / "b.json", atif)]
    (tmp_path / "scores.csv").write_text(f"{column},passed\ns0,false\ns1,true\ns2,1\ns9,1\n")
    logs = read_logs(paths, tmp_path / "scores.csv")
    assert outcomes(logs) == ["failed", "passed", "passed"]
    assert logs.notes == ("1 of 4 scores match no rollout, such as s9",)


def test_a_repeated_task_and_trial_is_told_and_the_more_complete_one_counts(tmp_path: Path) -> None:
    longer = {"messages": [ASKED, SAID, ASKED, SAID], "reward": 1, "task_id": "t", "trial": 0}
    path = saved(tmp_path / "a.jsonl", chat(reward=0, task_id="t", trial=0), longer, chat(reward=0, task_id="u"))
    logs = read_logs([path])
    assert outcomes(logs) == ["passed", "failed"]
    assert any(
        "1 rollout of a task and trial that stands twice for its agent, such as chat/t, trial 0" in line
        for line in logs.notes
    )


def test_rows_of_one_task_without_trials_are_numbered(tmp_path: Path) -> None:
    logs = read_logs([saved(tmp_path / "a.jsonl", *(chat(reward=n, task_id="t") for n in (0, 1, 0)))])
    assert [(rollout.task.id, rollout.trial) for rollout in logs.rollouts] == [("chat/t", n) for n in range(3)]


def simulation(task: str, agent: str) -> Row:
    return {
        "info": {"agent_info": {"implementation": agent, "llm": "m"}, "environment_info": {"domain_name": "d"}},
        "tasks": [{"id": task, "evaluation_criteria": {"actions": None}}],
        "simulations": [{
            "task_id": task, "trial": 0, "termination_reason": "max_steps", "reward_info": {"reward": 0.0},
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "no"}],
        }],
    }  # fmt: skip


@pytest.mark.parametrize("told_by", ["implementation", "path", "folder", "file", "prompt", "field"])
def test_two_agents_of_one_model_are_told_apart(told_by: str, tmp_path: Path) -> None:
    def rows(answer: str) -> list[Row]:
        return [chat(reward=1, task_id=n, note=answer) for n in (1, 2)]

    choices, paths = Choices(), [tmp_path]
    match told_by:
        case "implementation":
            paths = [saved(tmp_path / f"{name}.json", simulation("0", name)) for name in ("plain", "retry")]
        case "path":
            paths = [saved(tmp_path / name / "log.jsonl", *rows(name)) for name in ("one", "two")]
        case "folder":
            for name in ("one", "two"):
                for row in rows(name):
                    saved(tmp_path / name / f"{row['task_id']}.json", row)
        case "file":
            for name in ("one", "two"):
                saved(tmp_path / f"{name}.jsonl", *rows(name))
        case "prompt":
            both = [chat(reward=1, task_id=n, system=prompt) for n in (1, 2) for prompt in ("Be short.", "Be long.")]
            paths = [saved(tmp_path / "a.jsonl", *both)]
        case _:
            both = [chat(reward=1, task_id=n, setup={"arm": arm}) for n in (1, 2) for arm in "ab"]
            paths, choices = [saved(tmp_path / "a.jsonl", *both)], Choices(agent="setup.arm")
    logs = read_logs(paths, choices=choices)
    agents = [rollout.policy for rollout in logs.rollouts]
    assert len({*agents}) == 2 and all(agents.count(name) == len(agents) // 2 for name in agents)
    assert [rollout.trial for rollout in logs.rollouts] == [0] * len(agents)


def test_trials_of_one_agent_in_a_file_each_stay_one_agent(tmp_path: Path) -> None:
    for number in range(3):
        saved(tmp_path / f"task-a__{number}/log.json", chat(reward=1, task_id="a", note=number))
    logs = read_logs([tmp_path])
    assert [(rollout.policy, rollout.trial) for rollout in logs.rollouts] == [("unknown", n) for n in range(3)]


ROWS = [chat(reward=0, task_id="a"), chat(reward=1, task_id="b")]


@pytest.mark.parametrize("packing", ["data", "results and model", "by id", "gz", "zip", "array"])
def test_rows_are_read_from_every_container(packing: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    match packing:
        case "data":
            path = saved(tmp_path / "a.json", {"data": ROWS, "count": 2})
        case "results and model":
            path = saved(tmp_path / "a.json", {"model": "m", "reward": 0.5, "args": {"n": 1}, "results": ROWS})
        case "by id":
            path = saved(tmp_path / "a.json", {row["task_id"]: {**row, "task_id": row["task_id"]} for row in ROWS})
        case "gz":
            path = tmp_path / "a.jsonl.gz"
            path.write_bytes(gzip.compress(lines.encode()))
        case "zip":
            path = tmp_path / "a.zip"
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("run/a.jsonl", lines)
        case _:
            path = saved(tmp_path / "a.json", ROWS)
    logs = read_logs([path])
    assert [(rollout.task.id, rollout.outcome) for rollout in logs.rollouts] == [
        ("chat/a", "failed"),
        ("chat/b", "passed"),
    ]
    assert {rollout.policy for rollout in logs.rollouts} == {"m" if "model" in packing else "unknown"}


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\x00\x00", b"\x1f\x8b\x08broken", b"PK\x03\x04broken", b"\x00" * 99]
)
def test_binary_is_never_printed(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError) as refusal:
        read_logs([tmp_path / "a.jsonl"])
    assert str(tmp_path / "a.jsonl") in refusal.value.problem
    assert str(refusal.value).isascii() and "PNG" not in str(refusal.value)


def test_gigabytes_of_zeros_are_no_utf_32_and_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(3 << 30)  # sparse: it needs no space
    with pytest.raises(UserError, match="it is a binary file"):
        read_logs([tmp_path / "a.jsonl"])


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"prompt": "Sort.", "solution": "sorted()", "is_solved": True}, "solution"),
        ({"run": {"talk": [ASKED, SAID]}, "ok": 1}, "run.talk"),
        ({"a": 1, "b": [1, 2]}, ""),
    ],
)
def test_a_file_without_a_dialogue_is_refused_by_its_path_with_the_likely_field(
    row: Row, hint: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.jsonl", row, row)
    with pytest.raises(UserError, match=r"it holds no dialogue, but the fields") as refusal:
        read_logs([path])
    assert str(path) in refusal.value.problem
    assert (refusal.value.remedy == f"add --messages {hint}") == bool(hint)
    if hint:
        assert (
            len(read_logs([path], choices=Choices("is_solved" if "is_solved" in row else "ok", messages=hint)).rollouts)
            == 2
        )


def test_events_in_a_file_each_are_one_dialogue_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "sessions" / "abc" / "events"
    folder.mkdir(parents=True)
    asked = {"id": 2, "source": "user", "action": "message", "args": {"content": "Count files"}}
    ran = {"id": 9, "source": "agent", "action": "run", "args": {"command": "ls"}}
    seen = {"id": 10, "source": "agent", "observation": "run", "content": "a.py"}
    for event in (asked, ran, seen):
        (folder / f"{event['id']}.json").write_text(json.dumps(event))
    scores = tmp_path / "scores.csv"
    scores.write_text("task_id,reward\nabc,0\n")
    [rollout] = read_logs([tmp_path / "sessions"], scores).rollouts
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "user", "parts": [{"text": "Weather?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "Rome"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"t": 20}}}]},
            {"role": "model", "parts": [{"text": "20"}]},
        ],
        [
            {"role": "user", "parts": [{"text": "Weather?", "function_call": None}]},
            {
                "role": "model",
                "parts": [{"text": None, "function_call": {"name": "weather", "args": {"city": "Rome"}}}],
            },
            {"role": "user", "parts": [{"function_response": {"name": "weather", "response": {"t": 20}}}]},
            {"role": "model", "parts": [{"text": "20"}]},
        ],
        [
            {"role": "user", "parts": [{"type": "text", "text": "Weather?"}]},
            {
                "role": "assistant",
                "parts": [
                    {"type": "tool-weather", "toolCallId": "c", "input": {"city": "Rome"}, "output": {"t": 20}},
                    {"type": "text", "text": "20"},
                ],
            },
        ],
    ],
    ids=["Gemini", "Gemini in Python", "Vercel"],
)
def test_messages_of_parts_keep_words_calls_and_results(tmp_path: Path, messages: list[object]) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages, "reward": 1}) + "\n")
    [rollout] = read_logs([path]).rollouts
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert [*calls_of(rollout.messages[1])] == [("weather", {"city": "Rome"})]
    assert [rollout.messages[place]["content"] for place in (0, 2, 3)] == ["Weather?", '{"t": 20}', "20"]


def test_calls_behind_the_line_action_are_read_without_the_thoughts_around_them(tmp_path: Path) -> None:
    call = 'Action:\n{"name": "get_order", "arguments": {"id": "7"}}'
    words = 'Action:\n{"name": "respond", "arguments": {"content": "It is shipped."}}'
    log = saved(
        tmp_path / "a.jsonl",
        chat(
            messages=[
                {"role": "user", "content": "<think>\nI play a customer.\n</think>\n\nWhere is order 7?"},
                {"role": "assistant", "content": f"<think>\nI cannot know.\n</think>\n\n{call}"},
                {"role": "user", "content": 'API output: {"state": "shipped"}'},
                {"role": "assistant", "content": f"I tell it.\n</think>\n\n{words}"},
                {"role": "user", "content": "Thanks."},
            ],
            reward=1,
        ),
    )

    rollout = only(read_logs([log]))

    assert spoken(rollout) == [
        ("user", "Where is order 7?"),
        ("assistant", [("get_order", {"id": "7"})]),
        ("tool", 'API output: {"state": "shipped"}'),
        ("assistant", "It is shipped."),
        ("user", "Thanks."),
    ]
    assert not any(message.get("unexecuted") for message in rollout.messages)


def test_a_response_that_repeats_the_last_words_of_a_run_does_not_make_it_one_request(tmp_path: Path) -> None:
    log = saved(tmp_path / "a.jsonl", chat(response="It is red.", task_success="failure"))

    with pytest.raises(UserError) as refused:
        read_logs([log])

    assert refused.value.remedy == "add --outcome task_success"
    assert outcomes(read_logs([log], choices=Choices(outcome="task_success"))) == ["failed"]


def test_messages_of_langchain_in_javascript_are_known_by_their_class(tmp_path: Path) -> None:
    def message(kind: str, text: str) -> Row:
        return {"lc": 1, "type": "constructor", "id": ["langchain_core", "messages", kind], "kwargs": {"content": text}}

    log = saved(
        tmp_path / "a.jsonl",
        {"messages": [message("HumanMessage", "Read A1."), message("AIMessageChunk", "It is red.")], "reward": 1},
    )

    assert spoken(only(read_logs([log]))) == [("user", "Read A1."), ("assistant", "It is red.")]


def test_commands_that_the_user_ran_in_a_session_are_no_turns_of_it(tmp_path: Path) -> None:
    turns = [ASKED, {"role": "bashExecution", "command": "ls", "output": "a.py"}, SAID]
    log = saved(
        tmp_path / "s.jsonl", {"type": "session", "id": "s1"}, *({"type": "message", "message": t} for t in turns)
    )
    scores = tmp_path / "scores.csv"
    scores.write_text("trace_id,reward\ns1,1\n", encoding="utf-8")

    assert spoken(only(read_logs([log], scores))) == [("user", "Read A1."), ("assistant", "It is red.")]


@pytest.mark.parametrize(
    "steps",
    [
        [{"act": "look", "obs": "a desk"}, {"act": "take pen", "obs": "done"}],
        [
            {"step": 0, "agent": {"thought": "", "action": "look"}, "environment": "a desk"},
            {"step": 1, "agent": {"thought": "", "action": "take pen"}, "environment": "done"},
        ],
    ],
    ids=["act", "agent"],
)
def test_steps_are_read_whose_action_is_named_act_or_stands_in_the_agents_object(
    steps: list[Row], tmp_path: Path
) -> None:
    log = saved(tmp_path / "a.jsonl", {"goal": "Take the pen.", "steps": steps, "success": True})

    assert spoken(only(read_logs([log]))) == [
        ("user", "Take the pen."),
        ("assistant", [("action", {"input": "look"})]),
        ("tool", "a desk"),
        ("assistant", [("action", {"input": "take pen"})]),
        ("tool", "done"),
    ]


def test_a_column_whose_name_ends_with_answer_is_offered_and_the_truth_is_not(tmp_path: Path) -> None:
    row = {"Question": "How much?", "Ground Truth Answer": "4", "LLM Answer": "3", "Result": "Incorrect"}
    log = saved(tmp_path / "a.jsonl", row, row)

    with pytest.raises(UserError) as refused:
        read_logs([log])

    assert refused.value.remedy == "add --messages 'LLM Answer'"
    choices = Choices(messages="LLM Answer", outcome="Result")
    assert spoken([*read_logs([log], choices=choices).rollouts][0]) == [("user", "How much?"), ("assistant", "3")]


def test_the_last_of_nested_requests_is_offered_and_schemas_beside_them_are_not(tmp_path: Path) -> None:
    made = {
        "function": [{"name": "f", "description": "", "parameters": {}}],
        "requests": [[ASKED, SAID], [ASKED, SAID, ASKED, SAID]],
    }
    log = saved(tmp_path / "a.jsonl", {"win": True, "made": made})

    with pytest.raises(UserError) as refused:
        read_logs([log])

    assert refused.value.remedy == "add --messages made.requests.-1"
    read = only(read_logs([log], choices=Choices(messages="made.requests.-1", outcome="win")))
    assert len(read.messages) == 4


def test_turns_typed_tool_call_keep_the_names_of_their_calls(tmp_path: Path) -> None:
    turns = [
        {"type": "message", **ASKED},
        {"type": "tool_call", "content": "", "tool_calls": [{"call_id": "1", "name": "cat", "arguments": {"f": "A1"}}]},
        {"type": "tool_result", "call_id": "1", "outcome": "red"},
        {"type": "message", **SAID},
    ]
    log = saved(tmp_path / "a.jsonl", chat(messages=turns, reward=1))

    assert spoken(only(read_logs([log])))[1:3] == [("assistant", [("cat", {"f": "A1"})]), ("tool", "red")]


def test_a_nested_outcome_named_ok_is_offered(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read_logs([saved(tmp_path / "a.jsonl", chat(eval={"ok": True}))])

    assert refused.value.remedy == "add --outcome eval.ok"


def test_bfcl_results_without_scores_are_refused_with_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no score file") as refused:
        read_logs([saved(tmp_path / "a_result.json", {"id": "java_0", "result": [], "latency": 1})])

    assert refused.value.remedy.startswith("run `bfcl evaluate`")


@pytest.mark.parametrize(
    "beside",
    [
        {"rewards": [1, 0]},
        {"scores": {"a": 1, "b": 0}},
        {"results": {"b": {"success": False}, "a": {"success": True}}},
        {"evaluations": [{"id": "b", "reward": 0}, {"id": "a", "reward": 1}]},
    ],
    ids=["a list in order", "an object of values", "an object of objects", "a list of objects"],
)
def test_outcomes_may_stand_beside_the_list_of_dialogues_of_a_document(beside: Row, tmp_path: Path) -> None:
    runs = [chat(id=name) for name in "ab"]
    log = saved(tmp_path / "a.json", {"runs": runs, "task_id": "t1", **beside})
    assert [(rollout.task.id, rollout.outcome) for rollout in read_logs([log]).rollouts] == [
        ("chat/t1", "passed"), ("chat/t1", "failed"),
    ]  # fmt: skip
    # The result of a task is no result of each of its trials.
    if beside.keys() != {"rewards"}:
        saved(log, {"runs": [*runs, runs[0]], **beside})
        with pytest.raises(UserError, match="no outcome found"):
            read_logs([log])


@pytest.mark.parametrize(
    "row",
    [
        {"id": "t1", "trials": [chat(reward=1), chat(reward=0)]},
        {"task": "t1", "samples": [[ASKED, SAID], [ASKED, SAID]], "rewards": [1, 0], "pass_rate": 0.5},
    ],
    ids=["objects", "lists of messages"],
)
def test_trials_nested_in_a_row_are_trials_of_its_task(row: Row, tmp_path: Path) -> None:
    for log in (
        saved(tmp_path / "lines.jsonl", {**row, "model": "m"}, {**row, "model": "n"}),
        saved(tmp_path / "document.json", {"tasks": [{**row, "model": "m"}, {**row, "model": "n"}], "version": 1}),
    ):
        rollouts = [*read_logs([log]).rollouts]
        assert [(rollout.task.id, rollout.trial, rollout.policy, rollout.outcome) for rollout in rollouts] == [
            ("chat/t1", trial, model, outcome) for model in "mn" for trial, outcome in enumerate(("passed", "failed"))
        ]  # fmt: skip


def test_one_outcome_of_several_nested_trials_and_requests_of_one_run_are_refused(tmp_path: Path) -> None:
    several = saved(tmp_path / "a.jsonl", {"id": "t1", "trials": [chat(), chat()], "success": True})
    with pytest.raises(UserError, match="no outcome found"):
        read_logs([several])
    requests = saved(tmp_path / "b.jsonl", {"id": "t1", "prompts": [chat(), {"messages": [ASKED, SAID, ASKED]}]})
    with pytest.raises(UserError, match="no known format"):
        read_logs([requests])
