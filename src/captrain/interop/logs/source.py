"""One file of logs as its format reads it, and what all formats share: records, arguments, texts, no credentials.

A format may assume nothing about a value: `entries_of` turns any error of reading it into the reason why an entry is
skipped, and reads on.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from pydantic import BaseModel, ValidationError

from captrain.errors import UserError
from captrain.records import JsonObject, Message, Rollout, Score, Task, digest, first_fault, plain, read_bytes

Foreign = Mapping[str, Any]
"""A JSON object in a foreign file: read only, and checked where it is read."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of reading a value of an unexpected form."""

CREDENTIAL = re.compile(
    r"(api|access|secret|private|auth|bearer|session|refresh)[-_ ]?(key|token)|^(key|token|secret|bearer|auth)$"
    r"|authori[sz]ation|password|passwd|passphrase|credential|client[-_ ]?secret",
    re.IGNORECASE,
)
DROPPED = "[dropped]"
PERFECT = 1 - 1e-6


@dataclass(frozen=True)
class Source:
    """One file as a format reads it.

    file: digest of the file. about: what the file says of itself, as JSON. entries: a rollout, or why there is none,
    each with its place; they can be read once. tools: schemas by name. policies: what agents were told, by environment.
    Tools and policies are complete when all entries have been read.
    """

    file: str
    about: JsonObject
    entries: Iterator[tuple[str, Rollout | str]]
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
    """Say why a value cannot be read, in the terms of whoever wrote the file."""
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
    """Read the JSON document in a file, which may hold escaped lone surrogates.

    Raises:
        ValueError: the file is missing, cannot be read, or is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return json.loads(read_bytes(path))
    except UserError as error:
        raise ValueError(error.problem) from None


def entries_of(
    values: Iterable[tuple[str, object]], read: Callable[[int, Foreign], Rollout | str], first: int = 1
) -> Iterator[tuple[str, Rollout | str]]:
    """Read each value into its record, or into the reason why there is none.

    Args:
        values: places and values; a text says why a value could not be parsed.
        read: takes the number of an object and the object.
        first: number of the first.
    """
    for number, (place, value) in enumerate(values, start=first):
        if not isinstance(value, dict):
            yield place, value if isinstance(value, str) else "it is not an object"
            continue
        try:
            yield place, read(number, value)
        except MALFORMED as error:
            yield place, f"it cannot be read: {reason_of(error)}"


def call_entry(name: object, arguments: object, call_id: object = None) -> CallEntry:
    """Return a call as chat messages hold it."""
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def calling(calls: list[CallEntry], text: str = "") -> Message:
    """Return the assistant's message with these calls."""
    return {"role": "assistant", "content": text, "tool_calls": calls}


def schema_of(tool: object) -> JsonObject | None:
    """Reduce a tool's schema to its known members. OpenAI's form, without its outer object, or Anthropic's; None for
    anything else."""
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
    """Reduce the valid schemas among some values, by tool name."""
    schemas = map(schema_of, tools if isinstance(tools, list) else [])
    return {schema["function"]["name"]: schema for schema in schemas if schema}


def well_formed(value: Any) -> Any:
    """Replace lone surrogates, which no file can hold, in the texts of a JSON value."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {well_formed(name): well_formed(element) for name, element in value.items()}
    return [well_formed(element) for element in value] if isinstance(value, list) else value


def record_of_entry(
    file: str,
    index: int,
    *,
    environment: str,
    task: str,
    data: Mapping[str, object],
    messages: list[Message],
    reward: object,
    policy: str,
    trial: int = 0,
    parts: Mapping[str, float] | None = None,
    reference: list[Message] | None = None,
    fault: str | None = None,
) -> Rollout | str:
    """Return the record of one entry, or why there is none.

    Args:
        file: digest of the file; with the entry's index it gives the rollout its id.
        reward: as the file has it; it must be a number in [0, 1].
        fault: an error that was not the agent's; the reward is then kept in the task's data.
    """
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        return "there is no reward" if reward is None else f"the reward {str(reward)[:80]!r} is not a number"
    if not 0 <= reward <= 1:
        return f"the reward {reward} is not between 0 and 1"
    if not messages:
        return "there are no messages"
    calls = [call for message in messages + (reference or []) for call in message.get("tool_calls") or []]
    if not all(isinstance(call["function"]["name"], str) for call in calls):
        raise ValueError("a call in it has no name")
    passed = reward >= PERFECT
    task, environment, policy = map(well_formed, (task, environment, policy))
    more = {"recorded_reward": float(reward)} if fault else {}
    return Rollout(
        id=digest(file, index)[:12],
        environment=environment,
        task=Task(id=f"{environment}/{task}", split="discovery", data=well_formed({**data, "task": task, **more})),
        trial=trial,
        purpose="diagnosis",
        policy=policy,
        messages=well_formed(messages),
        reference=well_formed(reference or []),
        score=None if fault else Score(reward=float(reward), success=passed, parts=dict(parts or {})),
        outcome="error" if fault else "passed" if passed else "failed",
        error=well_formed(fault) if fault else None,
    )


def cleaned(value: object) -> object:
    """Replace everything under a credential-like name in a JSON value, at any depth."""
    if isinstance(value, dict):
        return {k: DROPPED if CREDENTIAL.search(str(k)) else cleaned(item) for k, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def parsed(arguments: object) -> object:
    """Parse the arguments of a call; text that is no JSON stays text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    return cleaned(arguments)


def text_of(content: object) -> str:
    """Return the text of a message: parts are joined, None is ""."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)
