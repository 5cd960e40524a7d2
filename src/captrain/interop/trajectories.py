"""Trajectories in ATIF, the current schema of the Agent Data Protocol, from and to chat messages.

Fields that later minor versions add are ignored. A line that is no trajectory is an error that names file and line.
Dialogues that are written as ATIF are read back as the same messages. Reasoning (`reasoning_content`) is not read.

All steps of the agent between two observations are one assistant message. A trajectory that text and tool calls cannot
express raises `Inexpressible` with the reason, so that a reader can count what it leaves out.
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
"""The version that captrain writes."""
IMAGE = "an image"
NO_ANSWER = "nothing that an agent wrote"
UNPROMPTED = "it begins without a prompt"


class Inexpressible(Exception):
    """A trajectory that chat messages and tool calls cannot express."""


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
    """Result of a call in ATIF, or of no call."""

    source_call_id: str | None = None
    content: str | list[ContentPart] | None = None


class Results(BaseModel):
    """Results of a step in ATIF."""

    results: list[Result] = []


class TrajectoryStep(BaseModel):
    """A step in ATIF."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[ContentPart] = ""
    tool_calls: list[ToolCall] | None = None
    observation: Results | None = None


class Agent(BaseModel):
    """The agent of a trajectory in ATIF."""

    name: str
    version: str
    tool_definitions: list[JsonObject] | None = None


class Atif(BaseModel):
    """A trajectory in ATIF."""

    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.\d+$")]
    session_id: str | None = None
    agent: Agent
    steps: Annotated[list[TrajectoryStep], Field(min_length=1)]
    extra: JsonObject | None = None


def read_trajectories(path: Path) -> Iterator[Atif]:
    """Yield the trajectories of a JSONL file, in order; blank lines are ignored.

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
    """Convert a trajectory to chat messages.

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
        results = step.observation.results if step.observation else []
        for result in results:
            # A result without an id answers the oldest call of its step. A result of no call becomes a user message.
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
    """Return the tools of a trajectory's agent.

    These are the trajectory's own definitions. If it has none, they are the target's tools if these cover its calls,
    and otherwise schemas inferred from its calls.

    Args:
        trajectory: in ATIF.
        messages: the same as chat messages.
        tools: schemas of the target.
    """
    if trajectory.agent.tool_definitions is not None:
        return trajectory.agent.tool_definitions
    calls = [call for message in messages if message["role"] == "assistant" for call in calls_of(message)]
    if {name for name, _ in calls} <= {tool["function"]["name"] for tool in tools}:
        return list(tools)
    properties: dict[str, dict[str, object]] = {}
    for name, arguments in calls:
        types = {key: {"type": _type(value)} for key, value in arguments.items()}
        properties.setdefault(name, {}).update(types)
    parameters = {name: {"type": "object", "properties": types} for name, types in properties.items()}
    return [
        {"type": "function", "function": {"name": name, "description": "", "parameters": parameters[name]}}
        for name in parameters
    ]


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
    """Convert messages to a trajectory in ATIF.

    Args:
        messages: messages of one dialogue.
        name: session id.
        agent: name of the agent.
        extra: further facts, JSON.
        tools: schemas of the agent's tools; None: they are left out.
    """
    steps: list[TrajectoryStep] = []
    open_calls: list[str] = []
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if role == "tool":
            answered = {"source_call_id": open_calls.pop(0)} if open_calls else {}
            observation = steps[-1].observation or Results(results=[])
            observation.results.append(Result(**answered, content=text))
            steps[-1].observation = observation
            continue
        number = len(steps) + 1
        step = TrajectoryStep(step_id=number, source="agent" if role == "assistant" else role, message=text)
        calls = calls_of(message) if role == "assistant" else []
        open_calls = [f"call_{number}_{place}" for place in range(len(calls))]
        if calls:
            step.tool_calls = [
                ToolCall(tool_call_id=call_id, function_name=tool, arguments=arguments)
                for call_id, (tool, arguments) in zip(open_calls, calls, strict=True)
            ]
        steps.append(step)
    actor = Agent(name=agent, version=__version__)
    if tools is not None:
        actor.tool_definitions = list(tools)
    trajectory = Atif(schema_version=VERSION, session_id=name, agent=actor, steps=steps, extra=dict(extra))
    return trajectory.model_dump(exclude_unset=True)
