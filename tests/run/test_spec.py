"""The configuration, by `compose` and by the compose stage."""

import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from captrain.errors import UserError
from captrain.projects.pipeline import digested, shipped_stages, stage_scripts
from captrain.run import (
    Component,
    Spec,
    build,
    compose_spec,
    load_choice,
    load_spec,
    publish_spec,
    rows,
)
from captrain.run.components import check, nested, takes
from captrain.run.fingerprint import PROTOCOLS

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
STAGES = shipped_stages()


@cache
def compose(experiment: str = "default", *overrides: str, seed: int = 0) -> Spec:
    return compose_spec(experiment, seed, overrides, CONF)


def params_of(stage: str) -> list[str]:
    return [
        key
        for entry in STAGES[stage].get("params", [])
        if isinstance(entry, dict)
        for key in entry.get("results/spec.yaml", [])
    ]


AUTHOR = {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "stages").mkdir()
    shutil.copy(ROOT / "stages/compose.py", tmp_path / "stages")
    # Not the committed params.yaml, which its owner may change.
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"experiment": "default", "seed": 0, "overrides": []}))
    return tmp_path


def python(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *arguments], cwd=workspace, env=environment, capture_output=True, text=True)


def write_params(workspace: Path, **params: object) -> None:
    """Replace parts of params.yaml."""
    path = workspace / "params.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | params))


def run_stage(workspace: Path) -> int:
    """Run the compose stage in this process, which is faster; return its exit status."""
    with contextlib.chdir(workspace):
        try:
            runpy.run_path("stages/compose.py", run_name="__main__")
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code
    return 0


def test_the_fixed_task_mixes_are_experiments() -> None:
    mixes = {name: compose(name).benchmark.settings()["mix"] for name in ("default", "rare", "single", "compound")}
    assert mixes == {"default": "mixed", "rare": "rare", "single": "single", "compound": "compound"}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_composed_spec_round_trips(experiment: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    composed = compose(experiment, "policy.guidance=['check, then write: always']", "base.learning_rate=1e-5")
    publish_spec(composed, path)
    assert load_spec(path) == composed
    again = tmp_path / "again.yaml"
    publish_spec(load_spec(path), again)
    assert again.read_bytes() == path.read_bytes()


def test_settings_of_params_yaml_are_overrides_null_leaves_them_and_the_lines_win(workspace: Path) -> None:
    write_params(
        workspace,
        selection={"delta": 0.3, "coverage": 0.2, "agreement": None},
        environments={"success": [0.1, 0.9]},
        router="classifier",
        overrides=["selection.coverage=0.05"],
    )
    choice = load_choice(workspace / "params.yaml")
    spec = compose(choice.experiment, *choice.overrides)
    assert (spec.selection.delta, spec.selection.coverage, spec.environments.success) == (0.3, 0.05, (0.1, 0.9))
    assert spec.router == compose("default", "router=classifier").router
    assert spec.selection.agreement == compose().selection.agreement


def test_the_committed_params_are_those_of_a_new_project_and_change_nothing() -> None:
    committed, template = (ROOT / name for name in ("params.yaml", "src/captrain/projects/templates/params.yaml"))
    assert load_choice(committed).overrides == load_choice(template).overrides == []
    assert yaml.safe_load(committed.read_text()).keys() == yaml.safe_load(template.read_text()).keys()


def test_an_experiment_of_dvc_sets_a_setting_and_an_unknown_one_is_refused(workspace: Path) -> None:
    template = (ROOT / "src/captrain/projects/templates/params.yaml").read_text()
    (workspace / "params.yaml").write_text(template.replace("EXPERIMENT", "default"))
    stage = {"cmd": f"{sys.executable} stages/compose.py", "params": [{"params.yaml": None}]}
    stage |= {"outs": [{"results/spec.yaml": {"cache": False, "persist": True}}]}
    (workspace / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"compose": stage}}))
    (workspace / ".gitignore").write_text("__pycache__/\n.cache/\n")
    for command in ("git init -q", "python -m dvc init -q", "git add -A", "git commit -qm all"):
        words = [sys.executable if word == "python" else word for word in command.split()]
        subprocess.run(words, cwd=workspace, check=True, env=os.environ | AUTHOR)
    done = python(workspace, "-m", "dvc", "exp", "run", "-q", "-S", "selection.delta=0.3")
    assert done.returncode == 0, done.stderr
    assert load_spec(workspace / "results/spec.yaml").selection.delta == 0.3
    done = python(workspace, "-m", "dvc", "exp", "run", "-S", "+selection.gap=0.3")
    assert done.returncode != 0 and "there is no setting selection.gap" in done.stderr
    assert load_spec(workspace / "results/spec.yaml").selection.delta == 0.3


