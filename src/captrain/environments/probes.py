"""Probes: agents without the capability, which passport checks play. None of them may earn much.

Probes use no model. They take call arguments from the reference, so that they earn at least as much as a policy in
training could find. A file could recognise a fixed probe, so the examination's key seeds their words, lengths, turns
and calls.
"""

import json
import random
import re
import string
from collections.abc import Iterator, Sequence

from captrain.contract import CheckedEnvironment, calls_of, tool_call
from captrain.records import JsonObject, Message, Task, leaves

STOP = 0.15
"""Probability that the random agent stops after a call."""
LONGEST = 30_000
"""Characters of the longest text that an agent says."""
SIGNS = ((0x21, 0x2F), (0xC0, 0x24F), (0x1F600, 0x1F64F))
"""Ranges of characters that agents rarely write."""
CLOSING: Message = {"role": "assistant", "content": "Done."}
AT_ONCE, RANDOM = "a message of many calls", "random calls"
LUCKY = {AT_ONCE, RANDOM}
"""Plays that may solve a task by chance or with the reference's values."""
ENDLESS = ("talk", RANDOM, "one call again and again")
SAYINGS = ("a few words", "a text", "an echo", "an echo of the request", "blanks", "signs", "calls as text")
FLAWS = (
    "a call without arguments",
    "malformed arguments",
    "arguments of another type",
    "arguments that are null",
    "a tool whose name is misspelt",
    "an unknown tool",
    "arguments under other names",
)
"""Ways in which a call breaks its schema."""


# Reading messages.


def say(text: str) -> Message:
    """Make an assistant message without calls."""
    return {"role": "assistant", "content": text}


def content(message: Message) -> str:
    """Return the text of a message."""
    return message.get("content") or ""


def words(text: str) -> list[str]:
    """Split a text into words without the punctuation around them."""
    return [word for part in text.split() if (word := part.strip(".,;:!?()[]{}\"'"))]


def shape(value: str) -> str:
    """Replace each run of letters and each run of digits by one character."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", value))


def results(message: Message) -> list[str]:
    """List the values in a tool result: those of its JSON, or the words of a text."""
    try:
        return [leaf for leaf in leaves(json.loads(content(message))) if leaf]
    except (ValueError, RecursionError):
        return words(content(message))


def shown(message: Message) -> list[str]:
    """List the values in a tool result and the names of its fields, which may be ids."""
    names = re.findall(r'"([^"\\]{1,100})"\s*:', content(message))
    return list(dict.fromkeys([*results(message), *names]))


def visible_text(message: Message) -> str:
    """Return what can be read in a message: its text and the unescaped values of a tool result."""
    return "\n".join([content(message), *(results(message) if message["role"] == "tool" else [])])


def visible(messages: Sequence[Message]) -> tuple[list[str], list[str]]:
    """Return the values that an agent sees.

    Returns:
        Likely values (tool results, and user words with a digit or sign), and all values (tool results, user words).
    """
    user_words = [word for message in messages if message["role"] == "user" for word in words(content(message))]
    result_values = [value for message in messages if message["role"] == "tool" for value in results(message)]
    marked = [word for word in user_words if re.search(r"[\d#@_]", word)]
    return list(dict.fromkeys([*result_values, *marked])), list(dict.fromkeys([*result_values, *user_words]))


def made_calls(messages: Sequence[Message]) -> list[tuple[str, JsonObject]]:
    """List the calls of a play in order."""
    return [call for message in messages if message["role"] == "assistant" for call in calls_of(message)]


def calling(messages: Sequence[Message]) -> list[int]:
    """List the places of messages with calls."""
    return [index for index, message in enumerate(messages) if message.get("tool_calls")]


def solved_tasks(target: CheckedEnvironment, count: int) -> Iterator[tuple[Task, list[Message], list[Message]]]:
    """Yield the first training tasks that have references, at most `count`, with the references and their plays."""
    size = target.size("training")
    for task in target.tasks("training", count if size is None else min(count, size)):
        if reference := target.reference(task):
            yield task, reference, target.play(task, reference)


# Random calls.


def argument(schema: JsonObject, messages: Sequence[Message], rng: random.Random) -> object:
    """Draw a value that fits a parameter's schema from what is visible."""
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    likely, every = visible(messages)
    values = likely if likely and rng.random() < 0.8 else every or ["1"]
    match schema.get("type", "string"):
        case "boolean":
            return rng.random() < 0.5
        case "integer" | "number" as kind:
            numbers = [number for value in values for number in re.findall(r"-?\d{1,15}(?:\.\d{1,15})?", value)]
            number = float(rng.choice(numbers or ["1"]))
            return int(number) if kind == "integer" else number
        case "array":
            return [argument(schema.get("items") or {}, messages, rng)]
        case "object":
            inner = schema.get("properties") or {}
            return {name: argument(inner[name], messages, rng) for name in schema.get("required") or []}
    return rng.choice(values)


