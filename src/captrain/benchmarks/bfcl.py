"""BFCL's multi-turn categories: files, messages, trades, trips and cars, asked for over several turns.

800 tasks: 200 scenarios, each with its plain form (`base`) and three variants: a tool that comes late (`miss_func`), a
value that the user says late (`miss_param`), long results (`long_context`). The user's turns are a script, and the
score is BFCL's own: after every turn the world must be as gold leaves it, and what gold's calls returned must have been
seen.
`captrain benchmark install bfcl` makes the environment that its worker runs in (the package `bfcl-eval`, Apache-2.0).

BFCL has no splits. Ours keep the variants of a scenario together; numbers on our test split are not the leaderboard's,
which are over all tasks of a category.
"""

from typing import Annotated, Literal

from pydantic import Field

from captrain.benchmarks.scripted import ScriptedBenchmark
from captrain.run import Machine

Category = Literal["base", "miss_func", "miss_param", "long_context"]


class Bfcl(ScriptedBenchmark):
    """The benchmark.

    Args:
        machine: names the installation, where `captrain benchmark install` did not make it.
        categories: of tasks.
        discovery: share of the scenarios for diagnosis.
        training: share of the scenarios for training; the rest is the test split.

    Raises:
        UserError: the shares leave nothing to test on.
    """

    name = package = "bfcl"
    title = "BFCL"
    advice = (
        "Run `captrain benchmark install bfcl`, or make an environment with `pip install --no-deps bfcl-eval mpmath`."
    )
    reward = "1 where every turn leaves the world as gold does and has seen what gold sees"

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        categories: Annotated[list[Category], Field(min_length=1)],
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.4,
        training: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    ) -> None:
        super().__init__(machine, categories, discovery, training)
