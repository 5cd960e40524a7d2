"""The same bytes on any processor: the whole pipeline from nothing, with kernels for other instruction sets."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import yaml
from support.pipeline import make_project
from support.scripts import load_script
from support.smoke import SETTINGS
from support.steps import STEPS
from torch.backends.cpu import get_cpu_capability

pytestmark = pytest.mark.needs("minutes")
PROCESSORS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
    "without vectors": load_script("bench_barrier").WITHOUT_VECTORS,
}
SWITCHES = {switch for switches in PROCESSORS.values() for switch in switches}
SPREAD = {"AVX2": ("adapters", "evaluation@base"), "without vectors": ()}
"""Stages with two workers: one that trains and one that plays."""


@pytest.fixture(scope="module", params=PROCESSORS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of `smoke` as another processor makes it, one stage after the other."""
    name: str = request.param
    folder = make_project(tmp_path_factory.mktemp("processor"), *SETTINGS)
    inherited = {key: value for key, value in os.environ.items() if key not in SWITCHES}
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    idle = {"OMP_WAIT_POLICY": "passive"}  # the two threads wait for each other without spinning
    run = subprocess.run(
        [sys.executable, "-P", "-m", "support.processor", str(folder), *SPREAD[name]],
        env={**inherited, **paths, **idle, **PROCESSORS[name]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, f"{name}: {run.stdout[-4000:]}"
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a project's results and artifacts."""
    paths = sorted(path for part in ("results", "artifacts") for path in (folder / part).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_results_and_artifacts_have_the_same_bytes_on_another_processor(other: Path, smoke: Path) -> None:
    here, there = digests(smoke), digests(other)
    specs = [yaml.safe_load((project / "results/spec.yaml").read_text()) for project in (smoke, other)]
    assert specs[0].pop("machine") | {"workers": 0} == specs[1].pop("machine") | {"workers": 0}
    assert specs[0] == specs[1]
    del here["results/spec.yaml"], there["results/spec.yaml"]
    assert len(here) > 90 and here.keys() == there.keys()
    assert [path for path, digest in here.items() if there[path] != digest] == []
    for name in ("base/model", "adapters", "grpo_target", "solutions", "merging"):
        assert any(path.startswith(f"artifacts/{name}") and path.endswith(".safetensors") for path in here), name
    whole = hashlib.sha256("".join(f"{path} {digest}\n" for path, digest in here.items()).encode()).hexdigest()
    print(f"{get_cpu_capability()} and another: {len(here)} files, {whole[:16]}")


def test_so_have_weights_and_averages_after_each_step_of_each_training(other: Path, smoke: Path) -> None:
    here, there = (Counter((project / STEPS).read_text().splitlines()) for project in (smoke, other))
    assert not there - here
    # With two workers, other processes train a stage's adapters and write no digests.
    epochs = yaml.safe_load((smoke / "results/spec.yaml").read_text())["trainer"]["epochs"]
    adapters = epochs * len(pd.read_csv(smoke / "results/adapters/history.csv"))
    assert there.total() >= here.total() - adapters > 300
    assert all(int(step.split()[-1]) > 1000 for step in here)
