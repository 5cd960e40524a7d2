"""An OpenEnv server as a benchmark: a folder that one is started from, or the address of one that runs.

Tasks are those of its Task API, else what `reset(seed=)` opens. Its tools are MCP tools, or the one action that it
takes as a tool, or whole messages, as packages that captrain writes take them. The reward is the sum of what the steps
are worth, as the standard's other readers have it.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from captrain.benchmarks.standard import StandardEnvironment
from captrain.run import Machine


class OpenEnv(StandardEnvironment):
    """The benchmark.

    Args:
        machine: names the installation, where `captrain benchmark install openenv` did not make it.
        source: folder of the environment (it has `openenv.yaml`), of which each worker starts a server of its own; or
            the address of a running one.
        instructions: what the agent is told before the first observation, "" for nothing.
        turns: assistant messages of an episode at most; it ends then, with what it has earned.
        scale, success, discovery, training: see `StandardEnvironment`.
    """

    package = "openenv"
    absences = {
        "reference": "OpenEnv has no reference solutions: whatever is held beside one needs a language model",
        "splits": "without a Task API tasks are seeds, divided among the splits; whether a seed changes more than the "
        "opening shows, only playing tells",
    }

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        source: Annotated[str, Field(min_length=1)],
        instructions: str = "",
        turns: Annotated[int, Field(ge=1)] = 50,
        scale: tuple[float, float] = (0.0, 1.0),
        success: Annotated[float, Field(gt=0, le=1)] = 1.0,
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.4,
        training: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    ) -> None:
        running = source.startswith(("http://", "https://"))
        place = source.split("://", 1)[1] if running else Path(source).expanduser().resolve().name
        settings = {
            "source": source if running else str(Path(source).expanduser().resolve()),
            "instructions": instructions,
            "turns": turns,
        }
        shares = (discovery, training)
        super().__init__(machine, place, settings, scale=(scale[0], scale[1]), success=success, shares=shares)
