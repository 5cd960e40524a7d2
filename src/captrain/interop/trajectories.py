"""Trajectories of other people's agents, in the published schemas of the Agent Data Protocol, as chat messages of ours.

Three generations are read, told apart by what a record says of itself: v1 (`id`, `content`, `details`), 1.x, which adds
`schema_version` and links an observation to its call by `tool_call_id`, and ATIF-v1 (`steps` with `tool_calls` and
`observation`). A field that a later minor version adds is passed over; a line that is none of the three is an error
that names file and line. Dialogues of ours are written as ATIF, and read back as the same messages. Reasoning that is
apart from what was said (`reasoning_content`, the description of a message) is no part of a dialogue, and not read.

What the agent does between two observations is one assistant message. What has no form as text and tool calls makes a
trajectory `Inexpressible`, with the reason, so that whoever reads a file can count what was left out and say why.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from captrain import __version__
from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.records import JsonObject, Message, first_fault, plain, require_regular

ATIF = "ATIF-v1.7"
"""The version that is written."""
IMAGE = "an image"
CODE = "code, and no tool of the target runs code"
NO_ANSWER = "nothing that an agent wrote"
UNPROMPTED = "it begins without a prompt"


class Inexpressible(Exception):
    """Error of a trajectory that cannot be told in chat messages and tool calls."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class ApiAction(_Part):
    """A call of a tool."""

    class_: Literal["api_action"]
    function: str
    kwargs: JsonObject
    description: str | None = None
    tool_call_id: str | None = None


class CodeAction(_Part):
    """Code that the agent runs."""

    class_: Literal["code_action"]
    language: str
    content: str
    description: str | None = None
    tool_call_id: str | None = None


class MessageAction(_Part):
    """Words of the agent."""

    class_: Literal["message_action"]
    content: str
    description: str | None = None


class TextObservation(_Part):
    """Text that the agent reads."""

    class_: Literal["text_observation"]
    content: str
    source: Literal["user", "agent", "environment"]
    name: str | None = None
    tool_call_id: str | None = None


class ImageObservation(_Part):
    """An image that the agent sees."""

    class_: Literal["image_observation"]
    content: str
    tool_call_id: str | None = None


class WebObservation(_Part):
    """A web page; its accessibility tree or HTML is text."""

    class_: Literal["web_observation"]
    html: str | None = None
    axtree: str | None = None
    url: str | None = None
    tool_call_id: str | None = None


Entry = Annotated[
    ApiAction | CodeAction | MessageAction | TextObservation | ImageObservation | WebObservation,
    Field(discriminator="class_"),
]
Action = ApiAction | CodeAction | MessageAction


class Trajectory(_Part):
    """A trajectory of v1 or 1.x."""

    schema_version: Annotated[str, Field(pattern=r"^1(\.\d+)*$")] = "1"
    id: str
    content: list[Entry]
    details: JsonObject = {}


class ContentPart(_Part):
    """A part of a message in ATIF."""

    type: Literal["text", "image"]
    text: str = ""


class ToolCall(_Part):
    """A call in ATIF."""

    tool_call_id: str
    function_name: str
    arguments: JsonObject = {}


class Result(_Part):
    """Answer to a call in ATIF, or one that comes unasked."""

    source_call_id: str | None = None
    content: str | list[ContentPart] | None = None


class Results(_Part):
    """Answers to a step in ATIF."""

    results: list[Result] = []