def test_parallel_threads_compose_their_own_selections() -> None:
    def select(seed: int) -> tuple[int, int]:
        composed = compose_spec("smoke" if seed % 2 else "default", seed, [f"evaluation.tasks={8 + seed}"], CONF)
        return composed.seed, composed.evaluation.tasks

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(select, range(4))) == [(seed, 8 + seed) for seed in range(4)]


def test_reading_a_spec_needs_neither_hydra_nor_torch(tmp_path: Path) -> None:
    publish_spec(compose(), tmp_path / "results/spec.yaml")
    code = (
        "import sys; from captrain.run import load_spec; load_spec(); "
        "print({'hydra', 'torch', 'numpy'} & {*sys.modules})"
    )
    done = python(tmp_path, "-c", code)
    assert done.stdout == "set()\n", done.stderr


def test_composing_imports_no_torch(workspace: Path) -> None:
    code = "import runpy, sys; runpy.run_path('stages/compose.py', run_name='__main__'); print('torch' in sys.modules)"
    done = python(workspace, "-c", code)
    assert re.fullmatch(r"compose +\d+\.\d s   experiment default, seed 0\nFalse\n", done.stdout), done.stderr


def test_params_are_in_the_composed_spec(workspace: Path) -> None:
    write_params(workspace, experiment="rare", seed=7, overrides=["selection.delta=0.15", "router=classifier"])
    assert run_stage(workspace) == 0
    derived = load_spec(workspace / "results/spec.yaml")
    assert derived.seed == 7
    assert derived.benchmark.settings() == {"mix": "rare"}
    assert derived.selection.delta == 0.15
    assert derived.router.target.endswith("ClassifierRouter")


def test_two_processes_compose_the_same_bytes(workspace: Path) -> None:
    python(workspace, "stages/compose.py")
    first = (workspace / "results/spec.yaml").read_bytes()
    python(workspace, "stages/compose.py")
    assert (workspace / "results/spec.yaml").read_bytes() == first


