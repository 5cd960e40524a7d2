"""A taskset of verifiers as a benchmark, played by verifiers' own runner: its tools, its users, its rewards.

captrain takes the place of the harness and of the model, and of nothing else. Tasks are those of `load()`, in order; a
taskset without an end gives as many as are asked for.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from captrain.benchmarks.standard import StandardEnvironment
from captrain.records import JsonObject
from captrain.run import Machine


class Verifiers(StandardEnvironment):
    """The benchmark.

    Args:
        machine: names the installation, where `captrain benchmark install verifiers` did not make it.
        taskset: id of the taskset: a package installed beside verifiers.
        folder: that the package lies in, where it is not installed.
        config: of the taskset.
        splits: additions to `config` for each of discovery, training and test, where the taskset has splits; none:
            its tasks are divided in shares.
        turns: assistant messages of an episode at most; it ends then, with what it has earned.
        scale, success, discovery, training: see `StandardEnvironment`.
    """

    package = "verifiers"
    absences = {
        "reference": "verifiers has no reference solutions: whatever is held beside one needs a language model",
        "judge": "rewards that a model judges, seats for several agents and tasks in containers are refused",
    }

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        taskset: Annotated[str, Field(min_length=1)],
        folder: str = "",
        config: JsonObject | None = None,
        splits: dict[str, JsonObject] | None = None,
        turns: Annotated[int, Field(ge=1)] = 50,
        scale: tuple[float, float] = (0.0, 1.0),
        success: Annotated[float, Field(gt=0, le=1)] = 1.0,
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.4,
        training: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    ) -> None:
        settings = {
            "taskset": taskset,
            "folder": str(Path(folder).expanduser().resolve()) if folder else "",
            "config": config or {},
            "splits": splits or {"tasks": {}},
            "turns": turns,
        }
        shares = (discovery, training)
        super().__init__(machine, taskset, settings, scale=(scale[0], scale[1]), success=success, shares=shares)
