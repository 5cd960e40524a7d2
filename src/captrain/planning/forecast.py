"""The forecast that `captrain run` prints before its first stage: what will run, and for how long."""

from collections.abc import Collection
from pathlib import Path

from captrain.config import compose_configuration, load_choice, row_of
from captrain.errors import UserError
from captrain.planning.assumptions import STAGE_START
from captrain.planning.estimate import Estimate, Node
from captrain.planning.plan import time_text


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
        raise UserError(
            f"DVC does not read the pipeline: {error}",
            "mend dvc.yaml, dvc.lock or params.yaml, or restore them from git",
        ) from None
    first = [stage for stage in graph if getattr(stage, "name", None) in changed]
    stale = {stage for change in first for stage in (change, *ancestors(graph, change))}
    return [row_of(stage.name) for stage in reversed([*topological_sort(graph)]) if stage in stale]


def forecast_run(root: Path, stages: Collection[str]) -> str:
    """Say in a line what stages will take, at most, by the rates that the plan counts with.

    Args:
        root: of the project.
        stages: that run.

    Raises:
        UserError: the configuration that params.yaml selects does not compose.
    """
    spec, _ = compose_configuration([], root)
    costs = {cost.stage: cost.seconds for cost in Estimate(spec, Node(), 1).costs() if cost.stage in stages}
    count = f"{len(stages)} stage{'s' if len(stages) != 1 else ''} to run"
    if unknown := [stage for stage, seconds in costs.items() if seconds is None]:
        return f"{count}; for how long is not known ({', '.join(unknown)}: see `captrain plan`)"
    seconds = sum(cost or 0.0 for cost in costs.values()) + STAGE_START.value * len(stages)
    return f"{count}, about {time_text(seconds)} at the rates of `captrain plan`"
