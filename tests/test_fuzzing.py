"""Property-based tests: whatever a file or a setting contains, captrain returns records or ends with one message.

Each reader gets documents of its own format with one place changed, and random bytes. `CAPTRAIN_FUZZ` sets how many.
Inputs that once broke something are kept in `FOUND`.
"""

import copy
import gzip
import io
import json
import os
import re
import signal
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.finished import Captrain

from captrain.agents.openai import reply_message
from captrain.capabilities import read_clauses
from captrain.contract import calls_of
from captrain.diagnosis import (
    diagnose,
    publish_diagnosis,
    read_kinds,
)
from captrain.environments import read_passports
from captrain.errors import InfrastructureError, UserError
from captrain.interop import read_logs
from captrain.models import ContextLengthExceeded, Endpoint
from captrain.planning import Node, make_plan, plan_tables
from captrain.planning.doctor import _answer as listed_models
from captrain.planning.doctor import _tool_call as tool_call
from captrain.records import Passport, Rollout, load, parse_yaml, read_json, read_table
from captrain.run import SelectionSettings, compose_spec, load_choice, load_spec
from captrain.run.compose import compose_data

EXAMPLES = int(os.environ.get("CAPTRAIN_FUZZ", "30"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=20_000,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
LATE = 300
"""Seconds after which an example counts as endless."""
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
    ("tau2", ["simulations", 0, "trial"], []),
    ("own", ["task", "data", "milestones", 0, "tool"], None),
    ("own", ["task", "data", "milestones"], 3),
    ("own", ["task", "data", "milestones"], ["x"]),
    ("own", ["task", "data", "milestones", 0], {"tool": "get_order", "arguments": 3}),
    ("own", ["task", "data", "milestones", 0], {"message": 3}),
    ("own", ["task", "data", "milestones", 0], {"state": 3}),
    ("own", ["task", "data", "milestones", 0], {"minefield": 3}),
    ("bfcl", [1, "possible_answer"], "9" * 5000),
    ("verifiers", ["traces", 0, "nodes", 0, "parent"], -1),
    ("verifiers", ["traces", 0, "nodes", 0, "parent"], 0),
]
"""Documents that once broke something: the document, the place, and the value there."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List every place in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, element in inner for place in places(element, (*path, key)))]


def bent(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return the document with another value in a place."""
    if not place:
        return value
    changed = copy.deepcopy(document)
    target = changed
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return changed


def survives(action: Callable[[], object]) -> None:
    """Run it in time, to a result or to a `UserError` whose message names no Python error."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"no end within {LATE} s"))
    signal.alarm(LATE)
    try:
        action()
    except UserError as error:
        assert not re.search(r"[a-z]Error\b", error.problem) and "\x1b" not in error.problem, error.problem
    finally:
        signal.alarm(0)


def read_and_diagnose(path: Path) -> None:
    logs = read_logs([path])
    for rollout in logs.rollouts:
        for message in rollout.messages:
            calls_of(message)
    selection = SelectionSettings(
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
        path.write_text(
            json.dumps(bent(document, place, value)) + "\n" + json.dumps(document) * (file[-1] == "l"), encoding="utf-8"
        )
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
                     "captrain.agents.local.LocalPolicy", "range(1,3)", "\x1b[31m", "\ud800", "x" * 10_000]),
)  # fmt: skip
MISTAKES = [
    "trainer.checkpoint_every=" + "9" * 5000,  # Python's own error
    "baselines.gepa=\x1b[31m",  # terminal escapes
    "baselines.solutions.faults=${oc.env:NOPE}",
    "machine.sandbox=" + "x" * 10_000,  # a very long message
    "benchmark._target_=" + "x" * 10_000,
    "benchmark._target_=captrain." + "x" * 10_000,
]
"""Overrides that once broke something."""


def configure(override: str) -> None:
    """Compose with an override, as every command and stage does."""
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


YAML = st.lists(
    st.sampled_from(
        ["a: ", "&a ", "*a", "*b", "[", "]", "{", "}", ", ", "- ", "\n", "\n  ", "<<: ", "!!python/name:os.system ",
         "!!binary ", "!!set ", "!x ", "? ", "|\n", ">-\n", "---\n", "...\n", "2020-01-01", "0x1f", "1e999", ".nan",
         "~", "true: ", "yes", "'", '"', "#", "%YAML 9.9\n", "%TAG ! x\n", "\t", "\x85", "\u2028", "\ufeff", "9" * 5000,
         "1_0: ", "stages: ", "seed: 0\n", "experiment: smoke\n", "overrides: ", "read", "clauses: ", "=: ", "\\x"]
    ),
    max_size=14,
).map("".join)  # fmt: skip
YAML_READERS: dict[str, Callable[[Path], object]] = {
    "spec.yaml": load_spec,
    "params.yaml": load_choice,
    "kinds.yaml": read_kinds,
    "clauses.yaml": read_clauses,
    "values.yaml": lambda path: parse_yaml(path.read_text(), object, "it"),
    "experiment.yaml": lambda path: compose_mine(path),
}


def compose_mine(path: Path) -> None:
    """Compose with a project's own file in conf/."""
    folder = path.parent / "conf/experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults: [smoke]\n" + path.read_text(encoding="utf-8"))
    compose_spec("mine", 0, [], folder.parent)