class Step(_Part):
    """A step in ATIF."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[ContentPart] = ""
    tool_calls: list[ToolCall] | None = None
    observation: Results | None = None


class Agent(_Part):
    """Agent of a step in ATIF."""

    name: str
    version: str
    tool_definitions: list[JsonObject] | None = None


class Atif(_Part):
    """A trajectory in ATIF."""

    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.\d+$")]
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    session_id: str | None = None
    extra: JsonObject | None = None


def read_trajectories(path: Path) -> Iterator[Trajectory | Atif]:
    """Yield the trajectories of a JSONL file, in order; blank lines are passed over.

    Raises:
        UserError: the file is missing, or a line is not a trajectory of any generation.
    """
    remedy = "give a file of the `std` split of the Agent Data Protocol, or of ATIF trajectories, one a line"
    require_regular(path, remedy)
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield parse_trajectory(json.loads(line))
            except ValidationError as error:
                problem = first_fault(error)
            except (ValueError, RecursionError) as error:
                problem = "nested too deeply" if isinstance(error, RecursionError) else plain(str(error))
            else:
                continue
            raise UserError(f"{path}, line {number} is not a trajectory ({problem})", remedy)


def parse_trajectory(record: object) -> Trajectory | Atif:
    """Parse one record, by what it says of itself.

    Raises:
        ValueError: it is no trajectory; a ValidationError says where.
    """
    if not isinstance(record, dict):
        raise ValueError("it is not an object")
    return (Atif if "steps" in record else Trajectory).model_validate(record)


def messages_of(trajectory: Trajectory | Atif, tools: Sequence[JsonObject]) -> list[Message]:
    """Tell a trajectory as chat messages of ours.

    Args:
        trajectory: of any generation.
        tools: schemas of the target; one that takes a text argument `code` can take code actions.

    Raises:
        Inexpressible: it shows an image, runs code that no tool of the target runs, holds no message of an agent, or
            begins with one.
    """
    teller = _Teller(code_tool(tools))
    if isinstance(trajectory, Atif):
        for step in trajectory.steps:
            teller.step(step)
    else:
        for entry in trajectory.content:
            teller.entry(entry)
    if not any(message["role"] == "assistant" for message in teller.messages):
        raise Inexpressible(NO_ANSWER)
    if teller.messages[0]["role"] == "assistant":
        raise Inexpressible(UNPROMPTED)
    return teller.messages


def code_tool(tools: Sequence[JsonObject]) -> str:
    """Find the first tool that takes code as text, "" for none."""
    for tool in tools:
        properties = tool["function"].get("parameters", {}).get("properties", {})
        if properties.get("code", {}).get("type") == "string":
            return tool["function"]["name"]
    return ""


class _Teller:
    """Teller of what an agent does and reads, in messages.

    Args:
        runs_code: the tool that takes code actions, "" for none.
    """

    def __init__(self, runs_code: str) -> None:
        self.messages: list[Message] = []
        self._runs_code = runs_code
        self._tool_of_call: dict[str, str] = {}
        self._open: list[str] = []
        """Tools whose calls are not answered yet, oldest first."""

    def entry(self, entry: Entry) -> None:
        """Add an action or observation of v1 or 1.x."""
        match entry:
            case MessageAction():
                self._act(entry.content)
            case ApiAction():
                self._act(entry.description or "", (entry.function, entry.kwargs), entry.tool_call_id)
            case CodeAction():
                if not self._runs_code:
                    raise Inexpressible(CODE)
                self._act(entry.description or "", (self._runs_code, {"code": entry.content}), entry.tool_call_id)
            case TextObservation():
                self._read(entry.content, entry.tool_call_id, answers_call=entry.source == "environment")
            case WebObservation() if entry.axtree or entry.html:
                page = entry.axtree or entry.html or ""
                self._read(f"{entry.url}\n{page}" if entry.url else page, entry.tool_call_id, answers_call=True)
            case _:
                raise Inexpressible(IMAGE)

    def step(self, step: Step) -> None:
        """Add a step in ATIF."""
        text = _text(step.message)
        if step.source == "agent":
            if text or not step.tool_calls:
                self._act(text)
            for call in step.tool_calls or ():
                self._act("", (call.function_name, call.arguments), call.tool_call_id)
        else:
            self._open.clear()
            self.messages.append({"role": step.source, "content": text})
        for result in step.observation.results if step.observation else ():
            self._read(_text(result.content), result.source_call_id, answers_call=True)
        # What is read later than its own step answers no call of it.
        self._open.clear()

    def _act(self, text: str, call: tuple[str, JsonObject] | None = None, name: str | None = None) -> None:
        """Add to the assistant's message, which one observation ends."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open.clear()
        message = self.messages[-1]
        message["content"] = "\n".join(part for part in (message["content"], text) if part)
        if call is not None:
            function = {"name": call[0], "arguments": call[1]}
            message.setdefault("tool_calls", []).append({"type": "function", "function": function})
            self._open.append(call[0])
            if name is not None:
                self._tool_of_call[name] = call[0]

    def _read(self, text: str, name: str | None, *, answers_call: bool) -> None:
        """Add an answer to the call of that id, or without an id, if it `answers_call`, to the oldest call that is not
        answered; anything else is the user's."""
        tool = self._tool_of_call.pop(name, None) if name is not None else None
        if tool is None and answers_call and name is None and self._open:
            tool = self._open[0]
        if tool is None:
            self.messages.append({"role": "user", "content": text})
            return
        if tool in self._open:
            self._open.remove(tool)
        self.messages.append({"role": "tool", "name": tool, "content": text})


def _text(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type == "image" for part in content):
        raise Inexpressible(IMAGE)
    return "\n".join(part.text for part in content)


def tools_of(
    trajectory: Trajectory | Atif, messages: Sequence[Message], tools: Sequence[JsonObject]
) -> list[JsonObject]:
    """List the tools that the agent of a trajectory had: those that it names; else the target's, if it calls no other;
    else what its calls show of them.

    Args:
        trajectory: of any generation.
        messages: the same as chat messages.
        tools: schemas of the target.
    """
    if isinstance(trajectory, Atif) and trajectory.agent.tool_definitions is not None:
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
    return {"schema_version": ATIF, "session_id": name, "agent": actor, "steps": steps, "extra": dict(extra)}
