"""The barrier's safety margin: `python scripts/bench.py --barrier`.

The default's base and its first adapter are trained twice: with the best instruction set of this machine, and without
vector code. `captrain.models.barrier` explains why both must give the same bytes. Before each rounding the two differ
by some noise; an element differs after rounding with probability noise / grid. At some steps both trainings record what
they are about to round. The noise gives the expected number of elements that round differently, and the script counts
those that did. Adapters are trained on sampled rollouts, so one different token would show as well.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from captrain.models import barrier
from captrain.run import compose_spec, entry_point
from captrain.training import capability_jobs, make_base, train

BASE = Path("artifacts/base")
ENVIRONMENTS = Path("results/environments")
WITHOUT_VECTORS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
}
"""Variables that keep torch, MKL, OpenBLAS and numpy from using vector kernels."""
KERNELS = {"vectors": {}, "none": WITHOUT_VECTORS}
EVERY = {"base": 100, "adapter": 1}
"""Record every n-th step, including the first."""
ROUNDED = ("gradient", "weight")
"""What a step of the barrier rounds, in this order."""
STEPS = "steps.npy"


@dataclass(frozen=True)
class Noise:
    """Noise between two trainings in the rounded quantities.

    `steps` of one training, mean and largest difference of an element, and the number of elements that round
    differently in a whole training, expected and seen.
    """

    steps: int
    elements: int
    mean: float
    largest: float
    expected: float
    flips: int


@contextmanager
def recording(folder: Path, every: int) -> Iterator[None]:
    """Record what each optimizer is about to round at every n-th step, and the number of steps."""
    steps, tensors, to_grid = Counter[str](), list[np.ndarray](), barrier.to_grid

    def begin(*_: object) -> None:
        tensors.clear()

    def end(optimizer: Optimizer, *_: object) -> None:
        name = type(optimizer).__name__
        if steps[name] % every == 0:
            for i, rounded in enumerate(ROUNDED):
                np.save(folder / f"{rounded}-{name}-{steps[name]}.npy", np.concatenate(tensors[i::2]))
        steps[name] += 1
        np.save(folder / STEPS, steps[name])

    def recorded_grid(tensor: Tensor, spacing: float = barrier.WEIGHT_GRID) -> None:
        tensors.append(tensor.detach().numpy().ravel().copy())
        to_grid(tensor, spacing)

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    barrier.to_grid = recorded_grid
    try:
        yield
    finally:
        barrier.to_grid = to_grid
        for hook in hooks:
            hook.remove()


def noises(folders: Sequence[Path]) -> dict[str, Noise]:
    """Measure the noise between two recorded trainings for each rounded quantity."""
    result = {}
    for rounded, grid in zip(ROUNDED, (barrier.GRADIENT_GRID, barrier.WEIGHT_GRID), strict=True):
        names = sorted(path.name for path in folders[0].glob(f"{rounded}-*.npy"))
        first, second = (np.concatenate([np.load(folder / name) for name in names]) for folder in folders)
        noise, steps = np.abs(first - second), int(np.load(folders[0] / STEPS))
        flips = int((np.round(first / grid) != np.round(second / grid)).sum())
        recorded = len({name.rpartition("-")[2] for name in names})
        expected = float(np.minimum(1, noise / grid).sum()) / recorded * steps
        result[rounded] = Noise(steps, noise.size, float(noise.mean()), float(noise.max()), expected, flips)
    return result


def train_once(part: str, folder: Path, root: Path) -> None:
    """Train one part of the default with recording, and write the digest of its weights."""
    spec = compose_spec("default", 0, [], root / "conf")
    with recording(folder, EVERY[part]):
        if part == "base":
            digest = make_base(spec.base, spec.seed, folder / "base", spec.machine)["weights_sha256"]
        else:
            digest = train(capability_jobs(spec, root / BASE, root / ENVIRONMENTS)[0]).digest
    (folder / "digest").write_text(digest, encoding="utf-8")


def train_twice(part: str) -> tuple[dict[str, Noise], list[str]]:
    """Train a part with both kernels; return the noise for each rounded quantity, and both digests.

    Raises:
        SystemExit: a training failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in KERNELS]
        for folder, switches in zip(folders, KERNELS.values(), strict=True):
            folder.mkdir()
            command = [sys.executable, str(Path(__file__).resolve()), "--train", part, str(folder), str(Path.cwd())]
            if status := subprocess.run(command, cwd=folder, env={**os.environ, **switches}).returncode:
                raise SystemExit(f"{part} with the kernels `{folder.name}`: exit status {status}")
        return noises(folders), [(folder / "digest").read_text(encoding="utf-8") for folder in folders]


@partial(entry_point, stage=False)
def main() -> None:
    """Measure and print. In a child process: train and record."""
    parser = argparse.ArgumentParser(description="How many elements the noise of kernels takes over the barrier.")
    parser.add_argument("--only", nargs="+", choices=[*EVERY], default=[*EVERY], help="measure these alone")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        part, folder, root = options.train
        train_once(part, Path(folder), Path(root))
        return
    grid = Table(title="the barrier, with vector kernels and without", title_justify="left")
    for name in ("part", "rounded"):
        grid.add_column(name)
    for name in ("steps", "elements seen", "mean noise", "largest", "expected flips in all", "counted in those seen"):
        grid.add_column(name, justify="right")
    grid.add_column("weights, SHA-256")
    for part in options.only:
        noise, digests = train_twice(part)
        for rounded, row in noise.items():
            numbers = (f"{row.mean:.1e}", f"{row.largest:.1e}", f"{row.expected:.1e}", str(row.flips))
            same = digests[0][:16] if len(set(digests)) == 1 else " and ".join(digest[:16] for digest in digests)
            grid.add_row(part, rounded, str(row.steps), f"{row.elements:,}", *numbers, same)
    Console(width=None if os.isatty(1) else 150).print(grid)


if __name__ == "__main__":
    main()