def test_an_unknown_experiment_ends_the_process_with_status_2(workspace: Path) -> None:
    write_params(workspace, experiment="rrae")
    done = python(workspace, "stages/compose.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: unknown experiment 'rrae'",
        "  remedy: did you mean rare? Others: all_methods, compound, default, paper_tau2, paper_toolsandbox, "
        "single, smoke, smollm",
    ]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"experiment": "nothing-like-it"},
            "choose one of all_methods, compound, default, paper_tau2, paper_toolsandbox, rare, single, smoke, smollm",
        ),
        ({"seed": "seven"}, "seed = 'seven'"),
        ({"seed": -1}, "seed = -1"),
        ({"overrides": ["selection.dleta=0.1"]}, "no setting selection.dleta\n  remedy: did you mean delta?"),
        ({"overrides": ["delta=0.1"]}, "there is no setting delta\n  remedy: did you mean selection.delta?"),
        ({"overrides": ["base.zzzz=1"]}, "choose one of model, hidden"),
        ({"overrides": ["policy.temprature=1.0"]}, "did you mean temperature?"),
        ({"overrides": ["router=clasifier"]}, "did you mean classifier?"),
        ({"overrides": ["hydra.job.name=x"]}, "there is no setting hydra.job.name"),
        ({"overrides": ["selection.delta"]}, "not of the form key=value"),
        ({"overrides": ["selection.delta: 0.1"]}, "not of the form key=value"),
        ({"overrides": ["~selection.delta"]}, "not of the form key=value"),
        ({"overrides": ["seed=3"]}, "set `seed:` in params.yaml"),
        ({"overrides": ["base.steps=many"]}, "base.steps = 'many'"),
        ({"overrides": ["base.steps=1.5"]}, "base.steps = 1.5"),
        ({"overrides": ["base.steps=0"]}, "base.steps = 0"),
        ({"overrides": ["base.steps=[1"]}, "/ is invalid: "),
        ({"overrides": ["base.learning_rate=nan"]}, "base.learning_rate"),
        ({"overrides": ["selection.coverage=1.5"]}, "selection.coverage = 1.5"),
        ({"overrides": ["evaluation.trials=0"]}, "evaluation.trials = 0"),
        ({"overrides": ["environments.success=[0.8,0.2]"]}, "the lower bound is above the upper one"),
        ({"overrides": ["+selection.gap=0.1"]}, "there is no setting selection.gap"),
        ({"overrides": ["selection.ranking=mean"]}, "selection.ranking = 'mean'"),
        ({"overrides": ["trainer.loss=tokens"]}, "trainer.loss = 'tokens'"),
        ({"overrides": ["selection.agreement=11"]}, "selection.agreement = 11 exceeds labels.runs = 10"),
        (
            {"overrides": ["baselines.solutions.rounds.tasks=1"]},
            "baselines.solutions.rounds.tasks = 1 cannot be shared among 2 diagnoses",
        ),
        (
            {"overrides": ["policy._target_=captrain.agents.lokal.LocalPolicy"]},
            "no module captrain.agents.lokal",
        ),
        ({"overrides": ["policy._target_=captrain.agents.local.LocalPolicey"]}, "did you mean LocalPolicy?"),
        ({"overrides": ["policy._target_=captrain.ledger.SPLIT_OF"]}, "cannot be called"),
        ({"overrides": ["policy.max_turns=some"]}, "policy.max_turns = 'some'"),
        ({"overrides": ["+machine.benchmarks.tau2.pyton=/x"]}, "did you mean python?"),
        ({"overrides": ["machine.benchmarks.tau2.python=7"]}, "machine.benchmarks.tau2.python = 7"),
        ({"overrides": ["machine.benchmarks.tau2.processes=0"]}, "machine.benchmarks.tau2.processes = 0"),
        ({"overrides": ["+machine.benchmarks.new.data=/x"]}, "machine.benchmarks.new.python is not set"),
        ({"overrides": ["base.model='a b'"]}, "base.model = 'a b'"),
        ({"overrides": ["policy=openai"]}, "policy.name = None"),
        ({"overrides": ["policy=openai", "policy.name='a b'"]}, "base.model = 'a b'"),
        ({"overrides": ["base.pretrained=a@0123456789abcdef", "base.model=b"]}, "set only one of them"),
        ({"overrides": ["base.pretrained=a"]}, "base.pretrained = 'a'"),
        ({"override": []}, "did you mean overrides?"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(f"{key}={value[key]}" for key in value),
)
def test_a_mistake_ends_in_one_message_with_a_remedy(
    workspace: Path, params: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_params(workspace, **params)
    assert run_stage(workspace) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert says in told
    assert told.count("\n  remedy: ") == 1
    assert not (workspace / "results/spec.yaml").exists()


def test_a_row_trained_by_grpo_needs_no_schema_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "      first_two: {from: rollouts, with: rollouts, also: trainer, desc: Two environments}\n"
    text = (ROOT / "dvc.yaml").read_text()
    (tmp_path / "dvc.yaml").write_text(text.replace("      single:", f"{row}      single:", 1))
    monkeypatch.setattr(rows, "shipped", tmp_path.joinpath)
    composed = compose_spec("default", 0, ["+baselines.first_two={run: true, epochs: 2}"], CONF)
    assert dict(composed.baselines)["first_two"].differences() == {"epochs": 2}
    publish_spec(composed, tmp_path / "spec.yaml")
    assert load_spec(tmp_path / "spec.yaml") == composed
    with pytest.raises(UserError, match="baselines.first_tow is not a row"):
        compose_spec("default", 0, ["+baselines.first_tow.run=true"], CONF)
    with pytest.raises(UserError, match=r"no setting baselines\.first_two\.epoch(.|\n)*epochs"):
        compose_spec("default", 0, ["+baselines.first_two={run: true, epoch: 2}"], CONF)


def test_a_misspelt_key_in_conf_is_found(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = workspace / "conf/experiment/default.yaml"
    path.write_text(path.read_text() + "selection:\n  dleta: 0.1\n")
    assert run_stage(workspace) == 2
    told = capsys.readouterr().err
    assert "there is no setting selection.dleta" in told and "did you mean delta?" in told


def test_a_damaged_spec_names_file_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    with pytest.raises(UserError, match=r"spec\.yaml is missing(.|\n)*dvc repro compose"):
        load_spec(path)
    publish_spec(compose(), path)
    path.write_text(path.read_text().partition("evaluation:")[0])
    with pytest.raises(UserError, match=r"spec\.yaml: .* is not set(.|\n)*dvc repro compose"):
        load_spec(path)
    path.write_text("seed: [0")
    with pytest.raises(UserError, match=r"spec\.yaml is not YAML"):
        load_spec(path)


def test_a_component_is_built_from_settings_and_runtime_arguments() -> None:
    component = Component.model_validate({"_target_": "builtins.dict", "a": 1, "b": [2]})
    assert build(component, dict, b=3, run="x") == {"a": 1, "b": 3, "run": "x"}


class Inner:
    def __init__(self, model: str = "", *, heat: float) -> None:
        self.heat = heat


class Outer:
    def __init__(self, machine: object = None, *, user: Inner | None = None, plain: int = 0) -> None:
        self.machine, self.user = machine, user


class Needy:
    def __init__(self, model: str) -> None: ...


def outer(**settings: Any) -> Component:
    return Component.model_validate({"_target_": f"{__name__}.Outer", **settings})


def inner(name: str = "Inner", **settings: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **settings}


def test_a_component_may_be_a_setting_of_another() -> None:
    component = outer(user=inner(heat=0.5))
    check("benchmark", component)
    built = build(component, Outer, machine="here")
    assert isinstance(built.user, Inner) and built.user.heat == 0.5 and built.machine == "here"
    check("benchmark", outer(user=None))
    assert build(outer(user=None), Outer).user is None


class Served(Protocol):
    machine: object

    def answer(self) -> str: ...


class Lazy:
    """Has the member, whose evaluation would start a server."""

    def __init__(self, *, calls: int = 0) -> None:
        self.answer = str

    @property
    def machine(self) -> object:
        raise AssertionError("it was read")


def test_a_component_of_the_wrong_kind_is_rejected_by_its_key() -> None:
    lazy = Component.model_validate({"_target_": f"{__name__}.Lazy"})
    assert isinstance(build(lazy, Served), Lazy)
    with pytest.raises(UserError, match=rf"{__name__}.Outer cannot be used as Served: it lacks answer"):
        build(outer(), Served)
    with pytest.raises(UserError, match=rf"_target_ = {__name__}.Outer is not a subclass of Inner(.|\n)*params.yaml"):
        build(outer(), Inner)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"user": inner(heat="warm")}, "benchmark.user.heat = 'warm'"),
        ({"user": inner(heat=0.5, cold=1)}, "has no setting benchmark.user.cold"),
        ({"user": inner()}, "benchmark.user.heat is not set"),
        ({"user": inner("Innre")}, "benchmark.user._target_ = .*did you mean Inner"),
        ({"user": inner("Needy")}, "benchmark.user._target_ = .* needs model"),
        ({"user": {"_target_": 7}}, "benchmark.user._target_ = 7"),
        ({"user": {"heat": 0.5}}, "benchmark.user = .*null or a component"),
        ({"user": "someone"}, "benchmark.user = 'someone'.*null or a component"),
        ({"plain": inner(heat=0.5)}, "benchmark.plain = "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_a_component_within_a_component_names_its_key(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"(?s){says}"):
        check("benchmark", outer(**settings))


def test_parameters_are_known_without_building() -> None:
    assert takes(outer(), "machine") and not takes(outer(), "model")
    with pytest.raises(UserError, match="no module captrain.nothing"):
        takes(Component.model_validate({"_target_": "captrain.nothing.Outer"}), "machine")


@pytest.mark.parametrize("key", ["policy.key", "benchmark.user.key", "benchmark.user.endpoint"])
def test_an_api_key_instead_of_a_variable_name_is_rejected_and_hidden(key: str) -> None:
    with pytest.raises(UserError, match=f"{key}: not the name of an environment variable") as refused:
        compose("paper_tau2", f"{key}=sk-secret")
    assert "sk-secret" not in str(refused.value)


def test_a_benchmarks_installation_is_only_a_machine_setting() -> None:
    here = compose("default", "machine.benchmarks.tau2.python=/somewhere/python")
    assert here.machine.benchmarks["tau2"].python == "/somewhere/python"
    assert here.model_copy(update={"machine": compose().machine}) == compose()


def test_a_model_behind_an_endpoint_is_the_base(workspace: Path) -> None:
    named = compose("default", "policy=openai", "policy.name=some/model@main")
    assert named.base.model == "some/model@main" == named.policy.settings()["name"]
    assert compose("default", "policy=openai", "base.model=other", "policy.name=alias").base.model == "other"
    pretrained = "base.pretrained=a@0123456789abcdef"
    assert compose("default", pretrained, "policy=openai", "policy.name=some/model").base.pretrained is None
    assert compose("default", "policy=vllm").base.model is None  # its servers serve the base that is trained here
    write_params(workspace, overrides=["policy=openai", "policy.name=some/model"])
    assert run_stage(workspace) == 0
    shutil.copy(ROOT / "stages/base.py", workspace / "stages")
    with contextlib.chdir(workspace):
        runpy.run_path("stages/base.py", run_name="__main__")
    assert [path.name for path in (workspace / "artifacts/base").iterdir()] == ["model.json"]
    assert json.loads((workspace / "results/base.json").read_text()) == {"model": "some/model"}


PAPER = {
    "paper_tau2": {"discovery": (64, 1), "test": 60, "adapter": 1280, "step": 8, "groups": 8, "total": 5120},
    "paper_toolsandbox": {"discovery": (32, 1), "test": 51, "adapter": 640, "step": 4, "groups": 4, "total": 2560},
}


@pytest.mark.parametrize("name", ["local", "openai", "vllm"])
def test_training_samples_from_the_whole_distribution(name: str) -> None:
    chosen = [f"policy={name}", "base.model=some-model", "policy.chat_template_kwargs.enable_thinking=false"]
    plain = compose("default", *chosen)
    cut = compose("default", *chosen, "policy.top_p=0.9", "policy.top_k=20")
    assert {"top_p": 0.9, "top_k": 20}.items() <= cut.policy.settings().items()
    assert cut.policy.settings()["chat_template_kwargs"] == {"enable_thinking": False}
    trained, acting = cut.exploring().settings(), plain.policy.settings()
    assert {key: value for key, value in trained.items() if value is not None} == {
        key: value for key, value in acting.items() if value is not None
    }


@pytest.mark.parametrize("experiment", PAPER)
def test_a_paper_experiment_states_the_numbers_of_the_paper(experiment: str) -> None:
    given, paper = compose(experiment, seed=42), PAPER[experiment]
    model = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    agent, user = given.policy.settings(), given.benchmark.settings()["user"]
    assert given.base.model == agent["name"] == user["name"] == model
    assert agent["temperature"] == user["temperature"] == 0.0
    assert user["_target_"] == given.policy.target == "captrain.agents.openai.OpenAIPolicy"
    assert (given.rollouts.tasks, given.rollouts.trials) == paper["discovery"]
    assert (given.evaluation.tasks, given.evaluation.trials) == (paper["test"], 4)
    assert given.adapters.rollouts == paper["adapter"]
    assert given.adapters.rollouts * given.capabilities.count == paper["total"]
    trainer = given.trainer.settings()
    assert given.environments.temperature == 1.0 and given.baselines.grpo_target.learning_rate == 1e-5
    assert (given.trainer.group_size, given.trainer.groups_per_step) == (16, paper["step"])
    assert given.adapters.rollouts == 10 * 16 * given.trainer.groups_per_step
    assert [trainer[name] for name in ("rank", "alpha", "learning_rate", "clip")] == [16, 16, 1e-5, 0.2]
    assert (given.selection.coverage, given.selection.delta) == (0.1, 0.2)
    assert [trainer[name] for name in ("epochs", "hints", "loss")] == [1, [0.25, 0.5], "dapo"]
    assert (given.selection.agreement, given.labels.runs, given.labels.resample) == (8, 10, False)
    assert given.selection.ranking == "mean_gap" and given.analyst.settings()["failed"] == 50
    servers = given.machine.vllm
    assert (servers.max_lora_rank, servers.max_loras) == (trainer["rank"], given.capabilities.count)
    assert given.router.target.endswith("ClassifierRouter") and given.router.settings()["prompt"] == "trajectories"
    bounds = given.environments
    assert (bounds.groups, bounds.group_size, bounds.rounds) == (paper["groups"], 16, 5)
    assert bounds.mean_reward == bounds.success == (0.2, 0.6) and bounds.constant_groups == 0.5


@pytest.mark.parametrize("rollouts", [160, 320, 640, 960, 1280])
@pytest.mark.parametrize("experiment", PAPER)
def test_every_published_budget_runs(experiment: str, rollouts: int) -> None:
    assert compose(experiment, f"adapters.rollouts={rollouts}", seed=42).adapters.rollouts == rollouts


def test_every_section_is_a_param_of_a_stage_but_of_machine_only_the_precision() -> None:
    listed = {key for stage in STAGES for key in params_of(stage)}
    assert {key for key in listed if key.startswith("machine")} == {"machine.accelerate.precision"}
    assert {key.partition(".")[0] for key in listed} == {"code", *Spec.model_fields}


def test_every_param_of_a_stage_exists() -> None:
    composed = compose()
    for stage in STAGES:
        for key in (key for key in params_of(stage) if not key.startswith("code.")):
            value = composed
            for part in key.split("."):
                value = getattr(value, part)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "compose"])
