"""Exported environments: packages for OpenEnv, verifiers and TRL, each run by the standard's own runner."""

import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.exported import NAME, make_project
from support.finished import Captrain
from support.installations import interpreter
from support.recorded import record, speaking
from support.rooms import Rooms
from support.training import passport
from support.waiting import PATIENCE, until

from captrain.environments.synthesizer import Brief
from captrain.environments.templates import TemplateSynthesizer
from captrain.projects import export_environment
from captrain.records import Capability, CheckResult, Passport, publish_json, publish_text
from captrain.run import Component, ModelAccess

MODULE = f"captrain_{NAME}"
DRIVERS = Path(__file__).parent / "drivers"
OPENENV, VERIFIERS = interpreter("openenv"), interpreter("verifiers")
STANDARDS = ("openenv", "verifiers", "trl")
EPISODES = 100
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose environment is exported for all standards, with a hundred recorded episodes."""
    folder = tmp_path_factory.mktemp("project")
    path = make_project(folder)
    episodes = record(path, EPISODES)
    (folder / "episodes.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    for standard in STANDARDS:
        out = folder / standard / MODULE if standard == "openenv" else folder / standard
        export_environment(NAME, folder, standard, out)
    return folder


@pytest.fixture(scope="module")
def episodes(project: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / "episodes.jsonl").read_text().splitlines()]


def bare(**additions: str) -> dict[str, str]:
    """Variables of a process that finds no captrain."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, **additions}


