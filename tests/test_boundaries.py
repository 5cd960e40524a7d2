"""Odd inputs: each is refused in one message that names it, and nothing is written."""

import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from support.finished import Captrain
from support.waiting import PATIENCE

from captrain.errors import UserError
from captrain.interop import export_rollouts
from captrain.interop.logs.outcomes import Scores
from captrain.models import Endpoint
from captrain.planning.doctor import _answer as endpoint_finding
from captrain.projects import benchmark, check_benchmark, examination
from captrain.run import compose_spec, require_apart


def test_a_trace_has_one_score(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("trace_id,reward\nt,1\nt,0\n")
    with pytest.raises(UserError, match="scores trace_id t 2 times"):
        Scores(tmp_path / "scores.csv")


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


@pytest.mark.parametrize("name", ["results/rollouts", "src", "conf", ".git/x", "diagnosis/../src", "link/x", "tests"])
def test_a_diagnosis_is_not_written_into_what_a_project_keeps(name: str, tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "link").symlink_to("results")
    with pytest.raises(UserError, match="uses itself"):
        require_apart(tmp_path / name)
    require_apart(tmp_path / "diagnosis")


def test_an_export_does_not_replace_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("{}\n")
    with pytest.raises(UserError, match="cannot be the output"):
        export_rollouts([path], "openai", path)


@pytest.mark.parametrize(
    ("code", "fault"), [("raise KeyError('x')", "KeyError: 'x'"), ("import json; json.loads('{')", "JSONDecodeError")]
)
def test_a_fault_of_the_project_s_own_stage_is_not_called_ours(
    code: str, fault: str, tmp_path: Path, captrain: Captrain
) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/mine.py").write_text(f"{code}\n")
    status, _, err = captrain(tmp_path, "run", "mine")
    assert status == 2 and "stages/mine.py, line 1 raised " in err and fault in err and "bug" not in err


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("params.yaml", "experiment: smoke\nseed: 0\noverrides: []\nseed: 1\n", "names seed twice"),
        ("dvc.yaml", "stages: {}\nstages: {}\n", "DVC cannot read the pipeline"),
        ("dvc.lock", "schema: 2.0\nstages: 5\n", "DVC cannot read the pipeline"),
    ],
)
def test_a_pipeline_that_dvc_does_not_read_is_one_message(
    name: str, text: str, reason: str, tmp_path: Path, captrain: Captrain
) -> None:
    assert captrain(tmp_path, "init", ".")[0] == 0
    (tmp_path / name).write_text(text)
    status, _, err = captrain(tmp_path, "run")
    assert status == 2 and reason in err and "Traceback" not in err


BENCHMARK = """
class Odd:
    name, tools = "odd", []
    def tasks(self, split, count): return []
    def open(self, task, key=None): ...
    def reference(self, task): return []
    def score(self, task, messages): return {}
"""


ENDLESS = """
    def size(self, split):
        while True:
            try:
                while True:
                    split += " "[1:]
            except BaseException:
                split += " "[1:]
"""


@pytest.mark.parametrize(
    ("code", "line", "method", "reason"),
    [
        ('    def size(self, split): return "many"', 8, "size", "is 'many'"),
        ("    def size(self, split): import os; os._exit(0)", 8, "size", "ended the process (exit status 0)"),
        ("    def size(self, split): import os; os.kill(os.getpid(), 9)", 8, "size", "ended the process (signal 9)"),
        ("    def size(self, split): import os; os.closerange(0, 99); os._exit(1)", 8, "size", "ended the process"),
        ("    @property\n    def tools(self): import os; os._exit(5)", 8, "tools", "exit status 5"),
        ("    def size(self, split):\n        while True: split = split[:]", 9, "size", "did not return within 0.2 s"),
        (ENDLESS, 9, "size", "did not return within"),
        ("    def size(self, split): return sum(range(10**14))", 8, "size", "let nobody interrupt it"),
    ],
)
def test_whatever_a_method_of_a_benchmark_does_is_a_problem_at_its_line(
    code: str, line: int, method: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"odd_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(f"{BENCHMARK}{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(benchmark, "LIMIT", 1.0)
    problems = check_benchmark(f"{name}:Odd", limit=0.2).problems
    [found] = [problem for problem in problems if method in problem.text and reason in problem.text]
    assert found.place.endswith(f"{name}.py:{line}"), found


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "no end within 0.3 s"),
        ("import os; os._exit(0)", "ended the process (exit status 0)"),
        ("import ctypes; ctypes.string_at(0)", "ended the process (signal 11)"),
        ("class Odd:\n    def __init__(self):\n        while True: pass", "no end within 0.3 s"),
        ("class Odd:\n    def __init__(self): import os; os._exit(3)", "ended the process (exit status 3)"),
        ("sum(range(10**14))", "let nobody interrupt it"),
    ],
)
def test_a_benchmark_that_is_never_built_is_one_message(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"unbuilt_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(f"{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (benchmark, examination):
        monkeypatch.setattr(module, "LIMIT", 0.3)
    with pytest.raises(UserError) as caught:
        check_benchmark(f"{name}:Odd", limit=0.1)
    assert reason in caught.value.problem


def test_what_a_benchmark_started_ends_with_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starting.py").write_text(
        f"{BENCHMARK}    def size(self, split):\n"
        "        import os, pathlib, subprocess\n"
        "        pathlib.Path(__file__).with_name('pid').write_text(str(subprocess.Popen(['sleep', '99']).pid))\n"
        "        os._exit(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_benchmark("starting:Odd", limit=1)
    number = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(number).wait(PATIENCE) is None


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
        endpoint = Endpoint("m", endpoint="URL_OF_TEST", key="KEY_OF_TEST", retries=0, timeout=PATIENCE)
        with pytest.raises(UserError, match="does not list its models"):
            endpoint_finding(endpoint)
