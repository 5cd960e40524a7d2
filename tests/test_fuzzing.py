"""Nothing that is read, and no setting, ends in anything but records or one message, however it was written:
property-based.

Each reader of files of others gets documents that begin as one of its own and are bent somewhere, and bytes that were
never any. `CAPTRAIN_FUZZ` says how many of each; what was found once stays in `FOUND`.
"""

import copy
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.finished import Captrain

from captrain.config import load_choice, load_spec
from captrain.contract import calls_of
from captrain.diagnosis import diagnose, publish_diagnosis, read_labels
from captrain.environments import read_passports
from captrain.errors import UserError
from captrain.interop import read_logs
from captrain.records import Passport, Rollout, load, read_json, read_table

EXAMPLES = int(os.environ.get("CAPTRAIN_FUZZ", "30"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=20_000,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
CALL = {"id": "c", "type": "function", "function": {"name": "get_order", "arguments": '{"id": "#1"}'}}
MESSAGES = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "Cancel #1."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": '{"status": "open"}'},
    {"role": "assistant", "content": "Done."},
]
TOOL = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object", "properties": {}}}}
TASK = {
    "id": "1",
    "user_scenario": {"instructions": {"domain": "retail", "reason": "x"}},
    "evaluation_criteria": {"actions": [{"name": "get_order", "arguments": {"id": "#1"}}], "communicate_info": ["1"]},
}
SIMULATION = {
    "task_id": "1", "trial": 0, "messages": MESSAGES, "termination_reason": "user_stop",
    "reward_info": {"reward": 1.0, "reward_breakdown": {"DB": 1.0}, "action_checks": []},
}  # fmt: skip
SPAN = {"traceId": "t", "attributes": [{"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(
    [{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}])}}]}  # fmt: skip
