"""Trajectories of other agents in ATIF, the present schema of the Agent Data Protocol, as chat messages of ours.

A field that a later minor version adds is passed over; a line that is no trajectory is an error that names file and
line. Dialogues of ours are written as ATIF, and read back as the same messages. Reasoning that is apart from what was
said (`reasoning_content`) is no part of a dialogue, and not read.

What the agent does between two observations is one assistant message. What has no form as text and tool calls makes a
trajectory `Inexpressible`, with the reason, so that whoever reads a file can count what was left out and say why.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from captrain import __version__
from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.records import JsonObject, Message, first_fault, plain, require_regular

VERSION = "ATIF-v1.7"
"""The version that is written."""
IMAGE = "an image"
NO_ANSWER = "nothing that an agent wrote"
UNPROMPTED = "it begins without a prompt"


class Inexpressible(Exception):
    """Error of a trajectory that cannot be told in chat messages and tool calls."""


class ContentPart(BaseModel):
    """A part of a message in ATIF."""

    type: Literal["text", "image"]
    text: str = ""


class ToolCall(BaseModel):
    """A call in ATIF."""

    tool_call_id: str
    function_name: str
    arguments: JsonObject = {}


class Result(BaseModel):
    """Answer to a call in ATIF, or one that comes unasked."""

    source_call_id: str | None = None
    content: str | list[ContentPart] | None = None


class Results(BaseModel):
    """Answers to a step in ATIF."""

    results: list[Result] = []


class Step(BaseModel):
    """A step in ATIF."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[ContentPart] = ""
    tool_calls: list[ToolCall] | None = None
    observation: Results | None = None


class Agent(BaseModel):
    """Agent of a step in ATIF."""

    name: str
    version: str
    tool_definitions: list[JsonObject] | None = None


class Atif(BaseModel):
    """A trajectory in ATIF."""

    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.\d+$")]
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    session_id: str | None = None
    extra: JsonObject | None = None


def read_trajectories(path: Path) -> Iterator[Atif]:
    """Yield the trajectories of a JSONL file, in order; blank lines are passed over.

    Raises:
        UserError: the file is missing, or a line is not a trajectory in ATIF.
    """
    remedy = "give a file of trajectories in ATIF, one a line"
    require_regular(path, remedy)
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield Atif.model_validate(json.loads(line))
            except ValidationError as error:
                problem = first_fault(error)
            except (ValueError, RecursionError) as error:
                problem = "nested too deeply" if isinstance(error, RecursionError) else plain(str(error))
            else:
                continue
            raise UserError(f"{path}, line {number} is not a trajectory ({problem})", remedy)


def messages_of(trajectory: Atif) -> list[Message]:
    """Tell a trajectory as chat messages of ours.

    Raises:
        Inexpressible: it shows an image, holds no message of an agent, or begins with one.
    """
    messages: list[Message] = []
    tool_of_call: dict[str, str] = {}
    for step in trajectory.steps:
        text = _text(step.message)
        unanswered: list[str] = []
        if step.source != "agent":
            messages.append({"role": step.source, "content": text})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            spoken = messages[-1]
            spoken["content"] = "\n".join(filter(None, (spoken["content"], text)))
            for call in step.tool_calls or ():
                function = {"name": call.function_name, "arguments": call.arguments}
                spoken.setdefault("tool_calls", []).append({"type": "function", "function": function})
                tool_of_call[call.tool_call_id] = call.function_name
                unanswered.append(call.function_name)
        for result in step.observation.results if step.observation else ():
            # Without an id it answers the oldest call of its own step; what answers no call is the user's.
            name = result.source_call_id
            tool = next(iter(unanswered), None) if name is None else tool_of_call.pop(name, None)
            if tool in unanswered:
                unanswered.remove(tool)
            content = _text(result.content)
            messages.append(
                {"role": "tool", "name": tool, "content": content} if tool else {"role": "user", "content": content}
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise Inexpressible(NO_ANSWER)
    if messages[0]["role"] == "assistant":
        raise Inexpressible(UNPROMPTED)
    return messages


def _text(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type == "image" for part in content):
        raise Inexpressible(IMAGE)
    return "\n".join(part.text for part in content)


def tools_of(trajectory: Atif, messages: Sequence[Message], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """List the tools that the agent of a trajectory had: those that it names; else the target's, if it calls no other;
    else what its calls show of them.

    Args:
        trajectory: which.
        messages: the same as chat messages.
        tools: schemas of the target.
    """
    if trajectory.agent.tool_definitions is not None:
        return trajectory.agent.tool_definitions
    calls = [call for message in messages if message["role"] == "assistant" for call in calls_of(message)]
    if {name for name, _ in calls} <= {tool["function"]["name"] for tool in tools}:
        return list(tools)
    schemas: dict[str, JsonObject] = {}
    for name, arguments in calls:
        parameters = schemas.setdefault(name, {"type": "object", "properties": {}})
        parameters["properties"].update({key: {"type": _type(value)} for key, value in arguments.items()})
    functions = [{"name": name, "description": "", "parameters": parameters} for name, parameters in schemas.items()]
    return [{"type": "function", "function": function} for function in functions]


def _type(value: object) -> str:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def atif_document(
    messages: Sequence[Message],
    *,
    name: str,
    agent: str,
    extra: Mapping[str, object],
    tools: Sequence[JsonObject] | None = None,
) -> JsonObject:
    """Tell messages as a trajectory in ATIF.

    Args:
        messages: of one dialogue.
        name: session id.
        agent: name of who acted.
        extra: whatever else is to be known of it, JSON.
        tools: schemas of the tools that the agent had, where they are to be told.
    """
    steps: list[JsonObject] = []
    open_calls: list[str] = []
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if role == "tool":
            result = {"source_call_id": open_calls.pop(0)} if open_calls else {}
            steps[-1].setdefault("observation", {"results": []})["results"].append({**result, "content": text})
            continue
        source = "agent" if role == "assistant" else role
        step: JsonObject = {"step_id": len(steps) + 1, "source": source, "message": text}
        calls = calls_of(message) if role == "assistant" else []
        open_calls = [f"call_{len(steps) + 1}_{number}" for number in range(len(calls))]
        if calls:
            step["tool_calls"] = [
                {"tool_call_id": call_id, "function_name": tool, "arguments": arguments}
                for call_id, (tool, arguments) in zip(open_calls, calls, strict=True)
            ]
        steps.append(step)
    actor = {"name": agent, "version": __version__, **({} if tools is None else {"tool_definitions": list(tools)})}
    return {"schema_version": VERSION, "session_id": name, "agent": actor, "steps": steps, "extra": dict(extra)}
