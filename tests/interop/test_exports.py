"""Logs of tracing tools and message libraries, tables, captrain's own rollouts, and rows in memory.

`drivers/tracing_driver.py` had the libraries write the files in `written`."""

import csv
import json
import re
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.needs import further
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop import Logs, logs_of_rows, read_logs
from captrain.interop.logs.reading import EXAMPLE
from captrain.records import Rollout, Score, Task, publish, publish_json

WRITTEN = Path(__file__).parents[1] / "logs/written"
READ = [("read", {"id": "A1"})]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Read A1."},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"id": "A1"}'}}]},
    {"role": "tool", "tool_call_id": "c", "content": "red"},
    {"role": "assistant", "content": "It is red."},
]  # fmt: skip
ROW = {"messages": MESSAGES, "reward": 1, "task_id": "a1"}
SHAREGPT = {"reward": 0, "system": "You read records.", "tools": json.dumps([{"name": "read", "parameters": {}}]),
            "conversations": [
    {"from": "human", "value": "Read A1."},
    {"from": "function_call", "value": '{"name": "read", "arguments": {"id": "A1"}}'},
    {"from": "observation", "value": "red"},
    {"from": "gpt", "value": "It is red."},
]}  # fmt: skip
CALL = '<tool_call>\n{"name": "read", "arguments": {"id": "A1"}}\n</tool_call>'
HERMES = {"reward": 0, "conversations": [
    {"from": "system", "value": "You read records."},
    {"from": "human", "value": "Read A1."},
    {"from": "gpt", "value": CALL},
    {"from": "tool", "value": "<tool_response>\nred\n</tool_response>"},
    {"from": "gpt", "value": "It is red."},
]}  # fmt: skip


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def said(rollout: Rollout) -> list[object]:
    """Text or calls of each message, without the system's."""
    return [calls_of(message) or message["content"] for message in rollout.messages if message["role"] != "system"]


def assert_reads(logs: Logs, answer: str = "It is red.") -> None:
    for rollout in logs.rollouts:
        expected = answer if rollout.outcome == "passed" else answer.replace("red", "blue")
        assert said(rollout) == ["Read A1.", READ, "red", expected]
    assert not logs.unread and [tool["function"]["name"] for tool in logs.tools] == ["read"]


@pytest.mark.parametrize(
    ("name", "kind", "outcomes"),
    [
        ("langchain-core-1.7.2", "LangChain messages", ["passed", "passed", "failed", "failed"]),
        ("langgraph-1.2.22", "LangChain messages", ["passed", "passed", "failed", "failed"]),
        ("openai-responses-3.54.0", "OpenAI Responses items", ["passed", "failed"]),
        ("langsmith-0.15.0", "LangSmith runs", ["passed", "passed", "failed", "failed"]),
        ("langfuse-5.0.4", "Langfuse export", ["passed", "failed"]),
    ],
)
def test_files_of_tracing_and_message_libraries_give_the_same_dialogue(
    name: str, kind: str, outcomes: list[str]
) -> None:
    logs = read_logs([WRITTEN / f"{name}.jsonl"])
    assert logs.sources[0]["format"] == kind
    assert [rollout.outcome for rollout in logs.rollouts] == outcomes
    assert {"good", "bad"} <= {rollout.policy for rollout in logs.rollouts} <= {"good", "bad", "unknown"}
    assert all(rollout.messages[0]["content"] == "You read records." for rollout in logs.rollouts)
    assert_reads(logs)


def test_langsmith_examples_are_tasks_and_feedback_may_be_separate(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (WRITTEN / "langsmith-0.15.0.jsonl").read_text().splitlines()]
    roots = [row["trace_id"] for row in rows if row["parent_run_id"] is None]
    for row in rows:
        row["feedback_stats"] = None
        row["reference_example_id"] = "e1" if row["parent_run_id"] is None else None
    feedback = [{"run_id": root, "trace_id": root, "key": "correct", "score": at % 2} for at, root in enumerate(roots)]
    logs = read_logs([lines(tmp_path / "a.jsonl", *feedback, *rows)])
    assert [rollout.outcome for rollout in logs.rollouts] == ["failed", "passed"] * 2
    assert {rollout.task.id for rollout in logs.rollouts} == {"chat/e1"}
    nested = {**rows[0], "child_runs": rows[1:3], "feedback_stats": {"correct": {"n": 1, "avg": 1.0}}}
    assert_reads(read_logs([lines(tmp_path / "b.jsonl", nested)]))


