"""One file of logs as its format reads it, and what all formats do alike: records, arguments, texts, no credentials."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from captrain.records import JsonObject, Message, Rollout, Score, Task, digest

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
    """The record of one entry, or the reason why there is none.

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
    more = {"recorded_reward": float(reward)} if fault else {}
    return Rollout(
        id=digest(file, index)[:12],
        environment=environment,
        task=Task(id=f"{environment}/{task}", split="discovery", data={**data, "task": task, **more}),
        trial=trial,
        purpose="diagnosis",
        policy=policy,
        messages=messages,
        reference=reference or [],
        score=None if fault else Score(reward=float(reward), success=passed, parts=dict(parts or {})),
        outcome="error" if fault else "passed" if passed else "failed",
        error=fault,
    )


def cleaned(value: object) -> object:
    """A JSON value with everything under a credential-like name replaced, at any depth."""
    if isinstance(value, dict):
        return {k: DROPPED if CREDENTIAL.search(str(k)) else cleaned(item) for k, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def parsed(arguments: object) -> object:
    """Arguments of a call as an object, where they are one; text that is none stays text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return arguments
    return cleaned(arguments)


def text_of(content: object) -> str:
    """The text of a message: None is none, parts are joined."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def models(source: object) -> JsonObject:
    """Model, temperature and seed, of settings that may hold keys and hosts."""
    source = source if isinstance(source, Mapping) else {}
    settings = source.get("llm_args")
    sampling = {name: settings.get(name) for name in ("temperature", "seed")} if isinstance(settings, Mapping) else {}
    return {"model": source.get("llm"), **{name: value for name, value in sampling.items() if value is not None}}
