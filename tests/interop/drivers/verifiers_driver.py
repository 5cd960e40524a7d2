# pyright: reportMissingImports=false
"""Scores recorded episodes as verifiers scores traces; runs in verifiers' environment.

Arguments: the module of the package, the file of episodes. Prints the reward of each.
"""

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls
from verifiers.v1.trace import Trace, TraceTask
from verifiers.v1.types import AssistantMessage, ToolCall
from verifiers.v1.utils.loaders import taskset_config_type


def spoken(action):
    calls = [
        ToolCall(
            id=f"c{place}",
            name=call["function"]["name"],
            arguments=call["function"]["arguments"]
            if isinstance(call["function"]["arguments"], str)
            else json.dumps(call["function"]["arguments"]),
        )
        for place, call in enumerate(action.get("tool_calls") or [])
    ]
    return AssistantMessage(content=action.get("content") or "", tool_calls=calls or None)


async def main():
    module, path = sys.argv[1:]
    taskset = vf.load_taskset(taskset_config_type(module)(id=module))
    tasks = {task.data.index: task for task in taskset}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        episode = json.loads(line)
        task = tasks[episode["index"]]
        trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig(), name="recorded", trainable=False),
        )
        for action in episode["actions"]:
            trace.nodes.append(
                MessageNode(message=spoken(action), sampled=True, parent=len(trace.nodes) - 1 if trace.nodes else None)
            )
        await task.score(trace)
        print(json.dumps({"reward": trace.reward, "success": trace.metrics["success"]}))


asyncio.run(main())
