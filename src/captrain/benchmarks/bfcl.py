"""BFCL's multi-turn categories: files, messages, trades, trips and cars, over several user turns.

The 800 tasks are 200 scenarios, each in a plain form (`base`) and three variants: a tool that arrives late
(`miss_func`), a value that the user tells late (`miss_param`), long results (`long_context`). The user's turns are a
script. The score is BFCL's own: after every turn the world must equal the gold world, and the agent must have seen the
results of the gold calls. `captrain benchmark install bfcl` makes the worker's environment (the package `bfcl-eval`,
Apache-2.0).

BFCL has no splits. Ours keep the variants of a scenario together. Numbers on our test split differ from the
leaderboard's, which cover all tasks of a category.
"""

from typing import Annotated, Literal

from pydantic import Field

from captrain.benchmarks.listed import DividedBenchmark
from captrain.run import Machine

Category = Literal["base", "miss_func", "miss_param", "long_context"]


class Bfcl(DividedBenchmark):
    """The benchmark.

    Args:
        machine: names the installation, unless `captrain benchmark install` made it.
        categories: of tasks.
        discovery: share of the scenarios for diagnosis.
        training: share of the scenarios for training; the rest is the test split.

    Raises:
        UserError: the shares leave no test tasks.
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