def run(python: str, *arguments: object, **additions: str) -> str:
    command = [python, *map(str, arguments)]
    done = subprocess.run(command, env=bare(**additions), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# Export and its refusals.


def test_an_environment_without_a_valid_passport_is_not_exported(tmp_path: Path, captrain: Captrain) -> None:
    path = make_project(tmp_path)
    beside = path.with_suffix(".passport.json")
    command = ("export-environment", NAME, "--to", "trl", "--out", "package")
    written = Passport.model_validate_json(beside.read_bytes())
    failed = [CheckResult(name="reward of random calls", passed=False, measured=0.9, bound="at most 0.3")]
    publish_json(beside, written.model_copy(update={"passed": False, "checks": failed}))
    status, _, error = captrain(tmp_path, *command)
    assert status == 2 and "has failed its passport: reward of random calls is 0.9" in error
    publish_json(beside, written)
    path.write_text(path.read_text() + "# changed\n")
    status, _, error = captrain(tmp_path, *command)
    assert status == 2 and "is not the file" in error
    beside.unlink()
    status, _, error = captrain(tmp_path, *command)
    assert status == 2 and "has no passport" in error and "captrain validate" in error
    status, _, error = captrain(tmp_path, "export-environment", "flying", "--to", "trl", "--out", "package")
    assert status == 2 and f"choose one of {NAME}" in error
    assert not (tmp_path / "package").exists()


def test_a_package_holds_the_unchanged_file_and_replaces_no_folder(tmp_path: Path, captrain: Captrain) -> None:
    path = make_project(tmp_path)
    status, out, _ = captrain(tmp_path, "export-environment", str(path), "--to", "verifiers", "--out", "package")
    assert status == 0 and "8 files" in out
    assert (tmp_path / "package" / MODULE / "environment.py").read_bytes() == path.read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.md").write_text("keep")
    status, _, error = captrain(tmp_path, "export-environment", NAME, "--to", "verifiers", "--out", "mine")
    assert status == 2 and "not empty" in error
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["notes.md"]


@pytest.mark.parametrize(
    ("standard", "name", "problem"), [("openenv", "reset", "reserves the name reset"), ("trl", "look-up", "look-up")]
)
def test_tools_that_a_standard_cannot_express_are_refused(
    tmp_path: Path, captrain: Captrain, standard: str, name: str, problem: str
) -> None:
    path = make_project(tmp_path)
    path.write_text(path.read_text().replace('"wrap_order"', f'"{name}"'))
    publish_json(path.with_suffix(".passport.json"), passport(path))
    status, _, error = captrain(tmp_path, "export-environment", NAME, "--to", standard, "--out", "package")
    assert status == 2 and problem in error


def test_the_passports_numbers_stand_in_openenvs_validation_fields(project: Path) -> None:
    folder = project / "openenv" / MODULE
    validation = yaml.safe_load((folder / "openenv.yaml").read_text())["validation"]
    assert validation["reward"]["floor_margin"] == 0.95
    assert validation["passport"]["semantic.oracle_max"] == {
        "check": "reward of the reference solution", "measured": 1.0, "bound": "1", "passed": True,
    }  # fmt: skip
    assert set(validation["passport"]) == {
        "semantic.oracle_max", "semantic.floor_gap", "semantic.verifier_determinism",
    }  # fmt: skip
    assert validation["capabilities"]["declared_task_count"] == {"training": 1000, "discovery": 1000, "test": 1000}
    plan = json.loads((folder / "validation/runtime.json").read_text())
    assert plan["reset"]["options"] == {"split": "training", "index": 0} and plan["actions"]


# TRL, which is installed here.


@pytest.fixture(scope="module")
def trl_package(project: Path) -> Iterator[Any]:
    sys.path.insert(0, str(project / "trl"))
    yield importlib.import_module(MODULE)
    sys.path.remove(str(project / "trl"))
    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        del sys.modules[name]


def test_trl_derives_the_targets_schemas_from_the_methods(trl_package: Any) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    world = importlib.import_module(f"{MODULE}.episodes").world()
    for tool in world.tools:
        schema = get_json_schema(getattr(trl_package.Tools(), tool["function"]["name"]))
        schema["function"]["parameters"].setdefault("required", [])
        assert schema == tool


def test_trls_rewards_are_captrains_on_recorded_episodes(trl_package: Any, episodes: list[dict[str, Any]]) -> None:
    completions = [
        [message for message in episode["messages"] if message["role"] in ("assistant", "tool")] for episode in episodes
    ]
    columns = {name: [episode[name] for episode in episodes] for name in ("split", "index")}
    rewards = trl_package.reward(completions, **columns)
    assert rewards == [episode["score"]["reward"] for episode in episodes]
    by_kind = {kind: reward for kind, reward in zip((e["kind"] for e in episodes), rewards, strict=True)}
    assert by_kind["reference"] == 1.0 and by_kind["idle"] == pytest.approx(0.05)


def test_a_trl_trainer_trains_two_steps(
    trl_package: Any, episodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own trainer, tool loop and update, with given answers: half of each group solves the task, half does
    nothing."""
    import torch
    from support.given import given_model
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = trl_package.dataset(count=8)
    world = importlib.import_module(f"{MODULE}.episodes")
    model, tokenizer = given_model(
        [
            (row["prompt"][-1]["content"], world.world().reference(world.task_at(row["split"], row["index"])))
            for row in rows
        ]
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    settings = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, num_generations=4, per_device_train_batch_size=4, use_cpu=True,
        max_completion_length=2000, report_to=[], save_strategy="no", logging_steps=1, learning_rate=1e-2,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=trl_package.reward, environment_factory=trl_package.Tools, train_dataset=rows,
        args=settings, processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in log] == [pytest.approx((1 + 0.05) / 2)] * 2
    assert all(entry["tools/call_frequency"] > 0 and entry["tools/failure_frequency"] == 0 for entry in log)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# OpenEnv, in a separate virtual environment.


def healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[str]:
    """Start the package's server as its README says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [OPENENV, "-m", f"{MODULE}.server.app", "--host", "127.0.0.1", "--port", str(port)]
    with (project / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=project / "openenv", env=bare(), stdout=log, stderr=log)
    try:
        until(lambda: healthy(port) or process.poll() is not None)
        assert process.poll() is None, (project / "server.log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.needs("openenv")
def test_openenvs_client_earns_captrains_rewards_in_the_packages_server(
    server: str, project: Path, episodes: list[dict[str, Any]]
) -> None:
    *played, about = lines(run(OPENENV, DRIVERS / "openenv_driver.py", server, project / "episodes.jsonl"))
    for episode, result in zip(episodes, played, strict=True):
        assert result["total"] == pytest.approx(episode["score"]["reward"]) and result["score"] == episode["score"]
    [reference, idle] = [next(e for e in episodes if e["kind"] == kind) for kind in ("reference", "idle")]
    assert reference["score"]["reward"] == 1.0 and idle["score"]["reward"] == pytest.approx(0.05)
    user_turns = [result for result in played if sum(message["role"] == "user" for message in result["messages"]) > 1]
    assert user_turns, "in one task of ten the user has to be asked"
    assert [tool["name"] for tool in about["tools"]][:2] == ["list_orders", "get_order"] and about["seeded"]


@pytest.mark.needs("openenv")
def test_openenvs_own_validation_passes(server: str, project: Path) -> None:
    tool = str(Path(OPENENV).with_name("openenv"))
    folder = project / "openenv" / MODULE
    static = json.loads(run(tool, "validate", folder, "--level", "static", "--skip-build", "--json"))
    assert static["verdict"] == "pass"
    running = json.loads(run(tool, "validate", "--url", server, "--json"))
    assert running["passed"]
    graded = json.loads(run(OPENENV, DRIVERS / "openenv_graders.py", server, folder))
    assert graded == {
        "runtime.reward_well_formed": "pass", "runtime.observation_schema": "pass", "runtime.state_contract": "pass",
    }  # fmt: skip


# verifiers, in a separate virtual environment.


def readme_commands(project: Path, standard: str) -> list[list[str]]:
    """Return the commands in a package's README."""
    folder = project / standard / MODULE if standard == "openenv" else project / standard
    block = [line[4:] for line in (folder / "README.md").read_text().splitlines() if line.startswith("    ")]
    return [shlex.split(line) for line in block if line.startswith(("pip", "vf-", "python", "openenv"))]


@pytest.mark.needs("verifiers")
def test_the_commands_of_a_tasksets_readme_run(project: Path, tmp_path: Path) -> None:
    _, validate, *evaluate = readme_commands(project, "verifiers")
    tool = str(Path(VERIFIERS).with_name(validate[0]))
    assert [command[0] for command in evaluate] == ["vf-eval", "vf-eval"]
    run(tool, *validate[1:], "-o", tmp_path, "--run.name", "run", "--no-rich", **plays(project))
    summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert summary["checks"]["gold"]["valid"] == 20


@pytest.mark.needs("openenv")
def test_the_commands_of_an_openenv_readme_run(project: Path) -> None:
    static = readme_commands(project, "openenv")[-1]
    command = [str(Path(OPENENV).with_name(static[0])), *static[1:]]
    subprocess.run(command, cwd=project / "openenv" / MODULE, env=bare(), check=True, capture_output=True)


def test_packages_have_unique_names_and_say_who_wrote_the_environment(project: Path, tmp_path: Path) -> None:
    names = {
        re.search(r'^name = "(.+)"$', path.read_text(), re.MULTILINE)[1]  # pyright: ignore[reportOptionalSubscript]
        for path in project.glob("**/pyproject.toml")
    }
    assert len(names) == len(STANDARDS)
    assert "captrain wrote the environment file" in (project / "trl/README.md").read_text()
    desk = Component.model_validate({"_target_": "support.rooms.Rooms"})
    path = tmp_path / "results/environments/wrong_argument.py"
    capability = Capability(id="wrong_argument", name="n", description="d", details={"arguments": ["time"]})
    publish_text(path, TemplateSynthesizer(ModelAccess()).synthesize(Brief(capability, Rooms.tools, (), desk), []))
    made_out = passport(path).model_copy(update={"trusted": False})
    publish_json(path.with_suffix(".passport.json"), made_out)
    export_environment("wrong_argument", tmp_path, "trl", tmp_path / "package")
    text = (tmp_path / "package/README.md").read_text()
    assert "holds the source of `support.rooms.Rooms`" in text and "language model" not in text


def plays(project: Path) -> Mapping[str, str]:
    """Return the variables with which verifiers finds the package, uv beside the interpreter, and no account."""
    binaries = str(Path(VERIFIERS).parent)
    return {"PYTHONPATH": str(project / "verifiers"), "PATH": f"{binaries}:{os.environ['PATH']}", "NO_KEY": "none"}


@pytest.mark.needs("verifiers")
def test_verifiers_scores_traces_as_captrain_scored_the_episodes(project: Path, episodes: list[dict[str, Any]]) -> None:
    scored = lines(
        run(VERIFIERS, DRIVERS / "verifiers_driver.py", MODULE, project / "episodes.jsonl", **plays(project))
    )
    assert [score["reward"] for score in scored] == [pytest.approx(e["score"]["reward"]) for e in episodes]
    assert [bool(score["success"]) for score in scored] == [e["score"]["success"] for e in episodes]


@pytest.mark.needs("verifiers")
def test_verifiers_own_validation_passes(project: Path, tmp_path: Path) -> None:
    tool = str(Path(VERIFIERS).with_name("vf-validate"))
    options = ("-n", 10, "--runtime.type", "subprocess", "--no-rich", "-o", tmp_path, "--run.name", "run")
    run(tool, MODULE, *options, **plays(project))
    summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert summary["checks"]["gold"]["valid"] == summary["checks"]["noop"]["valid"] == 10


@pytest.mark.needs("verifiers")
def test_verifiers_plays_whole_episodes_with_native_tools_and_the_environments_user(
    project: Path, episodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    user = next(
        episode for episode in episodes[6:]
        if episode["kind"] == "reference" and sum(message["role"] == "user" for message in episode["messages"]) > 1
    )  # fmt: skip
    played = [episodes[0], episodes[1], user]
    tool = str(Path(VERIFIERS).with_name("vf-eval"))
    with speaking(played) as address:
        places = ",".join(f'"{episode["index"]}"' for episode in played)
        options = ["--select.include.idx", f"[{places}]", "-m", "scripted", "--client.base-url", address]
        options += [
            "--client.api-key-var",
            "NO_KEY",
            "--no-push",
            "--no-rich",
            "-o",
            str(tmp_path),
            "--run.name",
            "run",
        ]
        run(tool, MODULE, *options, **plays(project))
    traces = [entry["traces"][0] for entry in lines(next(tmp_path.rglob("traces.jsonl")).read_text())]
    rewards = {trace["task"]["data"]["index"]: trace["rewards"]["reward"]["score"] for trace in traces}
    assert rewards == {episode["index"]: pytest.approx(episode["score"]["reward"]) for episode in played}
    names = [tool["name"] for tool in traces[0]["tools"]]
    assert names[:2] == ["list_orders", "get_order"] and "wrap_order" in names
