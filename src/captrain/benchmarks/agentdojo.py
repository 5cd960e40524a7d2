"""AgentDojo's user tasks: an office, a travel agency, a bank and a chat, without any injection.

97 tasks of four suites, each with the tools and the world of its suite. The user speaks once; the score is the task's
own `utility`, which looks at the world and at the agent's last words. `captrain benchmark install agentdojo` makes the
environment that its worker runs in (the package `agentdojo`, MIT).

AgentDojo has no splits. Ours divide each suite in the same shares, and keep a task that is combined from others with
those; numbers on our test split are not those of its authors, which are over all tasks of a suite.
"""

from typing import Annotated, Literal

from pydantic import Field

from captrain.benchmarks.scripted import ScriptedBenchmark
from captrain.run import Machine

Suite = Literal["workspace", "travel", "banking", "slack"]


class AgentDojo(ScriptedBenchmark):
    """The benchmark.

    Args:
        machine: names the installation, where `captrain benchmark install` did not make it.
        suites: of tasks.
        discovery: share of each suite for diagnosis.
        training: share of each suite for training; the rest is the test split.

    Raises:
        UserError: the shares leave nothing to test on.
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