DOCUMENTS: dict[str, tuple[str, Any]] = {
    "chat": ("log.jsonl", {"messages": MESSAGES, "reward": 1, "tools": [TOOL], "reference": [MESSAGES[2]]}),
    "tau2": ("log.json", {"info": {"agent_info": {"llm": "m"}}, "tasks": [TASK], "simulations": [SIMULATION]}),
    "inspect": ("log.json", {"version": 2, "eval": {"model": "m"}, "samples": [
        {"id": 1, "epoch": 1, "messages": MESSAGES, "scores": {"a": {"value": "C"}}, "target": "get_order({})"}]}),
    "verifiers": ("log.jsonl", {"task": {"id": 1}, "traces": [{"nodes": [
        {"parent": None, "message": MESSAGES[1]}, {"parent": 0, "message": MESSAGES[4]}],
        "rewards": {"a": {"score": 1}}, "tools": [TOOL["function"]]}]}),
    "nemo": ("log.jsonl", {"responses_create_params": {"input": "Hi", "tools": [{"name": "a"}]}, "reward": 1,
                           "response": {"output": [{"type": "message", "role": "assistant", "content": "x"}]}}),
    "agentdojo": ("log.json", {"suite_name": "s", "user_task_id": "u", "messages": MESSAGES, "utility": True}),
    "atif": ("log.json", {"schema_version": "ATIF-v1.2", "agent": {"name": "a", "version": "1"}, "steps": [
        {"step_id": 1, "source": "user", "message": "Hi"}, {"step_id": 2, "source": "agent", "message": "x"}]}),
    "bfcl": ("log_score.json", [{"accuracy": 0.0, "correct_count": 0, "total_count": 1}, {
        "id": "multi_turn_base_1", "model_name": "m", "error": {"error_type": "a"},
        "possible_answer": [["f(x=1)", "f(2)"]], "inference_log": [{"begin_of_turn_query": MESSAGES[1:2], "step_0": [
            {"role": "assistant", "content": [{"f": "{}"}]}, {"role": "tool", "content": "1"},
            {"role": "handler_log", "model_response_decoded": ["f(x=3)"]}]}]}]),
    "responses": ("log.jsonl", {"input": "Hi", "instructions": "Help.", "reward": 1, "tools": [TOOL["function"]],
        "output": [{"type": "reasoning"}, {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
                   {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}]}),
    "langchain": ("log.jsonl", {"reward": 1, "messages": [
        {"type": "human", "data": {"type": "human", "content": "Hi"}},
        {"lc": 1, "id": ["a", "AIMessage"], "kwargs": {"content": [{"type": "text", "text": "x"}], "tool_calls": [
            {"id": "c", "name": "get_order", "args": {"id": "#1"}}]}},
        {"type": "tool", "content": "open", "tool_call_id": "c", "status": "error"}]}),
    "sharegpt": ("log.jsonl", {"reward": 1, "system": "Help.", "tools": "[]", "conversations": [
        {"from": "human", "value": "Hi"}, {"from": "function_call", "value": '{"name": "a", "arguments": {}}'},
        {"from": "observation", "value": "1"}, {"from": "gpt", "value": '<tool_call>{"name": "a"}</tool_call>'}]}),
    "langsmith": ("log.jsonl", {
        "id": "r", "trace_id": "t", "run_type": "chain", "inputs": {"messages": [MESSAGES[1:2]]},
        "outputs": {"generations": [[{"message": MESSAGES[4]}]]}, "feedback_stats": {"correct": {"n": 1, "avg": 1}},
        "extra": {"invocation_params": {"tools": [TOOL]}}, "child_runs": [
            {"id": "s", "run_type": "llm", "inputs": {"messages": MESSAGES[:4]}, "outputs": {"choices": [
                {"message": MESSAGES[4]}]}}]}),
    "langfuse": ("log.jsonl", {"id": "t", "input": "Hi", "output": None, "scores": [
        {"name": "correct", "value": 1, "dataType": "NUMERIC", "subject": {"kind": "trace", "id": "t"}}],
        "observations": [{"id": "o", "traceId": "t", "type": "GENERATION", "model": "m", "output": MESSAGES[4],
                          "input": json.dumps({"messages": MESSAGES[:4], "tools": [TOOL]})}]}),
    "own": ("log.jsonl", {
        "id": "r", "environment": "e", "trial": 0, "purpose": "diagnosis", "policy": "p", "outcome": "failed",
        "messages": MESSAGES, "reference": MESSAGES[2:3],
        "score": {"reward": 0, "success": False, "parts": {"milestone 1": 0}},
        "task": {"id": "e/1", "split": "discovery", "data": {
            "script": "x", "user_calls": [{"name": "a", "arguments": {}}], "graded": ["db"],
            "milestones": [{"tool": "a"}]}}}),
    "spans": ("log.jsonl", {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}),
}  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**40), 10**40), st.floats(), st.text(max_size=8),
    st.sampled_from([[], {}, [[]], {"a": 1}, "\ud800", "../..", "\x1b[31m", "9" * 5000, [None], {"": {}}, -1, 1e999]),
)  # fmt: skip
FOUND: list[tuple[str, list[Any], Any]] = [
    ("chat", ["messages", 0, "role"], []),
    ("chat", ["messages", 2, "tool_calls"], {"a": 1}),
    ("chat", ["messages", 2, "tool_calls", 0, "function", "arguments"], "[" * 100_000),
    ("chat", ["tools", 0, "function", "name"], []),
    ("chat", ["tools", 0, "function", "parameters"], {"properties": []}),
    ("chat", ["messages", 4, "content"], "\ud800"),
    ("tau2", ["tasks", 0, "evaluation_criteria"], "x"),
    ("tau2", ["tasks", 0, "evaluation_criteria", "actions"], 3),
    ("tau2", ["simulations", 0, "messages"], 3),
    ("tau2", ["tasks", 0, "evaluation_criteria", "actions", 0, "name"], []),
    ("tau2", ["tasks", 0, "evaluation_criteria", "actions", 0, "name"], None),
]
"""Documents, the place in them, and what stood there when something broke."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, element in inner for place in places(element, (*path, key)))]


def bent(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The document with another value in a place."""
    if not place:
        return value
    changed = copy.deepcopy(document)
    target = changed
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return changed


def survives(action: Callable[[], object]) -> None:
    """Run it: a result or a `UserError`, whose message no Python error is named in."""
    try:
        action()
    except UserError as error:
        assert "Error" not in error.problem and "\x1b" not in error.problem, error.problem


def read_and_diagnose(path: Path) -> None:
    from captrain.config import Selection

    logs = read_logs([path])
    for rollout in logs.rollouts:
        for message in rollout.messages:
            calls_of(message)
    selection = Selection(
        delta=0.2, coverage=0.1, agreement=2, confidence=0.95, floor=0.0, resamples=10, ranking="product"
    )
    diagnosis = diagnose(logs, selection, runs=2, count=4, seed=0)
    publish_diagnosis(diagnosis, path.parent / "out")


