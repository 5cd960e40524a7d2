"""The forecast that `captrain run` prints before its first stage: what will run, and for how long on this machine.

Seconds are those of the plan (`captrain.planning.estimate`), whose rates were measured on one machine. A second of
products, in as many processes as will compute, says how fast this machine is beside that one just now: a slower
processor and other work that it has count alike.
"""

import os
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from captrain.config import compose_configuration, load_choice, row_of
from captrain.errors import UserError
from captrain.planning.assumptions import LOCAL, PRODUCTS, STAGE_START
from captrain.planning.cost import rounded
from captrain.planning.estimate import Estimate, Node

SIDE = 192
"""Rows and columns of the matrices that are multiplied: the size of a layer of the embedded base."""
SECONDS = 0.8
SHOWN_STAGES = 3
"""Stages that the forecast names, the longest first."""


def stale_stages(root: Path) -> list[str]:
    """List the stages that `dvc repro` may run, in the pipeline's order: those that changed, and what comes after.

    Raises:
        UserError: params.yaml is not what it should be, or DVC reads no pipeline.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from networkx import ancestors, topological_sort

    load_choice(root / "params.yaml")
    try:
        with Repo(str(root)) as repo:
            changed, graph = {name.rpartition(":")[2] for name in repo.status()}, repo.index.graph
    except DvcException as error:
        remedy = "mend dvc.yaml, dvc.lock or params.yaml, or restore them from git"
        raise UserError(f"DVC does not read the pipeline: {error}", remedy) from None
    first = [stage for stage in graph if getattr(stage, "name", None) in changed]
    stale = {stage for change in first for stage in (change, *ancestors(graph, change))}
    return [row_of(stage.name) for stage in reversed([*topological_sort(graph)]) if stage in stale]


def forecast_run(root: Path, stages: Collection[str]) -> str:
    """Say in a line what stages will take, at most.

    Args:
        root: of the project.
        stages: that run.

    Raises:
        UserError: the configuration that params.yaml selects does not compose.
    """
    spec, _ = compose_configuration([], root)
    costs = {cost.stage: cost.seconds for cost in Estimate(spec, Node(), 1).costs() if cost.stage in stages}
    count = f"{len(stages)} stage{'s' if len(stages) != 1 else ''} to run"
    if None in costs.values():
        unknown = ", ".join(stage for stage, seconds in costs.items() if seconds is None)
        return f"{count}; for how long is not known ({unknown}: see `captrain plan`)"
    local = spec.policy.target == LOCAL and spec.machine.launcher == "local"
    factor = PRODUCTS.value / measure_products(spec.machine.workers) if local else 1.0
    seconds = {stage: factor * (cost or 0) for stage, cost in costs.items()}
    longest = sorted(seconds, key=lambda stage: -seconds[stage])[:SHOWN_STAGES]
    details = ", ".join(f"{stage} {_time(seconds[stage])}" for stage in longest)
    total = sum(seconds.values()) + factor * STAGE_START.value * len(stages)
    return f"{count}, about {_time(total)} on this machine{f' ({details})' if details else ''}"


def measure_products(processes: int) -> float:
    """Measure how many products of two matrices a process makes in a second, where so many make them at once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(processes) as pool:
        return sum(pool.map(_products, [SECONDS] * processes)) / processes


def _products(seconds: float) -> float:
    import numpy as np

    matrix = np.random.default_rng(0).normal(size=(SIDE, SIDE))
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        np.matmul(matrix, matrix)
        count += 1
    return count / passed


def _time(seconds: float) -> str:
    return f"{rounded(seconds / 60)} min" if seconds >= 60 else f"{rounded(seconds)} s"
