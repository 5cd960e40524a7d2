"""AgentDojo's user tasks: an office, a travel agency, a bank and a chat, without injections.

97 tasks of four suites, each with the tools and the world of its suite. The user speaks once. The score is the task's
own `utility`, which checks the world and the agent's last message. `captrain benchmark install agentdojo` makes the
worker's environment (the package `agentdojo`, MIT).

AgentDojo has no splits. Ours divide each suite by the same shares and keep a combined task with its parts. Numbers on
our test split differ from the authors', which cover all tasks of a suite.
"""

from typing import Annotated, Literal

from pydantic import Field

from captrain.benchmarks.listed import DividedBenchmark
from captrain.run import Machine

Suite = Literal["workspace", "travel", "banking", "slack"]


class AgentDojo(DividedBenchmark):
    """The benchmark.

    Args:
        machine: names the installation, unless `captrain benchmark install` made it.
        suites: of tasks.
        discovery: share of each suite for diagnosis.
        training: share of each suite for training; the rest is the test split.

    Raises:
        UserError: the shares leave no test tasks.
    """

    name = package = "agentdojo"
    title = "AgentDojo"
    advice = "Run `captrain benchmark install agentdojo`."
    stratified = True
    reward = "1 where the task's own utility holds"

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        suites: Annotated[list[Suite], Field(min_length=1)],
        discovery: Annotated[float, Field(gt=0, lt=1)] = 0.4,
        training: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    ) -> None:
        super().__init__(machine, suites, discovery, training)