@pytest.mark.needs("minutes")
@pytest.mark.parametrize("name", DOCUMENTS)
@FUZZ
@given(data=st.data())
def test_a_log_that_was_bent_anywhere_is_read_or_refused_in_one_message(name: str, data: Any) -> None:
    file, document = DOCUMENTS[name]
    place = data.draw(st.sampled_from(places(document)))
    value = data.draw(ODD)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file)
        path.write_text(json.dumps(bent(document, place, value)) + "\n" + json.dumps(document) * (file[-1] == "l"))
        survives(lambda: read_and_diagnose(path))


@pytest.mark.parametrize(("name", "place", "value"), FOUND)
def test_what_broke_once_does_not_break_again(name: str, place: list[Any], value: Any, tmp_path: Path) -> None:
    file, document = DOCUMENTS[name]
    path = tmp_path / file
    path.write_text(json.dumps(bent(document, tuple(place), value)) + "\n" + json.dumps(document) * (file[-1] == "l"))
    survives(lambda: read_and_diagnose(path))


READERS: dict[str, Callable[[Path], object]] = {
    "log.jsonl": lambda path: read_logs([path]),
    "log.json": lambda path: read_logs([path]),
    "log.eval": lambda path: read_logs([path]),
    "log.csv": lambda path: read_logs([path]),
    "labels.jsonl": lambda path: read_labels([path]),
    "rollouts.jsonl": lambda path: load(path, Rollout),
    "a.passport.json": lambda path: read_passports(path.parent),
    "passport.json": lambda path: read_json(path, Passport),
    "table.csv": read_table,
    "spec.yaml": load_spec,
    "params.yaml": load_choice,
}
BEGINNINGS = [b"", b"{", b"[", b'{"messages": ', b"PK\x03\x04", b"a: &a [*a]\n", b"a,b\n1,", b"\xff\xfe", b"[" * 50_000,
              b'{"a":' * 50_000, b"- " * 5000, b"!!python/object/apply:os.system [id]", b"\x00" * 50]  # fmt: skip


@pytest.mark.needs("minutes")
@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(beginning=st.sampled_from(BEGINNINGS), end=st.binary(max_size=200))
def test_bytes_that_never_were_a_document_are_one_message(name: str, beginning: bytes, end: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(beginning + end)
        survives(lambda: READERS[name](path))


SETTINGS = ["selection.delta", "policy.temperature", "benchmark._target_", "policy.adapter", "evaluation.splits",
            "seed", "merging.methods", "environments.success", "router", "experiment", "hydra.x", "+new.of.mine",
            "base.demonstrations._target_", "~policy", "machine.benchmarks", "policy", "", "@"]  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=12), st.integers(-(10**40), 10**40).map(str), st.floats().map(str),
    st.sampled_from(["", "null", "[", "{a: b", "${x}", "${oc.env:HOME}", "${oc.env:NOPE}", "${seed}", "9" * 5000,
                     "!!python/object/apply:os.system [id]", "[" * 300, "{_target_: os.getcwd}", "os.system",
                     "captrain.policies.local.LocalPolicy", "range(1,3)", "\x1b[31m", "\ud800", "x" * 10_000]),
)  # fmt: skip
MISTAKES = [
    "trainer.checkpoint_every=" + "9" * 5000,  # an error of Python's own
    "baselines.gepa=\x1b[31m",  # the name of an error, and signs that a terminal obeys
    "baselines.solutions.faults=${oc.env:NOPE}",
    "machine.sandbox=" + "x" * 10_000,  # a message of as many characters
]
"""Overrides that broke something once."""


def configure(override: str) -> None:
    """Compose with an override, as every command and stage that takes settings does."""
    from captrain.config import compose_spec

    try:
        compose_spec("smoke", 0, [override], Path(__file__).parents[1] / "conf")
    except UserError as error:
        assert len(str(error)) < 4000, len(str(error))
        raise


@pytest.mark.needs("minutes")
@settings(FUZZ, max_examples=max(10, EXAMPLES // 6))
@given(setting=st.sampled_from(SETTINGS), value=VALUES)
def test_any_override_composes_or_is_one_message(setting: str, value: str) -> None:
    survives(lambda: configure(f"{setting}={value}"))


@pytest.mark.parametrize("override", MISTAKES, ids=lambda override: override[:40])
def test_an_override_that_broke_something_once_is_one_message(
    override: str, captrain: Captrain, tmp_path: Path
) -> None:
    survives(lambda: configure(override))
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text("experiment: smoke\nseed: 0\noverrides: []\n")
    status, out, err = captrain(tmp_path, "plan", override)
    assert status == 2 and not out and err.startswith("error: ") and "Traceback" not in err
    assert len(err) < 4000 and all(sign.isprintable() or sign == "\n" for sign in err)
