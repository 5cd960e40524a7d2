"""The same bytes on any processor: the whole pipeline from nothing, with the kernels of other instruction sets."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.pipeline import make_project
from torch.backends.cpu import get_cpu_capability

TRAINED = (
    "base.steps=120",
    "baselines.solutions.run=true",
    "baselines.solutions.demonstrations=200",
    "merging.methods=[svd,distillation]",
    "merging.rollouts=80",
)
"""A base of fewer steps; and besides it, TRACE's adapters and GRPO on the target all other ways to make weights."""
SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
)
PROCESSORS = {
    "this one": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
    "without vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    },
}
SWITCHES = {switch for switches in PROCESSORS.values() for switch in switches}
WORKERS = {"this one": 1, "AVX2": 2, "without vectors": 1}


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A project of experiment smoke for each processor, after all of its stages."""
    folders: dict[str, Path] = {}
    for name, switches in PROCESSORS.items():
        folder = folders[name] = tmp_path_factory.mktemp("processor") / "project"
        make_project(folder, *TRAINED, f"machine.workers={WORKERS[name]}")
        inherited = {key: value for key, value in os.environ.items() if key not in SWITCHES}
        paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
        run = subprocess.run(
            [sys.executable, "-P", "-m", "support.processor", str(folder)],
            env={**inherited, **paths, **switches},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert run.returncode == 0, f"{name}: {run.stdout[-4000:]}"
    return folders


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a project's results and artifacts."""
    paths = sorted(path for part in ("results", "artifacts") for path in (folder / part).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize("processor", ["AVX2", "without vectors"])
def test_results_and_artifacts_have_the_same_bytes_on_another_processor(
    projects: dict[str, Path], processor: str
) -> None:
    here, there = digests(projects["this one"]), digests(projects[processor])
    specs = [yaml.safe_load((projects[name] / "results/spec.yaml").read_text()) for name in ("this one", processor)]
    assert [spec["machine"].pop("workers") for spec in specs] == [WORKERS["this one"], WORKERS[processor]]
    assert specs[0] == specs[1]
    del here["results/spec.yaml"], there["results/spec.yaml"]
    assert len(here) > 90 and here.keys() == there.keys()
    assert [path for path, digest in here.items() if there[path] != digest] == []
    for name in ("base/model", "adapters", "grpo_target", "solutions", "merging"):
        assert any(path.startswith(f"artifacts/{name}") and path.endswith(".safetensors") for path in here), name
    whole = hashlib.sha256("".join(f"{path} {digest}\n" for path, digest in here.items()).encode()).hexdigest()
    print(f"{get_cpu_capability()} and {processor}: {len(here)} files, {whole[:16]}")


@pytest.mark.parametrize("processor", ["AVX2", "without vectors"])
def test_so_have_the_optimizer_s_averages_in_checkpoints(projects: dict[str, Path], processor: str) -> None:
    here, there = (
        {
            path.parent.name: torch.load(path, weights_only=True)["state"]
            for path in sorted((projects[name] / "workspace").rglob("optimizer.pt"))
        }
        for name in ("this one", processor)
    )
    assert here.keys() == there.keys() and here
    for checkpoint, states in here.items():
        moved = 0
        for parameter, state in states.items():
            for average in ("exp_avg", "exp_avg_sq"):
                assert state[average].dtype == torch.float64
                assert torch.equal(state[average], there[checkpoint][parameter][average])
                moved += int(state[average].count_nonzero())
        assert moved > 1000