def test_a_stage_depends_on_the_digest_of_its_code_and_runs_its_script(stage: str) -> None:
    assert [key for key in params_of(stage) if key.startswith("code.")] == [f"code.{digested(stage)}"]
    assert STAGES[stage]["cmd"].removeprefix("python ").split()[0] == str(stage_scripts(stage)[0].relative_to(ROOT))
    assert not [path for path in STAGES[stage].get("deps", []) if path.startswith(("src/", "stages/"))]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_component_packages_count_as_a_whole(experiment: str) -> None:
    composed = compose(experiment)
    sections = [section for _, section in composed if isinstance(section, Component)]
    for target in [name for section in sections for name in targets_of(section)]:
        assert target.split(".")[1] in PROTOCOLS


def targets_of(component: Component) -> Iterator[str]:
    """Its import path, and those of inner components."""
    yield component.target
    for name, value in component.settings().items():
        if (inner := nested(name, value)) is not None:
            yield from targets_of(inner)


@pytest.mark.parametrize(
    ("argument", "setting"),
    [("--dtype=auto", "policy.dtype"), ("--max-model-len=2048", "policy.max_length"), ("-q", "policy.arguments")],
)
def test_server_arguments_that_change_answers_are_rejected(argument: str, setting: str) -> None:
    with pytest.raises(UserError, match=f"not a machine setting: set {setting}"):
        compose_spec("default", 0, ["policy=vllm", f"machine.vllm.arguments=['{argument}']"], CONF)
    spec = compose_spec("default", 0, ["machine=vllm_cpu", "policy=vllm", f"policy.arguments=['{argument}']"], CONF)
    assert spec.policy.settings()["arguments"] == [argument] and spec.machine.vllm.arguments
