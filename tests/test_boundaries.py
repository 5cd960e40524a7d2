"""Odd inputs at the edges: each is refused in one message that names it, and nothing is written."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from captrain.config import compose_spec
from captrain.diagnosis import read_labels
from captrain.errors import UserError
from captrain.execution import require_apart
from captrain.execution.boundary import USER, ending
from captrain.interop import export_rollouts
from captrain.interop.logs.spans import read_scores
from captrain.models import Endpoint
from captrain.planning.doctor import _answer as endpoint_finding
from captrain.projects import check_benchmark

LABEL = '{"rollout": "r", "outcome": "failed", "labels": {"a": "LACKING"}'


@pytest.mark.parametrize(
    "line",
    [
        LABEL + ', "run": true}',
        LABEL + ', "suspect": "yes"}',
        LABEL + ', "count": 1' + "0" * 30 + "}",
        LABEL + ', "outcome": "passed"}',
        LABEL.replace('"LACKING"', '{"verdict": "LACKING", "message": -3}') + "}",
    ],
)
def test_labels_that_are_not_what_they_should_be_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match="line 1"):
        read_labels([path])


def test_a_trace_has_one_score(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("trace_id,reward\nt,1\nt,0\n")
    with pytest.raises(UserError, match="scores trace t 2 times"):
        read_scores(tmp_path / "scores.csv")


@pytest.mark.parametrize("text", ["policy:\n  1: a\n", "5: x\n"])
def test_a_setting_in_conf_is_named_by_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\ndefaults: [smoke]\n{text}")
    with pytest.raises(UserError):
        compose_spec("mine", 0, [], tmp_path)


@pytest.mark.parametrize("number", ["1e30", "9" * 31])
def test_a_number_beyond_any_run_is_refused(number: str) -> None:
    with pytest.raises(UserError, match="count"):
        compose_spec("smoke", 0, [f"capabilities.count={number}"], Path(__file__).parents[1] / "conf")


@pytest.mark.parametrize("name", ["results/rollouts", "src", "conf", ".git/x"])
def test_a_diagnosis_is_not_written_into_what_a_project_keeps(name: str, tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    with pytest.raises(UserError, match="keeps for its own"):
        require_apart(tmp_path / name)
    require_apart(tmp_path / "diagnosis")


def test_an_export_does_not_replace_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("{}\n")
    with pytest.raises(UserError, match="would be replaced"):
        export_rollouts([path], "openai", path)


def test_a_fault_of_the_project_s_own_stage_is_not_called_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise KeyError('x')\n")
    with pytest.raises(KeyError) as caught:
        exec(compile((tmp_path / "mine.py").read_text(), str(tmp_path / "mine.py"), "exec"), {})
    status, text = ending(caught.value)
    assert status == USER and "mine.py, line 1 raised KeyError" in text


BENCHMARK = """
class Odd:
    name, tools = "odd", []
    def size(self, split): return "many"
    def tasks(self, split, count): return []
    def open(self, task, key=None): ...
    def reference(self, task): return []
    def score(self, task, messages): return {}
"""


def test_a_size_that_is_no_number_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_size.py").write_text(BENCHMARK)
    monkeypatch.syspath_prepend(tmp_path)
    problems = check_benchmark("odd_size:Odd").problems
    assert any(problem.method == "size" and "'many'" in problem.text for problem in problems)


@pytest.mark.parametrize("answer", [[], None, 3, {"data": 5}, {"data": [{"name": "m"}]}, {"data": [None]}, "x"])
def test_odd_lists_of_models_are_findings_of_the_doctor(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("URL_OF_TEST", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("KEY_OF_TEST", "none")
        endpoint = Endpoint("m", endpoint="URL_OF_TEST", key="KEY_OF_TEST", retries=0, timeout=5)
        finding = endpoint_finding("endpoint", endpoint, "m")
    assert finding.passed is False and "does not list its models" in finding.detail
