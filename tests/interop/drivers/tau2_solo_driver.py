# pyright: reportMissingImports=false
"""Has tau2-bench's solo mode, where the agent has the user's tools and nobody to talk to, write its results.

Runs in tau2's environment; argument: the file that gets the results. Two tasks of telecom are played by a script that
makes the gold calls, of the second all but the last; loop, judgement and writer are tau2's own.
"""

import sys
import uuid
from pathlib import Path

from tau2 import run
from tau2.agent import llm_agent
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.registry import registry

TASKS = 2
SHORT: dict[str, int] = {}


def reply(tool: str, arguments: dict) -> AssistantMessage:
    call = ToolCall(id=uuid.uuid4().hex[:8], name=tool, arguments=arguments)
    return AssistantMessage(role="assistant", content=None, tool_calls=[call], cost=0.0, usage={})


class Script:
    """Stands for the model of every task in turn."""

    def __init__(self, tasks: list) -> None:
        self.tasks = iter(tasks)
        self.calls: list[ToolCall] = []

    def generate(self, messages: list, **_: object) -> AssistantMessage:
        if not any(message.role == "assistant" for message in messages):
            task = next(self.tasks)
            actions = task.evaluation_criteria.actions
            self.calls = [(action.name, action.arguments) for action in actions][: SHORT.get(task.id)]
        return reply(*self.calls.pop(0)) if self.calls else reply("done", {})


if __name__ == "__main__":
    out = Path(sys.argv[1])
    known = [task for task in registry.get_tasks_loader("telecom")() if task.ticket]
    chosen = [task for task in known if 1 < len(task.evaluation_criteria.actions) < 5][:TASKS]
    SHORT[chosen[-1].id] = len(chosen[-1].evaluation_criteria.actions) - 1
    llm_agent.generate = Script(chosen).generate
    out.unlink(missing_ok=True)
    run.run_tasks(
        "telecom", chosen, "llm_agent_solo", "dummy_user", llm_agent="scripted", llm_args_agent={}, llm_args_user={},
        save_to=out, max_concurrency=1, console_display=False, log_level="ERROR",
    )  # fmt: skip