@pytest.mark.needs("minutes")
@pytest.mark.parametrize("name", YAML_READERS)
@settings(FUZZ, max_examples=max(10, EXAMPLES // 2))
@given(text=YAML)
@example(text="!!set \n- ")
def test_yaml_of_any_pieces_is_read_or_is_one_message(name: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        survives(lambda: YAML_READERS[name](path))


CELLS = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["t", "", '"', "1e999", "9" * 5000, "1_0", "\u0661", "=1+1", "\0", "\ud800", "x" * 200_000]),
)


@pytest.mark.needs("minutes")
@FUZZ
@given(
    head=st.sampled_from(
        ["trace_id,reward", "reward,trace_id", "trace_id,reward,reward", "trace_id", "", "\ufefftrace_id,reward"]
    ),
    rows=st.lists(st.lists(CELLS, max_size=4), max_size=4),
    separator=st.sampled_from([",", ",", ";", "\t"]),
)
@example(head="reward,trace_id", rows=[["0"], ["0"]], separator=",")
def test_scores_of_any_cells_are_read_or_refused_in_one_message(
    head: str, rows: list[list[str]], separator: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "scores.csv"), Path(folder, "log.jsonl")
        text = "\n".join([head, *(separator.join(row) for row in rows)])
        path.write_bytes(text.encode(errors="surrogatepass"))
        log.write_text(json.dumps(DOCUMENTS["spans"][1]), encoding="utf-8")
        survives(lambda: read_logs([log], path))


def packed(member: bytes, way: int) -> bytes:
    """Pack the samples of an Inspect log: stored, deflated, in zstd, or with a damaged directory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if way == 1 else zipfile.ZIP_STORED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"model": "m"}}))
        archive.writestr("samples/1_epoch_1.json", zstandard.compress(member) if way == 2 else member)
        archive.writestr("samples/../../x.json", member)
    content = buffer.getvalue()
    return content.replace(b"\x00\x00", b"\x5d\x00", 2) if way == 2 else content


@pytest.mark.needs("minutes")
@FUZZ
@given(data=st.data())
def test_an_archive_that_was_bent_anywhere_is_read_or_refused_in_one_message(data: Any) -> None:
    sample = DOCUMENTS["inspect"][1]["samples"][0]
    place = data.draw(st.sampled_from(places(sample)))
    member = json.dumps(bent(sample, place, data.draw(ODD))).encode()
    way = data.draw(st.integers(0, 4))
    content = gzip.compress(member) if way == 4 else packed(member, way)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content = content[:at] + data.draw(st.binary(max_size=3)) + content[at + data.draw(st.integers(0, 3)) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, data.draw(st.sampled_from(["log.eval", "log.json.gz", "log.jsonl", "log.json", "log.zip"])))
        path.write_bytes(content)
        survives(lambda: read_and_diagnose(path))


NUMBERS = st.one_of(
    st.integers(-(10**40), 10**40).map(str),
    st.floats().map(str),
    st.sampled_from(["0", "-1", "1", "1e30", "1e308", "1e999", "-inf", "nan", "1e-400", "0.5", "2147483648", "1_000",
                     "0x10", "007", "1e3", "true", str(2**63), str(2**64), "9" * 5000, "1000000000000"]),
)  # fmt: skip


def numeric_settings(value: object, name: str = "") -> list[str]:
    """List the names of all numeric settings below one."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in numeric_settings(inner, f"{name}.{key}".strip("."))]
    return [name] if isinstance(value, int | float) and not isinstance(value, bool) else []


NUMERIC = numeric_settings(compose_data("smoke", 0, [], Path(__file__).parents[1] / "conf"))


def plan_with(override: str) -> None:
    """Compose with an override and make the plan."""
    spec = compose_spec("smoke", 0, [override], Path(__file__).parents[1] / "conf")
    plan = make_plan(spec, Node(), "it")
    console = Console(file=io.StringIO(), width=120)
    console.print(*plan_tables(plan))
    plan.refuse_impossible()


@pytest.mark.needs("minutes")
@settings(FUZZ, max_examples=max(10, EXAMPLES // 4))
@given(setting=st.sampled_from(NUMERIC), number=NUMBERS)
def test_a_setting_of_any_number_is_planned_or_is_one_message(setting: str, number: str) -> None:
    survives(lambda: plan_with(f"{setting}={number}"))


CHAT = {
    "id": "x", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [1],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "choices": [{
        "index": 0, "finish_reason": "stop", "token_ids": [1], "message": {
            "role": "assistant", "content": "B", "refusal": None, "tool_calls": [CALL]},
        "logprobs": {"content": [{"token": "B", "logprob": -1.0, "top_logprobs": [{"token": "B", "logprob": -1.0}]}]},
    }],
}  # fmt: skip
TOKENS = {"model": "m", "choices": [{"token_ids": [1], "logprobs": {
    "token_logprobs": [-1.0], "top_logprobs": [{"token_id:1": -1.0}]}}]}  # fmt: skip
MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}
HEADERS = st.sampled_from([{}, {}, {"Content-Type": "text/html"}, {"Content-Type": "application/json; charset=x"},
    {"Content-Encoding": "gzip"}, {"Retry-After": "9" * 400}, {"Location": "file:///etc/passwd"}])  # fmt: skip
STATUSES = st.sampled_from([200] * 6 + [204, 301, 400, 401, 402, 404, 413, 429, 500, 503, 999])


@pytest.fixture(scope="module")
def asking() -> Iterator[tuple[dict[str, Callable[[], object]], list[Any]]]:
    """Yield every kind of request to an endpoint, and a list for the status, headers and bytes of its next answer."""
    answer: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            status, headers, body = answer
            self.send_response(status)
            for name, value in (
                {"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if status != 204 else b"")

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ |= {"URL_OF_FUZZ": f"http://127.0.0.1:{server.server_port}/v1", "KEY_OF_FUZZ": "none"}
        model = Endpoint("m", endpoint="URL_OF_FUZZ", key="KEY_OF_FUZZ", retries=0, timeout=5)
        user = [{"role": "user", "content": "Hi"}]
        yield (
            {
                "chat": lambda: reply_message(model.chat(messages=user).choices[0].message),
                "tokens": lambda: model.complete([1]),
                "models": lambda: listed_models(model),
                "tool": lambda: tool_call(model),
            },
            answer,
        )
        server.shutdown()


ANSWERS = {"chat": CHAT, "tokens": TOKENS, "models": MODELS, "tool": CHAT}


def test_a_place_of_a_member_before_its_archive_costs_one_sample(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    content = packed(json.dumps(DOCUMENTS["inspect"][1]["samples"][0]).encode(), 0)
    path.write_bytes(content[1:])
    survives(lambda: read_and_diagnose(path))


@pytest.mark.needs("minutes")
@pytest.mark.parametrize("name", ANSWERS)
@FUZZ
@given(data=st.data())
def test_any_answer_of_an_endpoint_is_taken_or_is_one_message(
    name: str, asking: tuple[dict[str, Callable[[], object]], list[Any]], data: Any
) -> None:
    questions, answer = asking
    place = data.draw(st.sampled_from(places(ANSWERS[name])))
    body = json.dumps(bent(ANSWERS[name], place, data.draw(ODD))).encode()
    body = data.draw(st.one_of(st.just(body), st.just(body), st.binary(max_size=50), st.sampled_from(BEGINNINGS)))
    answer[:] = [data.draw(STATUSES), data.draw(HEADERS), body]
    try:
        survives(questions[name])
    except (InfrastructureError, ContextLengthExceeded) as fault:
        assert "\x1b" not in str(fault) and len(str(fault)) < 1500
