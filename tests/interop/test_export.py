"""Exported rollouts, read back by Inspect and by captrain's chat reader."""

import importlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from captrain.contract import tool_call
from captrain.errors import UserError
from captrain.interop.export import NO_TIME, export_rollouts
from captrain.interop.logs.reading import read_logs
from captrain.records import Message, Rollout, Score, Task, Usage, publish


def call(identity: str, name: str, arguments: object) -> dict:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(text: str, role: str = "assistant", **more: object) -> Message:
    return {"role": role, "content": text, **more}


def rollout(name: str, task: int, trial: int, messages: list[Message] | None = None, **more: object) -> Rollout:
    dialogue = messages or [
        said("You are an agent.", "system"),
        said("Cancel order #7.", "user"),
        tool_call("find", {"order": "#7"}),
        said('{"status": "pending"}', "tool", name="find"),
        {**tool_call("cancel", {"order": "#7"}), "content": "I cancel it."},
        said("ok", "tool", name="cancel"),
        said("Done \U0001f600 \u2028."),
    ]
    passed = bool(task % 2)
    score = Score(reward=0.25 + 0.75 * passed, success=passed, parts={"database": 0.5})
    fields: dict = {
        "environment": "desk",
        "purpose": "evaluation",
        "policy": "p0",
        "reference": [tool_call("cancel", {"order": "#7"}), said("Done.")],
        "usage": Usage(prompt_tokens=10, completion_tokens=5),
        "score": score,
        "outcome": "passed" if passed else "failed",
    }
    record = Task(id=f"desk/test/{task:05d}", split="test", data={"kind": "cancel"})
    return Rollout(id=name, task=record, trial=trial, messages=dialogue, **{**fields, **more})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rollouts = [rollout(f"r{task}{trial}", task, trial) for task in range(3) for trial in range(2)]
    failed = {"score": None, "outcome": "error", "error": "the server went away"}
    rollouts += [rollout("e0", 3, 0, [said("Hello", "user")], **failed), rollout("a0", 0, 0, adapter="feed")]
    publish(tmp_path / "rollouts.jsonl", rollouts)
    return tmp_path / "rollouts.jsonl"


def documents(path: Path) -> dict[str, object]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def test_a_log_holds_every_rollout_of_one_arm_as_a_sample_and_an_epoch(file: Path, tmp_path: Path) -> None:
    written = export_rollouts([file], "inspect", tmp_path / "logs")
    assert [path.name for path in written] == ["desk_evaluation_p0_base.eval", "desk_evaluation_p0_feed.eval"]
    base, adapted = (documents(path) for path in written)
    samples = [name for name in base if name.startswith("samples/")]
    assert len(samples) == 7 and "samples/desk/test/00002_epoch_2.json" in samples
    assert {"_journal/start.json", "_journal/summaries/1.json", "summaries.json", "header.json"} <= set(base)
    assert len([name for name in adapted if name.startswith("samples/")]) == 1
    header: dict = base["header.json"]  # type: ignore[assignment]
    assert header["stats"]["started_at"] == header["stats"]["completed_at"] == NO_TIME
    assert header["results"]["completed_samples"] == 6
    assert header["results"]["scores"][0]["metrics"]["accuracy"]["value"] == pytest.approx(2 / 6)


def test_an_infrastructure_error_is_an_error_without_scores(file: Path, tmp_path: Path) -> None:
    log = documents(export_rollouts([file], "inspect", tmp_path / "logs")[0])
    sample: dict = log["samples/desk/test/00003_epoch_1.json"]  # type: ignore[assignment]
    assert sample["error"]["message"] == "the server went away" and "scores" not in sample


def test_inspect_reads_a_log_back(file: Path, tmp_path: Path) -> None:
    log: Any = importlib.import_module("inspect_ai.log")
    path = str(export_rollouts([file], "inspect", tmp_path / "logs")[0])
    found = log.read_eval_log(path)
    assert (found.status, found.eval.model, len(found.samples)) == ("success", "captrain/p0", 7)
    assert found.results.scores[1].metrics["mean"].value == pytest.approx((4 * 0.25 + 2 * 1.0) / 6)
    sample = log.read_eval_log_sample(path, "desk/test/00001", 2)
    assert sample.scores["success"].value == "C" and sample.scores["reward"].metadata == {"database": 0.5}
    assert sample.messages[2].tool_calls[0].arguments == {"order": "#7"}
    assert sample.messages[3].tool_call_id == sample.messages[2].tool_calls[0].id
    assert sample.messages[-1].content == "Done \U0001f600 \u2028."
    assert len(log.read_eval_log_sample_summaries(path)) == 7
    assert log.read_eval_log(path, header_only=True).results.total_samples == 7


