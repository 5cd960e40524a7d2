# pyright: reportMissingImports=false
"""Plays recorded episodes in an OpenEnv server through OpenEnv's own client; runs in OpenEnv's environment.

Arguments: the address, the file of episodes. Prints a line of JSON an episode: the sum of its rewards, and the last
score that the server told; and at the end what the Task API and the tools look like.
"""

import json
import sys
from pathlib import Path

from openenv.core import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient


def play(client, episode):
    result = client.reset(split=episode["split"], index=episode["index"])
    total, score, messages = 0.0, None, list(result.observation["messages"])
    for action in episode["actions"]:
        if result.done:
            break
        calls = action.get("tool_calls") or []
        native = len(calls) == 1 and isinstance(calls[0]["function"]["arguments"], dict) and not action.get("content")
        if native:
            function = calls[0]["function"]
            step = {"type": "call_tool", "tool_name": function["name"], "arguments": function["arguments"]}
        else:
            step = {"type": "message", "content": action.get("content") or "", "tool_calls": calls}
        result = client.step(step)
        total += result.reward
        score = result.metadata["score"]
        if not native:
            messages += result.observation["messages"]
    return {"total": total, "score": score, "done": result.done, "messages": messages}


def main():
    address, path = sys.argv[1:]
    with GenericEnvClient(base_url=address).sync() as client:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            print(json.dumps(play(client, json.loads(line))))
        same = [client.reset(seed=7).observation["messages"] for _ in range(2)]
        other = client.reset(seed=8).observation["messages"]
    with MCPToolClient(base_url=address).sync() as tools:
        tools.reset(split="training", index=0)
        listed = [{"name": tool.name, "parameters": tool.input_schema} for tool in tools.list_tools()]
    print(json.dumps({"tools": listed, "seeded": same[0] == same[1] != other}))


if __name__ == "__main__":
    main()
