"""Types and functions that all log formats share: sources, entries, tool calls, texts, removal of credentials.

A format need not check the types of values that it reads. `entries_of` catches any error, skips the entry with the
error as its reason, and continues with the next entry.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from pydantic import BaseModel, ValidationError

from captrain.errors import UserError
from captrain.records import JsonObject, Message, Rollout, Score, Task, digest, first_fault, plain, read_bytes

Foreign = Mapping[str, Any]
"""A JSON object from another tool's file. It is never changed, and its values are checked where they are used."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions raised when a value has an unexpected form."""

WRITTEN_BY_PYTHON = 1 << 20
"""Longest text, in characters, that is parsed as a Python literal."""
CREDENTIAL = re.compile(
    r"(api|access|secret|private|auth|bearer|session|refresh)[-_ ]?(key|token)|^(key|token|secret|bearer|auth)$"
    r"|authori[sz]ation|password|passwd|passphrase|credential|client[-_ ]?secret",
    re.IGNORECASE,
)
DROPPED = "[dropped]"
NAMES = ("name", "tool_name", "toolName", "tool", "function", "action", "api_name")
ARGUMENTS = (
    *("arguments", "args", "input", "parameters", "kwargs", "tool_input", "action_input", "tool_args"),
    *("toolInput", "inputParameters", "params_as_json", "param_dict"),
)
"""Names of the fields of a call that hold its name (`NAMES`) and its arguments, in various tools' notations."""
CALL_IDS = ("id", "call_id", "tool_call_id", "toolCallId", "request_id")


@dataclass(frozen=True)
class Entry:
    """A rollout as a format reads it, before its outcome is judged.

    Attributes:
        index: number of the entry in its file.
        reward: the reward as the file has it; None if it has none.
        policy: name of the model.
        trial: number of the trial; None if the file does not number trials.
        agent: the implementation or prompt, if the file names it.
        fault: an error that was not the agent's fault. The reward is then kept only in the task's data.
        keys: further names of the rollout that a score table may use.
        missing: why there is no reward, if the file says why.
        result: the file with the result of this one trial. Entries with the same result file are the same trial.
    """

    index: int
    environment: str
    task: str
    messages: list[Message]
    reward: object
    policy: str
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    trial: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    reference: list[Message] = field(default_factory=list["Message"])
    fault: str = ""
    agent: str = ""
    keys: tuple[str, ...] = ()
    missing: str = ""
    result: str = ""


NO_DIALOGUE = "it holds no dialogue"
NO_AGENT = "the log holds no message of the agent"
Read = Entry | Rollout | str
"""What a format makes of an object: an entry, a finished rollout, or the reason why it is skipped."""


@dataclass(frozen=True)
class Source:
    """The content of one log file.

    file: digest of the file. about: facts about the file, such as its format. entries: (place, entry, original object);
    can be iterated only once. tools: name -> schema. policies: environment -> the agent's instructions. Tools and
    policies are complete only after all entries have been read.
    """

    file: str
    about: JsonObject
    entries: Iterator[tuple[str, Read, Foreign]]
    tools: dict[str, JsonObject] = field(default_factory=dict[str, "JsonObject"])
    policies: dict[str, str] = field(default_factory=dict[str, str])


class CalledFunction(TypedDict):
    """Name and arguments of a call."""

    name: object
    arguments: object


class CallEntry(TypedDict):
    """A call as a chat message holds it."""

    id: object
    function: CalledFunction


class _Parameters(BaseModel):
    properties: dict[str, dict[str, object]] | None = None
    required: list[str] | None = None


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: _Parameters | None = None