def test_of_several_scores_the_one_named_reward_counts_unless_a_table_overrides_it(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (WRITTEN / "langfuse-5.0.4.jsonl").read_text().splitlines()]
    scores = [row for row in rows if "dataType" in row]
    more = [{**score, "name": "tone", "value": 0.5} for score in scores]
    path = lines(tmp_path / "a.jsonl", *rows, *more)
    with pytest.raises(UserError, match=r"it has several scores \(correct, tone\), and none is named reward"):
        read_logs([path])
    named = [{**score, "name": "reward", "value": 1 - score["value"]} for score in scores]
    outcomes = [rollout.outcome for rollout in read_logs([lines(tmp_path / "b.jsonl", *rows, *named)]).rollouts]
    assert outcomes == ["failed", "passed"]
    table = tmp_path / "scores.csv"
    table.write_text("reward,trace_id\n1\n")  # a row without a trace
    with pytest.raises(UserError, match="is not a table of scores"):
        read_logs([path], table)
    table.write_text("trace_id,reward\n" + "".join(f"{score['subject']['id']},1\n" for score in scores))
    assert [rollout.outcome for rollout in read_logs([path], table).rollouts] == ["passed", "passed"]


@pytest.mark.parametrize("layout", ["trace with all of it", "page of the API", "blob storage", "table with columns"])
def test_all_exports_of_langfuse_are_read(layout: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (WRITTEN / "langfuse-5.0.4.jsonl").read_text().splitlines()][:4]
    observations, score = rows[:3], rows[3]
    trace = {"id": score["subject"]["id"], "name": "agent", "sessionId": None, "input": None, "output": "It is red."}
    given = {"traceId": trace["id"], "name": "correct", "value": 1, "dataType": "BOOLEAN"}
    if layout == "trace with all of it":
        path = lines(tmp_path / "a.jsonl", {**trace, "observations": observations, "scores": [given]})
    elif layout == "page of the API":
        path = tmp_path / "a.json"
        path.write_text(json.dumps({"data": [*observations, given], "meta": {"page": 1}}, indent=1))
    elif layout == "blob storage":
        names = {"traceId": "trace_id", "dataType": "data_type", "parentObservationId": "parent_observation_id"}
        snake = [{names.get(name, name): value for name, value in row.items()} for row in [*observations, given]]
        path = lines(tmp_path / "a.jsonl", *snake)
    else:
        messages = json.loads(observations[1]["input"])["messages"]
        path = tmp_path / "a.csv"
        row = {**trace, "input": json.dumps(messages), "correct": "[1]"}
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, [*row])
            table.writeheader()
            table.writerow(row)
    logs = read_logs([path])
    assert [rollout.outcome for rollout in logs.rollouts] == ["passed"]
    assert_reads(logs)


@pytest.mark.parametrize("row", [SHAREGPT, HERMES], ids=["turns of functions", "tags"])
def test_both_notations_of_sharegpt_calls_are_read(row: dict[str, Any], tmp_path: Path) -> None:
    logs = read_logs([lines(tmp_path / "a.jsonl", row)])
    [rollout] = logs.rollouts
    assert said(rollout) == ["Read A1.", READ, "red", "It is red."]
    assert rollout.messages[0] == {"role": "system", "content": "You read records."}
    assert logs.sources[0]["format"] == "ShareGPT conversations"
    assert len(logs.known_tools) == ("tools" in row)


