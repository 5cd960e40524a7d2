"""The paper's experiments, cut down, from compose to figures: with a model that has a name, behind servers.

The model is a tiny one in a hub cache of the test's own, the servers are vLLM's where it is installed, and the tasks
and the analyst are the desk's: what tau2 and ToolSandbox ask for beside them, a model that plays their users, is not
here.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.installations import data_beside, interpreter, needs
from support.pipeline import make_project
from support.servers import ABSENT, VLLM_PYTHON
from support.training import ROOT

from captrain.records import Rollout, load

NAME = "captrain/tiny"
REVISION = "0" * 40
CUT = (
    *("benchmark._target_=support.desk.SimulatedDesk", "analyst._target_=support.desk.FamilyAnalyst"),
    *(
        "synthesizer=template",
        "synthesizer._target_=support.desk.DeskTemplates",
        f"base.model={NAME}",
        "policy=vllm",
        "policy.dtype=float32",
    ),
    *("policy.max_turns=14", "policy.max_tokens=32", "rollouts.tasks=60", "labels.runs=3", "selection.agreement=2"),
    *("selection.floor=-1.0", "selection.resamples=100", "capabilities.count=2", "environments.seeds=20"),
    *("environments.groups=2", "environments.group_size=4", "environments.mean_reward=[0.0,1.0]"),
    *("environments.success=[0.0,1.0]", "environments.constant_groups=1.0", "trainer.group_size=4"),
    *("trainer.groups_per_step=4", "trainer.learning_rate=1e-3", "adapters.rollouts=32", "pairs.count=0"),
    *("baselines.grpo_target.run=false", "baselines.rejection_sft.run=false", "baselines.gepa.run=false"),
    *("baselines.solutions.run=false", "evaluation.tasks=12", "evaluation.trials=2", "evaluation.resamples=50"),
    *("router.neighbours=6", "router.characters=200", "router.p=1.0", "router.gate=false"),
    *("machine.workers=1", "machine.accelerate.precision=float32"),
)
# Where the hub's cache is, a process reads when it loads the library: none of these has it at once.
STAND_IN = (
    *(f"machine.vllm.python={sys.executable}", "machine.vllm.command=[-m,captrain.serving.server]"),
    "machine.vllm.gpus=0",
)
REAL = ("machine=vllm_cpu", f"machine.vllm.python={VLLM_PYTHON}")


@pytest.fixture(scope="module")
def hub(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with a model of little training under a name."""
    cache = tmp_path_factory.mktemp("hub")
    folder = cache / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(smoke / "artifacts/base", folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(REVISION)
    return cache


def run_project(project: Path, hub: Path, *stages: str) -> None:
    """Run stages, of none all, in a process of its own that finds the model in the hub cache."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    env = {**os.environ, "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    process = subprocess.run(
        [sys.executable, "-m", "support.pipeline", str(project), *stages], cwd=project.parent, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "servers"),
    [
        pytest.param(
            "paper_tau2", REAL,
            marks=[pytest.mark.vllm, pytest.mark.skipif(not VLLM_PYTHON.exists(), reason=ABSENT)],
        ),
        pytest.param("paper_toolsandbox", STAND_IN),
    ],
)  # fmt: skip
def test_a_model_by_name_reaches_the_last_table(
    experiment: str, servers: tuple[str, ...], hub: Path, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project", *CUT, *servers, experiment=experiment)
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


@pytest.mark.slow
@needs("tau2")
def test_a_model_by_name_acts_in_tau2_itself(hub: Path, tmp_path: Path) -> None:
    """As far as its rollouts: what follows them needs a model that passes some task, and one that plays users."""
    from transformers import AutoTokenizer

    # The texts of tau2 are longer than the tiny model was made for; its positions are rotary and have no end.
    shutil.copytree(hub, tmp_path / "hub", symlinks=True)
    [model] = (tmp_path / "hub").glob("models--*/snapshots/*")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()  # it may not be written
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    python = interpreter("tau2")
    project = make_project(
        tmp_path / "project", *STAND_IN, "machine.workers=1", f"base.model={NAME}", "policy=vllm",
        "policy.dtype=float32", "policy.max_turns=4", "policy.max_tokens=24", "benchmark.user=null",
        "benchmark.domains=[mock]", "rollouts.tasks=4", "evaluation.tasks=3",
        f"machine.benchmarks.tau2.python={python}", f"machine.benchmarks.tau2.data={data_beside(python, 'tau2')}",
        experiment="paper_tau2",
    )  # fmt: skip
    run_project(project, tmp_path / "hub", "compose", "base", "rollouts")
    rollouts = load(project / "artifacts/rollouts/discovery.jsonl", Rollout)
    assert [rollout.task.id.split("/")[:2] for rollout in rollouts] == [["tau2", "mock"]] * 4
    assert {rollout.outcome for rollout in rollouts} <= {"passed", "failed"}
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode(rollout.token_ids) for rollout in rollouts]
    assert all(1 in rollout.mask for rollout in rollouts) and all('"create_task"' in text for text in texts)