def reason_of(error: Exception) -> str:
    """Return the reason why a value cannot be read, in words that the author of the file understands."""
    if isinstance(error, ValidationError):
        return first_fault(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"it has no {plain(str(error)[:80])}"
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return plain(str(error)[:200])
    is_text = not isinstance(error, UnicodeDecodeError)
    return "a value in it is of another type than it should be" if is_text else "it is not text in UTF-8"


def json_of(path: Path) -> Any:
    """Read the JSON document in a file. Escaped lone surrogates are allowed.

    Raises:
        ValueError: the file is missing, cannot be read, or is not JSON.
        RecursionError: the document is nested too deeply.
    """
    try:
        return json.loads(read_bytes(path))
    except UserError as error:
        raise ValueError(error.problem) from None


def entries_of(
    values: Iterable[tuple[str, object]], read: Callable[[int, Foreign], Read], first: int = 1
) -> Iterator[tuple[str, Read, Foreign]]:
    """Yield (place, entry or reason, original object) for each value.

    Args:
        values: (place, value). A value that is a text is the reason why it could not be parsed.
        read: function of an object's number and the object.
        first: number of the first object.
    """
    for number, (place, value) in enumerate(values, start=first):
        if not isinstance(value, dict):
            yield place, value if isinstance(value, str) else "it is not an object", {}
            continue
        try:
            yield place, read(number, value), value
        except MALFORMED as error:
            yield place, f"it cannot be read: {reason_of(error)}", value


def call_entry(name: object, arguments: object, call_id: object = None) -> CallEntry:
    """Return a tool call in the form of chat messages."""
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def call_of(entry: object) -> CallEntry | None:
    """Read a call in OpenAI's notation, or from an object with a name and arguments. None if it is not a call."""
    if not isinstance(entry, Mapping):
        return None
    function = entry.get("function")
    inner = function if isinstance(function, Mapping) else entry
    name = next((inner[key] for key in NAMES if isinstance(inner.get(key), str)), None)
    arguments = next((inner[key] for key in ARGUMENTS if inner.get(key) is not None), {})
    call_id = next((entry[key] for key in CALL_IDS if entry.get(key) is not None), None)
    return call_entry(name, arguments, call_id) if name else None


def listed_calls(item: Mapping[str, object]) -> object:
    """Return the calls in a field beside a message's text, a list in most tools; None if it has none."""
    if calls := item.get("tool_calls") or item.get("toolCalls"):
        return calls
    more = item.get("additional_kwargs")
    return more.get("tool_calls") if isinstance(more, Mapping) else None


def calling(calls: list[CallEntry], text: str = "") -> Message:
    """Return an assistant message with these calls."""
    return {"role": "assistant", "content": text, "tool_calls": calls}


def schema_of(tool: object) -> JsonObject | None:
    """Reduce a tool's schema to its known fields. None if it is not a schema.

    Accepts OpenAI's form, with or without the outer object, and Anthropic's.
    """
    if not isinstance(tool, Mapping):
        return None
    entry = tool.get("function", tool)
    try:
        function = _Function.model_validate(entry, strict=True)
    except MALFORMED:
        return None
    parameters = entry.get("parameters", entry.get("input_schema"))
    schema = {"name": function.name, "description": function.description, "parameters": parameters}
    content = {name: well_formed(value) for name, value in schema.items() if value is not None}
    return {"type": "function", "function": content}


def schemas_by_name(tools: object) -> dict[str, JsonObject]:
    """Return tool name -> reduced schema for the valid schemas in a list."""
    schemas = map(schema_of, tools if isinstance(tools, list) else [])
    return {schema["function"]["name"]: schema for schema in schemas if schema}


def well_formed(value: Any) -> Any:
    """Replace lone surrogates in all texts of a JSON value, because UTF-8 files cannot hold them."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {well_formed(name): well_formed(element) for name, element in value.items()}
    return [well_formed(element) for element in value] if isinstance(value, list) else value


def rollout_of(file: str, entry: Entry, reward: float, *, passed: bool) -> Rollout | str:
    """Return the rollout of an entry with an outcome, or the reason why the entry is left out.

    Args:
        file: digest of the file. The rollout's id is made from it and the entry's index.
        entry: the entry.
        reward: between 0 and 1.
        passed: whether the rollout passed.
    """
    if not entry.messages:
        return "there are no messages"
    calls = [call for message in entry.messages + entry.reference for call in message.get("tool_calls") or []]
    if not all(isinstance(call["function"]["name"], str) for call in calls):
        return "it cannot be read: a call in it has no name"
    is_silent = not any(message["role"] == "assistant" for message in entry.messages)
    fault = entry.fault or (NO_AGENT if is_silent and not passed else "")
    task, environment, policy = map(well_formed, (entry.task, entry.environment, entry.policy))
    more = {"recorded_reward": reward} if fault else {}
    return Rollout(
        id=digest(file, entry.index)[:12],
        environment=environment,
        task=Task(
            id=f"{environment}/{task}", split="discovery", data=well_formed({**entry.data, "task": task, **more})
        ),
        trial=entry.trial or 0,
        purpose="diagnosis",
        policy=policy,
        messages=well_formed(entry.messages),
        reference=well_formed(entry.reference),
        score=None if fault else Score(reward=reward, success=passed, parts=dict(entry.parts)),
        outcome="error" if fault else "passed" if passed else "failed",
        error=well_formed(fault) if fault else None,
    )


def trial_of(value: object) -> int | None:
    """Return the value if it can number a trial, else None."""
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def cleaned(value: object) -> object:
    """Replace all values under credential-like names in a JSON value, at any depth."""
    if isinstance(value, dict):
        return {k: DROPPED if CREDENTIAL.search(str(k)) else cleaned(item) for k, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def parsed(arguments: object) -> object:
    """Parse the arguments of a call from JSON or a Python dict literal. Any other text stays text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return cleaned(literal(arguments)) if arguments.lstrip().startswith("{") else arguments
    return cleaned(arguments)


def loaded(value: object) -> object:
    """Parse text that is a JSON object or array. Return anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value
    except (ValueError, RecursionError):
        return value


def literal(text: str) -> object:
    """Parse a Python literal, such as a dict. Return any other text unchanged."""
    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(text.strip()) if len(text) <= WRITTEN_BY_PYTHON else text
        json.dumps(value)
        return value
    return text


def text_of(content: object) -> str:
    """Return the text of a message's content. Parts are joined, None becomes "", and other values become JSON.

    A list of objects that are no parts, such as the rows of a result, becomes JSON, too.
    """
    if isinstance(content, list):
        text = "".join(_text_of_part(part) for part in content)
        is_data = not text and any(isinstance(part, dict) and part and "type" not in part for part in content)
        return json.dumps(content, ensure_ascii=False) if is_data else text
    if isinstance(content, dict):
        return _text_of_part(content) or json.dumps(content, ensure_ascii=False)
    return "" if content is None else str(content)


def _text_of_part(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text") or (part.get("content") if part.get("type") in ("text", "output_text") else "")
    text = text.get("value") if isinstance(text, Mapping) else text  # OpenAI's Assistants
    return text if isinstance(text, str) else ""