def test_invalid_arguments_become_a_parse_error(tmp_path: Path) -> None:
    messages = [
        said("Hello", "user"),
        said("", tool_calls=[call("x1", "find", "[not json")]),
        said("what?", "tool", tool_call_id="x1"),
    ]
    publish(tmp_path / "one.jsonl", [rollout("r", 0, 0, messages)])
    log = documents(export_rollouts([tmp_path / "one.jsonl"], "inspect", tmp_path / "logs")[0])
    sample: dict = log["samples/desk/test/00000_epoch_1.json"]  # type: ignore[assignment]
    (made,) = sample["messages"][1]["tool_calls"]
    assert made["arguments"] == {} and "[not json" in made["parse_error"]
    (chats,) = export_rollouts([tmp_path / "one.jsonl"], "openai", tmp_path / "chats.jsonl")
    assert json.loads(chats.read_text())["messages"][1]["tool_calls"][0]["function"]["arguments"] == "[not json"


def test_chats_have_arguments_as_text_and_ids_on_calls_and_answers(file: Path, tmp_path: Path) -> None:
    (out,) = export_rollouts([file], "openai", tmp_path / "chats.jsonl")
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert len(rows) == 8 and rows[6]["reward"] is None and rows[7]["model"] == "captrain/p0+feed"
    messages = rows[0]["messages"]
    assert json.loads(messages[2]["tool_calls"][0]["function"]["arguments"]) == {"order": "#7"}
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["call_0", "call_1"]
    assert messages[4]["tool_calls"][0]["id"] == "call_1"


def test_results_are_matched_to_calls_by_id_or_by_tool(tmp_path: Path) -> None:
    named = said("", tool_calls=[call("b", "find", {"n": 1}), call("a", "find", {"n": 2})])
    plain = said("", tool_calls=[call("", "f", {}), call("", "g", {}), call("", "f", {})])
    messages = [
        *(said("Hello", "user"), named, said("two", "tool", tool_call_id="a"), said("one", "tool", tool_call_id="b")),
        *(plain, said("1", "tool", name="g"), said("2", "tool", name="f"), said("3", "tool", name="f")),
    ]
    publish(tmp_path / "one.jsonl", [rollout("r", 0, 0, messages)])
    (out,) = export_rollouts([tmp_path / "one.jsonl"], "openai", tmp_path / "chats.jsonl")
    answers = [m["tool_call_id"] for m in json.loads(out.read_text())["messages"] if m["role"] == "tool"]
    assert answers == ["a", "b", "call_3", "call_2", "call_4"]


def test_exported_chats_are_read_back(file: Path, tmp_path: Path) -> None:
    (out,) = export_rollouts([file], "openai", tmp_path / "chats.jsonl")
    rollouts = [*read_logs([out]).rollouts]
    assert [one.score.reward for one in rollouts if one.score] == [0.25, 0.25, 1.0, 1.0, 0.25, 0.25, 0.25]
    assert rollouts[0].messages[2]["tool_calls"][0]["function"]["arguments"] == {"order": "#7"}


@pytest.mark.parametrize("to", ["inspect", "openai"])
def test_equal_rollouts_give_equal_bytes(to, file: Path, tmp_path: Path) -> None:
    first, again = (export_rollouts([file], to, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert not [path for path in tmp_path.rglob("*.tmp")]


def test_a_repeated_rollout_is_written_once(file: Path, tmp_path: Path) -> None:
    once, twice = (export_rollouts(files, "openai", tmp_path / f"{len(files)}")[0] for files in ([file], [file, file]))
    assert once.read_bytes() == twice.read_bytes()


def test_a_result_that_answers_no_call_is_refused_with_its_rollout(tmp_path: Path) -> None:
    publish(tmp_path / "one.jsonl", [rollout("lost", 0, 0, [said("Hello", "user"), said("42", "tool", name="find")])])
    with pytest.raises(UserError, match="rollout lost, message 1"):
        export_rollouts([tmp_path / "one.jsonl"], "inspect", tmp_path / "logs")
    assert not [*tmp_path.glob("logs/*")]


def test_a_file_without_rollouts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(UserError, match="no rollouts"):
        export_rollouts([tmp_path / "none.jsonl"], "openai", tmp_path / "chats.jsonl")


@pytest.mark.parametrize(
    ("text", "problem"), [('{"messages": []}\n', "line 1 is not a whole Rollout"), ("", "is missing")]
)
def test_a_foreign_file_is_refused_with_a_remedy(text: str, problem: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "chats.jsonl").write_text(text)
    with pytest.raises(UserError, match=problem) as refusal:
        export_rollouts([tmp_path / "chats.jsonl"], "openai", tmp_path / "out.jsonl")
    assert "captrain diagnose" in refusal.value.remedy and "dvc repro" not in refusal.value.remedy


def test_an_export_replaces_neither_its_input_nor_foreign_files(file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(UserError, match="is an input and cannot be the output"):
        export_rollouts([file], "openai", file)
    assert file.read_bytes() == before
    for _ in range(2):
        export_rollouts([file], "openai", tmp_path / "chats.jsonl")
        export_rollouts([file], "inspect", tmp_path / "logs")
    log = next((tmp_path / "logs").glob("*.eval"))
    log.write_bytes(b"a log of mine")
    with pytest.raises(UserError, match="captrain did not write it"):
        export_rollouts([file], "inspect", tmp_path / "logs")
    assert log.read_bytes() == b"a log of mine"
