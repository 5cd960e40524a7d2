"""Requests to `captrain serve`: the supported part of OpenAI's and vLLM's.

Settings that change an answer are fields here. All others either change nothing or are refused, so that no request gets
less than it asked for.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from captrain.contract import calls_of
from captrain.records import JsonObject, Message

NEUTRAL: dict[str, object] = {
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "parallel_tool_calls": True,
    "store": False,
    "response_format": {"type": "text"},
    "stop": [],
    "logit_bias": {},
}
"""Settings that this server lacks, with the values at which they change nothing."""
IGNORED = ("user", "metadata", "safety_identifier", "service_tier")
"""Settings that never change an answer."""


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["object"] = "object"
    properties: dict[str, JsonObject] = {}
    required: list[str] = []


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: _Parameters | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: _Function


def _checked_tool(tool: JsonObject) -> JsonObject:
    """Check a tool's schema and return it unchanged: a chat template writes what it is given."""
    _Tool.model_validate(tool, strict=True)
    return tool


Tool = Annotated[JsonObject, AfterValidator(_checked_tool)]
"""A function's schema: a name that OpenAI allows, and the parameters of an object."""


def _checked_path(path: Path) -> Path:
    if "\0" in str(path) or any(len(part.encode(errors="replace")) > 255 for part in path.parts):
        raise ValueError("no path that a file can have")
    return path


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class MessageFunction(BaseModel):
    """A call in an assistant message: arguments as JSON text, or as the object itself."""

    name: str
    arguments: str | JsonObject


class MessageToolCall(BaseModel):
    """A tool call."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: MessageFunction


class RequestMessage(BaseModel):
    """A message of the dialogue."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """Convert to the form of chat templates: text content, arguments as objects."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        role = "system" if self.role == "developer" else self.role
        message: Message = {"role": role, "content": content or ""}
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            calls = {"tool_calls": [call.model_dump(exclude={"id"}) for call in self.tool_calls]}
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls_of(calls)
            ]
        return message


class StreamOptions(BaseModel):
    """Options of a stream's last chunk."""

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """A request for chat completions."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    def unsupported(self) -> list[str]:
        """The settings that would change the answer if this server had them."""
        extra = self.model_extra or {}
        neutral = {name: value for name, value in NEUTRAL.items() if extra.get(name) in (value, None)}
        return sorted(set(extra) - set(neutral) - set(IGNORED))


class UnloadAdapterRequest(BaseModel):
    """A request to unload an adapter, in vLLM's words."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")]


class LoadAdapterRequest(UnloadAdapterRequest):
    """A request to load one."""

    lora_path: Annotated[Path, AfterValidator(_checked_path)]
