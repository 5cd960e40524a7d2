"""One file of logs as its format reads it, and what all formats do alike: records, arguments, texts, no credentials.

A format may count on nothing: whatever stands where it looks, `entry_of` makes it a record or the reason why there is
none, and the next entry is read.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from captrain.errors import UserError
from captrain.records import JsonObject, Message, Rollout, Score, Task, digest, first_fault, plain, read_bytes

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of reading a value that has another form than it should."""

CREDENTIAL = re.compile(
    r"(api|access|secret|private|auth|bearer|session|refresh)[-_ ]?(key|token)|^(key|token|secret|bearer|auth)$"
    r"|authori[sz]ation|password|passwd|passphrase|credential|client[-_ ]?secret",
    re.IGNORECASE,
)
DROPPED = "[dropped]"
PERFECT = 1 - 1e-6


@dataclass(frozen=True)
class Source:
    """One file as a format reads it: its digest, what is known of it, its entries (a rollout, or why there is none,
    each with its place), which can be read once, the tools it names, by name, and the policies that agents were told,
    by environment: all are there when all entries have been read."""

    file: str
    about: JsonObject
    entries: Iterator[tuple[str, Rollout | str]]
    tools: dict[str, JsonObject]
    policies: dict[str, str] = field(default_factory=dict[str, str])


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: "_Parameters | None" = None


class _Parameters(BaseModel):
    properties: dict[str, JsonObject] | None = None
    required: list[str] | None = None


def reason_of(error: Exception) -> str:
    """Say why a value does not read, in the words of whoever wrote the file."""
    if isinstance(error, ValidationError):
        return first_fault(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"it has no {plain(str(error)[:80])}"
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return plain(str(error)[:200])
    return "a value in it is of another type than it should be"


def json_of(path: Path) -> Any:
    """Read the JSON document in a file of somebody else's, where halves of characters may be spelt that no file holds.

    Raises:
        ValueError: it is missing, cannot be read, or is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return json.loads(read_bytes(path))
    except UserError as error:
        raise ValueError(error.problem) from None


def entry_of(read: Callable[[], Rollout | str]) -> Rollout | str:
    """Read an entry into its record, or the reason why there is none."""
    try:
        return read()
    except MALFORMED as error:
        return f"it does not read: {reason_of(error)}"


def schema_of(tool: object) -> JsonObject | None:
    """Reduce a tool's schema to its known members, None for what is none; OpenAI's, or without its outer object, or
    Anthropic's."""
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


def well_formed(value: object) -> object:
    """Replace halves of characters, which JSON can spell and no file holds, in the texts of a JSON value."""
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
    data: JsonObject,
    messages: list[Message],
    reward: object,
    policy: str,
    trial: int = 0,
    parts: Mapping[str, float] | None = None,
    reference: list[Message] | None = None,
    fault: str | None = None,
) -> Rollout | str:
    """Make the record of one entry, or say why there is none.

    Args:
        file: digest of the file; with the entry's index it gives the rollout its id.
        reward: as the file has it; it must be a number in [0, 1].
        fault: what went wrong that is no verdict on the agent; the reward is then kept in the task's data.
    """
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        return "there is no reward"
    if not 0 <= reward <= 1:
        return f"the reward {reward} is not between 0 and 1"
    if not messages:
        return "there are no messages"
    passed = reward >= PERFECT
    messages, reference = _texts(messages), _texts(reference or [])
    task, environment, policy = _text(task), _text(environment), _text(policy)
    more = {"recorded_reward": float(reward)} if fault else {}
    return Rollout(
        id=digest(file, index)[:12],
        environment=environment,
        task=Task(id=f"{environment}/{task}", split="discovery", data=_object({**data, "task": task, **more})),
        trial=trial,
        purpose="diagnosis",
        policy=policy,
        messages=messages,
        reference=reference,
        score=None if fault else Score(reward=float(reward), success=passed, parts=dict(parts or {})),
        outcome="error" if fault else "passed" if passed else "failed",
        error=_text(fault) if fault else None,
    )


def _texts(messages: list[Message]) -> list[Message]:
    """Make the messages well-formed.

    Raises:
        ValueError: a call has no name.
    """
    for message in messages:
        if not all(isinstance(call["function"]["name"], str) for call in message.get("tool_calls") or []):
            raise ValueError("a call in it has no name")
    return [_object(message) for message in messages]


def _object(value: JsonObject) -> JsonObject:
    return {_text(name): well_formed(element) for name, element in value.items()}


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()


def cleaned(value: object) -> object:
    """Replace everything under a credential-like name in a JSON value, at any depth."""
    if isinstance(value, dict):
        return {k: DROPPED if CREDENTIAL.search(str(k)) else cleaned(item) for k, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def parsed(arguments: object) -> object:
    """Parse arguments of a call to an object, where they are one; text that is none stays text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    return cleaned(arguments)


def text_of(content: object) -> str:
    """Return the text of a message: None is none, parts are joined."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def models(source: object) -> JsonObject:
    """Pick model, temperature and seed from settings that may hold keys and hosts."""
    source = source if isinstance(source, Mapping) else {}
    settings = source.get("llm_args")
    sampling = {name: settings.get(name) for name in ("temperature", "seed")} if isinstance(settings, Mapping) else {}
    return {"model": source.get("llm"), **{name: value for name, value in sampling.items() if value is not None}}
