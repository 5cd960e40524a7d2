# pyright: reportMissingImports=false
"""tau2's messages as OpenAI's and back, alike while an episode is played and when its record is scored.

What tau2 cannot take (arguments that are no JSON object, or nested too deeply) is put into a form that its tools answer
with an error, so that nothing an agent says makes tau2 raise.
"""

import json

from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, ToolMessage, UserMessage
from worker_loop import LONGEST, BadRequest

try:  # 1.0
    from tau2.user.user_simulator_base import OUT_OF_SCOPE, STOP, TRANSFER
except ImportError:
    from tau2.user.base import OUT_OF_SCOPE, STOP, TRANSFER

DEEPEST = 50
"""Levels of nesting in a call's arguments; tau2 copies them by recursion."""


def call_ids():
    """Ids of calls, one after another."""
    number = 0
    while True:
        number += 1
        yield f"call_{number}"


def stops(content):
    """Tell if a user's words end the conversation, by any of tau2's marks."""
    return any(token in (content or "") for token in (STOP, TRANSFER, OUT_OF_SCOPE))


def messages_in(message):
    """The messages that one of tau2's stands for."""
    return list(message.tool_messages) if isinstance(message, MultiToolMessage) else [message]


def chat_message(message):
    """A message of tau2 as an OpenAI chat message."""
    if isinstance(message, ToolMessage):
        result = {"role": "tool", "tool_call_id": message.id, "content": message.content or ""}
        return {**result, "error": True} if message.error else result
    chat = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return chat


def tau2_message(message, ids):
    """An OpenAI chat message of agent or user as tau2's; None where it says nothing. Ids come from `ids`, never from
    the message: what a model writes there is not trusted."""
    requestor = "user" if message["role"] == "user" else "assistant"
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        name, arguments = str(function.get("name")), arguments_of(function.get("arguments"))
        calls.append(ToolCall(id=next(ids), name=name, arguments=arguments, requestor=requestor))
    content = message.get("content") or None
    if not calls and not (content or "").strip():
        return None
    kind = UserMessage if requestor == "user" else AssistantMessage
    return kind(role=requestor, content=content, tool_calls=calls or None, cost=0.0)


def arguments_of(value):
    """The arguments of a call. No tool takes an argument without a name, so what is no JSON object goes by none, and
    the tool answers that it does not know it."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
        if isinstance(arguments, dict) and depth(arguments) <= DEEPEST:
            return arguments
    except (ValueError, RecursionError):
        pass
    return {"": value[:LONGEST] if isinstance(value, str) else ""}


def depth(value):
    """Levels of nesting."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def recorded(messages):
    """tau2's messages for a record, without the system prompt; the k-th tool message answers the k-th open call."""
    ids, open_calls, rebuilt = call_ids(), [], []
    for message in messages:
        if message["role"] == "system":
            continue
        if message["role"] == "tool":
            if not open_calls:
                raise BadRequest("the record has a tool message that answers no call")
            call = open_calls.pop(0)
            content, error = message.get("content"), bool(message.get("error"))
            rebuilt.append(ToolMessage(id=call.id, role="tool", content=content, requestor=call.requestor, error=error))
            continue
        utterance = tau2_message(message, ids)
        if utterance is not None:
            open_calls += utterance.tool_calls or []
            rebuilt.append(utterance)
    return rebuilt


def steps_of(messages, before):
    """Steps of the orchestrator behind a record: one for each message and for each round of tool results, after
    the `before` messages that were there at the start."""
    roles = [message["role"] for message in messages if message["role"] != "system"][before:]
    return sum(role != "tool" or roles[index - 1] != "tool" for index, role in enumerate(roles))
