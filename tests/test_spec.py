"""The configuration, through `compose` and through the compose stage as DVC runs it."""

import ast
import contextlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from captrain import spec
from captrain.errors import UserError

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# Modules that change how a stage is configured, started or reported, and never what it computes.
NOT_IDENTITY = {"spec", "components", "errors", "launch"}


def compose(experiment: str = "default", *overrides: str, seed: int = 0) -> spec.Spec:
    return spec.compose(experiment, seed, overrides, CONF)


def params_of(stage: str) -> list[str]:
    return [key for entry in STAGES[stage].get("params", []) if isinstance(entry, dict) for key in [*entry.values()][0]]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "stages").mkdir()
    shutil.copy(ROOT / "stages/compose.py", tmp_path / "stages")
    # Not the committed one: what it selects at the moment is its owner's business.
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"experiment": "default", "seed": 0, "overrides": []}))
    return tmp_path


def python(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *arguments], cwd=workspace, env=environment, capture_output=True, text=True)


def write_params(workspace: Path, **params: object) -> None:
    """Replace some of params.yaml."""
    path = workspace / "params.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | params))


def run_stage(workspace: Path) -> int:
    """Run the compose stage in this process, which is several times faster; its exit status."""
    with contextlib.chdir(workspace):
        try:
            runpy.run_path("stages/compose.py", run_name="__main__")
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code
    return 0


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment: str) -> None:
    compose(experiment)


def test_the_fixed_task_mixes_are_experiments() -> None:
    mixes = {name: compose(name).benchmark.settings()["mix"] for name in ("default", "rare", "single", "compound")}
    assert mixes == {"default": "mixed", "rare": "rare", "single": "single", "compound": "compound"}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_derived_spec_reads_back_as_it_was(experiment: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    composed = compose(experiment, "policy.guidance=['check, then write: always']", "base.learning_rate=1e-5")
    spec.dump(composed, path)
    assert spec.load(path) == composed
    again = tmp_path / "again.yaml"
    spec.dump(spec.load(path), again)
    assert again.read_bytes() == path.read_bytes()


def test_reading_a_derived_spec_needs_neither_hydra_nor_torch(tmp_path: Path) -> None:
    spec.dump(compose(), tmp_path / "results/spec.yaml")
    code = "import sys; from captrain import spec; spec.load(); print({'hydra', 'torch', 'numpy'} & {*sys.modules})"
    done = python(tmp_path, "-c", code)
    assert done.stdout == "set()\n", done.stderr


def test_composing_imports_no_torch(workspace: Path) -> None:
    code = "import runpy, sys; runpy.run_path('stages/compose.py', run_name='__main__'); print('torch' in sys.modules)"
    done = python(workspace, "-c", code)
    assert done.stdout == "False\n", done.stderr


def test_what_params_select_lands_in_the_derived_spec(workspace: Path) -> None:
    write_params(workspace, experiment="rare", seed=7, overrides=["selection.delta=0.15", "router=classifier"])
    assert run_stage(workspace) == 0
    derived = spec.load(workspace / "results/spec.yaml")
    assert derived.seed == 7
    assert derived.benchmark.settings() == {"mix": "rare"}
    assert derived.selection.delta == 0.15
    assert derived.router.target.endswith("ClassifierRouter")


def test_two_processes_derive_the_same_bytes(workspace: Path) -> None:
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
        "  remedy: did you mean rare? Others: compound, default, single, smoke",
    ]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"experiment": "rrae"}, "did you mean rare?"),
        ({"experiment": "nothing-like-it"}, "known are compound, default, rare, single, smoke"),
        ({"seed": "seven"}, "seed = 'seven'"),
        ({"seed": -1}, "seed = -1"),
        ({"overrides": ["selection.dleta=0.1"]}, "did you mean selection.delta?"),
        ({"overrides": ["delta=0.1"]}, "did you mean selection.delta?"),
        ({"overrides": ["base.zzzz=1"]}, "known are base.hidden, base.layers"),
        ({"overrides": ["policy.temprature=1.0"]}, "did you mean policy.temperature?"),
        ({"overrides": ["router=clasifier"]}, "did you mean classifier?"),
        ({"overrides": ["selection.delta"]}, "not of the form key=value"),
        ({"overrides": ["selection.delta: 0.1"]}, "not of the form key=value"),
        ({"overrides": ["~selection.delta"]}, "not of the form key=value"),
        ({"overrides": ["seed=3"]}, "set `seed:` in params.yaml"),
        ({"overrides": ["base.steps=many"]}, "base.steps = 'many'"),
        ({"overrides": ["base.steps=1.5"]}, "base.steps = 1.5"),
        ({"overrides": ["base.steps=0"]}, "base.steps = 0"),
        ({"overrides": ["base.steps=[1"]}, "does not compose"),
        ({"overrides": ["base.learning_rate=nan"]}, "base.learning_rate"),
        ({"overrides": ["selection.coverage=1.5"]}, "selection.coverage = 1.5"),
        ({"overrides": ["evaluation.trials=1"]}, "evaluation.trials = 1"),
        ({"overrides": ["environments.success=[0.8,0.2]"]}, "the lower bound is above the upper one"),
        ({"overrides": ["+selection.gap=0.1"]}, "there is no setting selection.gap"),
        ({"overrides": ["adapters.rollouts=650"]}, "adapters.rollouts = 650 is not a multiple"),
        ({"overrides": ["rollouts.tasks=250"]}, "rollouts.tasks x rollouts.trials = 250 is not a multiple"),
        ({"overrides": ["environments.groups=3"]}, "environments.group_size = 24 is not a multiple"),
        ({"overrides": ["selection.agreement=11"]}, "selection.agreement = 11 exceeds labels.runs = 10"),
        ({"overrides": ["policy._target_=captrain.policies.lokal.LocalPolicy"]}, "no module captrain.policies.lokal"),
        ({"overrides": ["policy._target_=captrain.policies.local.LocalPolicey"]}, "did you mean LocalPolicy?"),
        ({"overrides": ["policy._target_=captrain.records.SPLIT_OF"]}, "cannot be called"),
        ({"overrides": ["+policy.temprature=1.0"]}, "did you mean temperature?"),
        ({"overrides": ["policy.max_turns=some"]}, "policy.max_turns = 'some'"),
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


