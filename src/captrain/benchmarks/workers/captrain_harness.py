# pyright: reportMissingImports=false
"""A harness of verifiers that does nothing but talk: each request goes to the model, each call to the tool servers.

It runs its loop in the worker's process, as a harness may, so that an episode costs no process of its own.
"""

import json
from contextlib import AsyncExitStack

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["CaptrainHarness"]


class CaptrainHarnessConfig(vf.HarnessConfig):
    """No knobs of its own."""


class CaptrainHarness(vf.Harness[CaptrainHarnessConfig]):
    """The harness."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Talk until the model answers without a call, or the rollout is stopped."""
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
                    content = await result_of(servers, dispatch, call["function"])
                    entry = {"role": "tool", "tool_call_id": call["id"], "content": content}
                    messages.append({**entry, "name": call["function"]["name"]})


async def result_of(servers, dispatch, function):
    """What a call returns; what cannot be called is answered with an error."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return "Error: arguments are no JSON object"
    if function["name"] not in dispatch:
        return f"Error: there is no tool {function['name'][:100]}"
    return await call_mcp(servers, dispatch, function["name"], arguments)
