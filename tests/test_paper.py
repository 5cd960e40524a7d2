"""The paper's experiments, scaled down, from compose to figures: a model with a hub name, behind servers.

A tiny model is in a hub cache made for the test. The servers are vLLM's where it is installed. Tasks and analyst are
the desk's, because tau2 and ToolSandbox need a model that plays their users.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pipeline import make_project, stages_of
from support.servers import STAND_IN, VLLM_PYTHON
from support.tau2_demonstrations import tau2_settings
from support.training import ROOT

from captrain.records import Rollout, load

pytestmark = pytest.mark.needs("minutes")
NAME = "captrain/tiny"
REVISION = "0" * 40
DESK = (
    *("benchmark._target_=support.desk.SimulatedDesk", "synthesizer._target_=support.desk.DeskTemplates"),
    *("policy.max_turns=14", "policy.max_tokens=32", "rollouts.tasks=60", "environments.seeds=20"),
    *("trainer.groups_per_step=4", "baselines.grpo_target.run=false", "selection.floor=-1.0"),
    *("evaluation.tasks=12", "evaluation.trials=2", "router.neighbours=6"),
)
CUT = (
    *("analyst._target_=support.desk.FamilyAnalyst", "synthesizer=template", f"base.model={NAME}", "policy=vllm"),
    *("policy.dtype=float32", "labels.runs=3", "selection.agreement=2", "selection.resamples=100"),
    "capabilities.count=2",
    *("environments.groups=2", "environments.group_size=4", "environments.mean_reward=[0.0,1.0]"),
    *("environments.success=[0.0,1.0]", "environments.constant_groups=1.0", "trainer.group_size=4"),
    *("trainer.learning_rate=1e-3", "adapters.rollouts=32", "pairs.count=0"),
    *("baselines.rejection_sft.run=false", "baselines.gepa.run=false"),
    *("baselines.solutions.run=false", "evaluation.resamples=50"),
    *("router.characters=200", "router.p=1.0", "router.gate=false"),
    *("machine.workers=1", "machine.accelerate.precision=float32"),
)
# A process reads the location of the hub's cache when it loads the library, so these processes are not warm.
STAND_IN = (
    *(f"machine.vllm.python={sys.executable}", f"machine.vllm.command=[{STAND_IN}]"),
    "machine.vllm.gpus=0",
)
REAL = ("machine=vllm_cpu", f"machine.vllm.python={VLLM_PYTHON}")


@pytest.fixture(scope="module")
def hub(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with a briefly trained model under a name."""
    return make_hub(smoke / "artifacts/base", tmp_path_factory.mktemp("hub"))


def make_hub(base: Path, cache: Path) -> Path:
    """Make a hub cache with a base under a name."""
    folder = cache / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(base, folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(REVISION)
    return cache


def run_project(project: Path, hub: Path, *stages: str) -> None:
    """Run stages, or all of them, in a process that finds the model in the hub cache."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    env = {**os.environ, "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    process = subprocess.run(
        [sys.executable, "-m", "support.pipeline", str(project), *stages], cwd=project.parent, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-6000:]


@pytest.mark.parametrize(
    ("experiment", "servers"),
    [
        pytest.param("paper_tau2", REAL, marks=pytest.mark.needs("vllm")),
        pytest.param("paper_toolsandbox", STAND_IN),
    ],
)  # fmt: skip
def test_a_model_by_name_reaches_the_last_table(
    experiment: str, servers: tuple[str, ...], hub: Path, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project", *CUT, *DESK, *servers, experiment=experiment)
    run_project(project, hub)
    results = project / "results"
    assert json.loads((results / "base.json").read_text()) == {"model": NAME}
    assert [path.name for path in (project / "artifacts/base").iterdir()] == ["model.json"]
    history = list(csv.DictReader((results / "adapters/history.csv").open()))
    assert history and all(0 <= float(step["mismatch"]) < 1e-2 for step in history)
    routes = list(csv.DictReader((results / "routes/routes.csv").open()))
    assert len(routes) == 12 and all(route["classifier"] and route["chosen"] for route in routes)
    table = list(csv.DictReader((results / "evaluation/main.csv").open()))
    labels = {row["label"] for row in table}
    assert {"base", "TRACE"} <= labels and all(row["pass_rate"] for row in table)
    assert list((results / "figures").iterdir())


TINY = (
    *("benchmark=tau2", "base.hidden=64", "base.layers=2", "base.heads=2", "base.steps=60", "base.batch=2"),
    "base.demonstrations={_target_:support.tau2_demonstrations.Tau2Demonstrations,domain:mock}",
)
MOCK = (
    *("policy.max_turns=4", "policy.max_tokens=64", "rollouts.tasks=4", "evaluation.tasks=3", "evaluation.trials=2"),
    *("trainer.group_size=2", "trainer.groups_per_step=2", "router.neighbours=1", "environments.seeds=2"),
)


@pytest.mark.needs("tau2")
def test_a_model_by_name_reaches_the_last_table_of_tau2_itself(tmp_path: Path) -> None:
    """The smallest domain of tau2, behind vLLM where it is installed.

    The model has memorised the training tasks, and one discovery task passes. Two tasks are too few to select anything,
    so there is no environment; GRPO on the target trains with the rollouts of the diagnosis.
    """
    settings = tau2_settings("mock")
    teacher = make_project(tmp_path / "teacher", *TINY, *settings, experiment="default")
    run_project(teacher, tmp_path / "hub", "compose", "base")
    hub = make_hub(teacher / "artifacts/base", tmp_path / "hub")
    project = make_project(
        tmp_path / "project",
        *CUT,
        *MOCK,
        *settings,
        *(REAL if VLLM_PYTHON.exists() else STAND_IN),
        "selection.floor=1.0",
        "curve.points=1",
        experiment="paper_tau2",
    )
    training = stages_of(project).index("grpo_target") + 1
    for stages in (stages_of(project)[:training], stages_of(project)[training:]):
        run_project(project, hub, *stages)  # a trained model is served by a new server
    rollouts = load(project / "artifacts/rollouts/discovery.jsonl", Rollout)
    assert [rollout.task.id.split("/")[:2] for rollout in rollouts] == [["tau2", "mock"]] * 4
    assert {rollout.outcome for rollout in rollouts} == {"passed", "failed"}
    [step] = csv.DictReader((project / "results/grpo_target/history.csv").open())
    assert step["rollouts"] == "4" and 0 <= float(step["mismatch"]) < 1e-2
    rates = {row["method"]: row for row in csv.DictReader((project / "results/evaluation/main.csv").open())}
    assert {"base", "trace", "grpo_target"} <= {*rates} and not any(int(row["errors"]) for row in rates.values())
    assert list((project / "results/figures").iterdir())