def test_calls_of_one_response_are_one_turn(tmp_path: Path) -> None:
    calls = [
        {"type": "function_call", "call_id": f"c{n}", "name": "read", "arguments": f'{{"id": "A{n}"}}'} for n in (1, 2)
    ]
    outputs = [{"type": "function_call_output", "call_id": f"c{n}", "output": f"red {n}"} for n in (1, 2)]
    words = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Both are red."}]}
    items = [{"role": "user", "content": "Read A1 and A2."}, *calls, *outputs, words]
    [rollout] = read_logs([lines(tmp_path / "a.jsonl", {"items": items, "reward": 1})]).rollouts
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert calls_of(rollout.messages[1]) == [("read", {"id": "A1"}), ("read", {"id": "A2"})]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("notation", [json.dumps, repr], ids=["JSON", "Python"])
def test_a_table_has_messages_in_a_column(notation: Any, delimiter: str, tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerow(["task_id", "messages", "success"])
        table.writerows([["a1", notation(MESSAGES), True], ["a2", notation(MESSAGES), False]])
    logs = read_logs([tmp_path / "a.csv"])
    assert [(rollout.task.id, rollout.outcome) for rollout in logs.rollouts] == [
        ("chat/a1", "passed"),
        ("chat/a2", "failed"),
    ]
    assert {str(said(rollout)) for rollout in logs.rollouts} == {str(["Read A1.", READ, "red", "It is red."])}


def test_a_folder_is_searched_for_tables_with_dialogues(tmp_path: Path) -> None:
    pd.DataFrame([ROW]).to_csv(tmp_path / "a.csv")
    (tmp_path / "scores.csv").write_text("trace_id,reward\nt,1\n")
    logs = read_logs([tmp_path])
    assert len(logs.rollouts) == 1 and not logs.unread


def own() -> Rollout:
    return Rollout(
        id="r1", environment="desk", task=Task(id="desk/1", split="discovery", data={"kind": "single"}), trial=1,
        purpose="diagnosis", policy="p", messages=MESSAGES, token_ids=[1], mask=[1], logprobs=[0.0],
        reference=[{**MESSAGES[1], "informs": ["red"]}], score=Score(reward=0.0, success=False), outcome="failed",
    )  # fmt: skip


def test_captrains_rollouts_keep_ids_and_references_and_use_the_tools_beside_them(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
    publish(tmp_path / "rollouts.jsonl", [own()])
    [rollout] = (logs := read_logs([tmp_path / "rollouts.jsonl"])).rollouts
    assert (rollout.id, rollout.task, rollout.trial, rollout.score) == ("r1", own().task, 1, own().score)
    assert rollout.token_ids == [] and rollout.reference[0]["informs"] == ["red"] and not logs.known_tools
    publish_json(tmp_path / "tools.json", [tool])
    assert read_logs([tmp_path / "rollouts.jsonl"]).known_tools == [tool]
    bent = json.loads((tmp_path / "rollouts.jsonl").read_text())
    bent["task"]["data"]["user_calls"] = [3]
    with pytest.raises(UserError, match="user_calls"):
        read_logs([lines(tmp_path / "rollouts.jsonl", bent)])


class Message:
    """A record like those of pydantic and LangChain."""

    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def model_dump(self, mode: str) -> dict[str, object]:
        return self.fields


def test_rows_in_memory_are_read_like_a_file(tmp_path: Path) -> None:
    expected = [*read_logs([lines(tmp_path / "a.jsonl", ROW, ROW)]).rollouts]
    objects = {**ROW, "messages": [Message(**message) for message in MESSAGES]}
    frame = pd.DataFrame([ROW, {**ROW, "trial": 1}])
    texts = frame.assign(messages=frame["messages"].map(json.dumps))
    for rows in ([ROW, ROW], (row for row in [objects, objects]), frame.drop(columns="trial")):
        logs = logs_of_rows(rows)
        assert [rollout.messages for rollout in logs.rollouts] == [rollout.messages for rollout in expected]
    for table in (frame, texts):
        assert [str(said(rollout)) for rollout in logs_of_rows(table).rollouts] == [str(said(expected[0]))] * 2
    with pytest.raises(UserError, match="row 1 is not an object but int"):
        logs_of_rows([ROW, 3])


BAD_CALL = {**SHAREGPT, "conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "{x"}]}


@pytest.mark.parametrize(
    ("content", "problem", "remedy"),
    [
        (b"", r"no rollout in .*a\.jsonl: the file is empty", "write each dialogue like this"),
        (b" \n\n", r"no rollout in .*a\.jsonl: the file is empty", "write each dialogue like this"),
        (json.dumps(ROW).encode("utf-16"), "it is text in UTF-16", "save it in UTF-8"),
        (b"\x80\xff\n" * 20, "first at line 1: it is not JSON: it is not text in UTF-8", "write each dialogue"),
        (
            json.dumps({**ROW, "reward": "high"}).encode(),
            "the reward 'high' is not a number",
            "write each dialogue like this",
        ),
        (json.dumps({**ROW, "messages": "Hi"}).encode(), "it is of no known format", "ToolSandbox"),
        (json.dumps(BAD_CALL).encode(), r"line 1: a call in the turn '\{x' is not JSON", "correct these entries"),
    ],
)
def test_a_refusal_names_the_problem_and_lists_formats_only_for_an_unknown_one(
    content: bytes, problem: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=problem) as refusal:
        read_logs([tmp_path / "a.jsonl"])
    assert remedy in refusal.value.remedy
    assert ("docs/formats.md says what each needs" in refusal.value.remedy) == ("ToolSandbox" in remedy)


def test_empty_and_missing_files_are_reported_as_such(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text(" \n")
    with pytest.raises(UserError, match="the file is empty"):
        read_logs([tmp_path / "a.json"])
    with pytest.raises(UserError, match="does not exist") as refusal:
        read_logs([tmp_path / "b.json"])
    assert "format" not in refusal.value.remedy


def test_scores_that_match_no_rollout_are_refused(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("trace_id,reward\nelsewhere,1\n")
    with pytest.raises(UserError, match=r"no score of .*scores\.csv matches a rollout: it scores elsewhere"):
        read_logs([lines(tmp_path / "a.jsonl", ROW)], tmp_path / "scores.csv")


def test_the_id_of_a_sharegpt_row_is_its_default_task(tmp_path: Path) -> None:
    rows = {**SHAREGPT, "id": 7}, {**SHAREGPT, "id": "a", "task_id": "b"}
    logs = read_logs([lines(tmp_path / "a.jsonl", *rows)])
    assert [rollout.task.id for rollout in logs.rollouts] == ["chat/7", "chat/b"]


@pytest.mark.parametrize(
    "row",
    [
        {"dialog": [], "label": 1},
        {"role": "user", "content": "Hi"},
        {"messages": "Hi", "reward": 1},
        {"run_type": "llm", "trace_id": "t", "name": "x"},
        {"tasks": [], "simulation": []},
    ],
)
@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv"])
def test_an_unknown_format_is_refused_with_all_formats_and_an_example(
    row: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        pd.DataFrame([{name: json.dumps(value) for name, value in row.items()}]).to_csv(path, index=False)
    else:
        lines(path, row)
    result = CliRunner().invoke(app, ["diagnose", str(path), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError) and not (tmp_path / "out").exists()
    said = str(result.exception)
    assert "it is of no known format" in said and "docs/formats.md says what each needs" in said and EXAMPLE in said
    assert {"tau2", "LangSmith runs", "Langfuse export", "ShareGPT conversations"} <= {*re.split("[:,.] ", said)}


def test_the_example_in_a_refusal_is_valid(tmp_path: Path) -> None:
    assert len(EXAMPLE.splitlines()) == 3
    (tmp_path / "a.json").write_text(EXAMPLE)
    (tmp_path / "b.jsonl").write_text(f"{json.dumps(json.loads(EXAMPLE))}\n" * 3)
    assert len(read_logs([tmp_path / "a.json"]).rollouts) == 1 and len(read_logs([tmp_path / "b.jsonl"]).rollouts) == 3


def copies(name: str, count: int) -> Iterator[object]:
    """Yield rows of a file repeatedly, with longer texts and other trace ids."""
    text = (WRITTEN / name).read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    traces = {row.get("trace_id") or row.get("traceId") for row in rows} - {None}
    for number in range(count):
        renamed = text
        for trace in traces:
            renamed = renamed.replace(trace, f"{number}-{trace}")
        yield from ({**json.loads(line), "metadata": "x" * 5000} for line in renamed.splitlines())


@pytest.mark.parametrize(
    "name", further(["langfuse-5.0.4.jsonl", "langsmith-0.15.0.jsonl", "table.csv", "rollouts.jsonl"])
)
def test_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    peaks = []
    for count in (5, 60, 120):
        path = tmp_path / f"{count}-{name}"
        if name == "table.csv":
            pd.DataFrame([{**ROW, "messages": json.dumps([*MESSAGES, *MESSAGES * 20])}] * count * 4).to_csv(path)
        elif name == "rollouts.jsonl":
            publish(path, (own().model_copy(update={"messages": MESSAGES * 20, "trial": n}) for n in range(count * 4)))
        else:
            lines(path, *copies(name, count))
        tracemalloc.start()
        logs = read_logs([path])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(logs.rollouts) >= count * 2 and not logs.unread
        shutil.rmtree(path, ignore_errors=True)
        del logs
    # A trace keeps its name, scores and place: some hundred bytes, while its messages take kilobytes.
    assert peaks[2] - peaks[1] < 60 * 4 * 600
