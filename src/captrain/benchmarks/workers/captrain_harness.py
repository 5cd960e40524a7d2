# pyright: reportMissingImports=false
"""A harness of verifiers that only relays: requests go to the model, calls go to the tool servers.

Its loop runs in the worker's process, so that an episode needs no process of its own.
"""

from contextlib import AsyncExitStack

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult
from worker_loop import call_of

__all__ = ["CaptrainHarness"]


class CaptrainHarnessConfig(vf.HarnessConfig):
    """No settings."""


class CaptrainHarness(vf.Harness[CaptrainHarnessConfig]):
    """The harness."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Relay until the model answers without a call, or the rollout is stopped."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        spoken = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message_to_wire(message) for message in spoken]
        config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            tools, dispatch, servers = await connect_mcp(config, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                reply = await client.post(
                    f"{endpoint}/chat/completions", headers={"Authorization": f"Bearer {secret}"}, json=body
                )
                if reply.status_code >= 400:
                    return ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    name, arguments = call_of(call)
                    if not isinstance(arguments, dict):
                        content = "Error: arguments are no JSON object"
                    elif name not in dispatch:
                        content = f"Error: there is no tool {name[:100]}"
                    else:
                        content = await call_mcp(servers, dispatch, name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content, "name": name})