def test_a_misspelt_key_in_conf_is_found(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = workspace / "conf/experiment/default.yaml"
    path.write_text(path.read_text() + "selection:\n  dleta: 0.1\n")
    assert run_stage(workspace) == 2
    told = capsys.readouterr().err
    assert "there is no setting selection.dleta" in told and "did you mean delta?" in told


def test_a_damaged_derived_spec_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    with pytest.raises(UserError, match=r"spec\.yaml is missing(.|\n)*dvc repro compose"):
        spec.load(path)
    spec.dump(compose(), path)
    path.write_text(path.read_text().partition("evaluation:")[0])
    with pytest.raises(UserError, match=r"spec\.yaml: .* is not set(.|\n)*dvc repro compose"):
        spec.load(path)
    path.write_text("seed: [0")
    with pytest.raises(UserError, match=r"spec\.yaml is not YAML"):
        spec.load(path)


def test_a_component_is_built_from_its_settings_and_what_the_caller_adds() -> None:
    component = spec.Component.model_validate({"_target_": "builtins.dict", "a": 1, "b": [2]})
    assert spec.build(component, b=3, run="x") == {"a": 1, "b": 3, "run": "x"}


def test_machine_is_a_param_of_no_stage_and_every_other_section_of_some_stage() -> None:
    listed = {key.partition(".")[0] for stage in STAGES for key in params_of(stage)}
    assert "machine" not in listed
    assert listed == set(spec.Spec.model_fields) - {"machine"}


def test_every_param_of_a_stage_exists() -> None:
    composed = compose()
    for stage in STAGES:
        for key in params_of(stage):
            value = composed
            for part in key.split("."):
                value = getattr(value, part)


def captrain_imports(path: Path) -> set[Path]:
    """The files of captrain that a file imports, at its top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {file for name in names for file in files_of(name)}


def files_of(name: str) -> set[Path]:
    """The files of captrain that importing a dotted name, of a module or of something in it, runs."""
    parts = name.split(".") if name.startswith("captrain.") else []
    stems = [ROOT / "src" / Path(*parts[:end]) for end in range(1, len(parts) + 1)]
    return {file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.exists()}


def has_code(path: Path) -> bool:
    """Whether a package file holds more than its docstring and plain values."""
    return any(not isinstance(node, ast.Expr | ast.Assign) for node in ast.parse(path.read_text()).body)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "compose"])
def test_a_stage_depends_on_the_code_that_it_runs(stage: str) -> None:
    sections = [getattr(compose(), key.partition(".")[0]) for key in params_of(stage)]
    targets = [section.target for section in sections if isinstance(section, spec.Component)]
    reached: set[Path] = set()
    waiting = captrain_imports(ROOT / f"stages/{stage}.py") | {file for name in targets for file in files_of(name)}
    while waiting:
        path = waiting.pop()
        if path.stem not in NOT_IDENTITY and path not in reached:
            reached.add(path)
            waiting |= captrain_imports(path)
    needed = {str(path.relative_to(ROOT)) for path in reached if path.name != "__init__.py" or has_code(path)}
    assert needed <= {*STAGES[stage]["deps"]}, f"add to the deps of {stage} in dvc.yaml"