def random_call(function: JsonObject, messages: Sequence[Message], rng: random.Random) -> Message:
    """Draw a call of a tool; each optional argument is given half of the time."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    properties = (parameters.get("properties") or {}).items()
    drawn = [(name, schema) for name, schema in properties if name in required or rng.random() < 0.5]
    return tool_call(function["name"], {name: argument(schema, messages, rng) for name, schema in drawn})


def act_randomly(tools: Sequence[JsonObject], rng: random.Random, messages: Sequence[Message]) -> Message:
    """Call a random tool, or stop."""
    has_called = any(message["role"] == "assistant" for message in messages)
    if not tools or (has_called and rng.random() < STOP):
        return CLOSING
    return random_call(rng.choice(tools)["function"], messages, rng)


def act_at_once(
    tools: Sequence[JsonObject], reference: Sequence[Message], rng: random.Random, messages: Sequence[Message]
) -> Message:
    """Call every tool in the first message, and then say that it is done.

    Arguments take the reference's values for the same names. Some random calls are added.
    """
    if not tools or any(message["role"] == "assistant" for message in messages):
        return CLOSING
    known = {name: value for _, arguments in made_calls(reference) for name, value in arguments.items()}
    actions: list[Message] = []
    for tool in tools:
        [(name, arguments)] = calls_of(random_call(tool["function"], messages, rng))
        actions.append(tool_call(name, {key: known.get(key, value) for key, value in arguments.items()}))
    actions += [random_call(rng.choice(tools)["function"], messages, rng) for _ in range(rng.randint(0, 12))]
    calls = [call for message in actions for call in message["tool_calls"]]
    return {"role": "assistant", "content": "", "tool_calls": rng.sample(calls, len(calls))}


# Words.


def drawn_words(rng: random.Random, vocabulary: Sequence[str], longest: int) -> str:
    """Draw a text of random length from seen and made-up words."""
    count = round(longest ** rng.uniform(0, 1) / 6) + 1
    made_up = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(min(count, 40))]
    return " ".join(rng.choices([*made_up, *vocabulary], k=count))[:longest]


def talk(kind: str, reference: Sequence[Message], rng: random.Random, messages: Sequence[Message]) -> Message:
    """Return a message of one of the kinds in `SAYINGS`, without calls."""
    shown = [message for message in messages if message["role"] != "assistant"]
    requests = [message for message in shown if message["role"] == "user"]
    match kind:
        case "an echo":
            return say(content(rng.choice([*shown, *(shown[-1:] or [CLOSING])])))
        case "an echo of the request":
            return say(content(requests[-1] if requests else CLOSING))
        case "blanks":
            return say(" \n\t"[rng.randrange(3)] * rng.randint(0, 50))
        case "signs":
            return say("".join(chr(rng.randint(*rng.choice(SIGNS))) for _ in range(9)))
        case "calls as text":
            calls = [{"name": name, "arguments": arguments} for name, arguments in made_calls(reference)]
            return say("\n".join(f"<call>{json.dumps(call)}</call>" for call in calls))
    vocabulary = [word for message in shown for word in words(content(message))]
    return say(drawn_words(rng, vocabulary, 60 if kind == "a few words" else LONGEST))


def persist(
    kind: str,
    tools: Sequence[JsonObject],
    reference: Sequence[Message],
    rng: random.Random,
    messages: Sequence[Message],
) -> Message:
    """Return the next message of one of the endless plays in `ENDLESS`."""
    first_call = [reference[index] for index in calling(reference)[:1]]
    if kind == RANDOM and tools:
        return random_call(rng.choice(tools)["function"], messages, rng)
    return first_call[0] if kind.startswith("one call") and first_call else say(drawn_words(rng, (), 40))


# Changed references.


def closing_of(reference: Sequence[Message]) -> list[Message]:
    """Return the messages after the reference's last call."""
    return list(reference[max(calling(reference), default=-1) + 1 :])


def flawed(kind: str, name: str, arguments: JsonObject, parameters: JsonObject, rng: random.Random) -> Message | None:
    """Make a call with one of `FLAWS`; None if the call cannot have that flaw."""
    required, properties = parameters.get("required") or [], parameters.get("properties") or {}
    match kind:
        case "a call without arguments":
            return tool_call(name, {}) if required else None
        case "malformed arguments":
            text = str(arguments)  # single quotes: no JSON
            function = {"name": name, "arguments": text[: rng.randint(1, max(1, len(text) - 1))]}
            return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        case "arguments of another type":
            typed = {key for key in arguments if properties.get(key, {}).get("type") in ("string", "integer", "number")}
            changed = {key: [value] if key in typed else value for key, value in arguments.items()}
            return tool_call(name, changed) if typed else None
        case "arguments that are null":
            return tool_call(name, dict.fromkeys(arguments)) if arguments else None
        case "a tool whose name is misspelt":
            letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 6)))
            misspelt = [f"{name}_{letters}", f"{letters}_{name}", name.swapcase(), name[1:] + name[0], f"{name} "]
            return tool_call(rng.choice(misspelt), arguments)
        case "an unknown tool":
            return tool_call("".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 20))), arguments)
    if not required:
        return None
    return tool_call(name, {f"{key}{rng.randint(0, 99)}": value for key, value in arguments.items()})


def in_other_words(reference: Sequence[Message], play: Sequence[Message], rng: random.Random) -> list[Message]:
    """Change a reference's words: add text to its calls, and replace the unread words of its last message.

    Args:
        reference: its assistant messages.
        play: all messages of its play.
        rng: draws the words.
    """
    with_calls, actions = calling(reference), list(reference)
    for index in with_calls:
        actions[index] = {**reference[index], "content": content(reference[index]) or "One moment."}
    if with_calls and with_calls[-1] == len(reference) - 2:
        texts = [visible_text(message) for message in play if message["role"] != "assistant"]
        known = set(re.findall(r"\w+", " ".join(texts).lower()))

        def replaced(match: re.Match[str]) -> str:
            kept = not match[0].isalpha() or match[0].lower() in known
            return match[0] if kept else "".join(rng.choices(string.ascii_lowercase, k=5))

        last = re.sub(r"[^\W\d_]+", replaced, content(reference[-1]))
        actions[-1] = say(f"All right. {last}")
    return actions
