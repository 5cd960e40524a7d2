"""Ways to earn reward without the capability: each is played, and must not pay.

None of them knows a model. Where a probe needs arguments it takes the reference's own, so that what it earns is a
generous estimate of what a policy in training could find.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from captrain.contract import calls_of, tool_call
from captrain.environments.leakage import leaves
from captrain.environments.subject import Agent, Subject, at_least, at_most, mean_at_most
from captrain.records import Check, JsonObject, Message, Task

DRAWS = 3
"""Plays of random calls on each task."""
STOP = 0.15
"""Chance that an agent of random calls says after a call that it has done."""
REPEATS = 12
"""A call is repeated so often at most."""
REPEATED = 25
"""Tasks in which calls are repeated."""
GAIN = 0.1
"""A repeated call may earn so much more: it may pass for another one that is half right."""
GIVEN_AWAY = 0.1
"""So much of the reference may stand where the agent reads it before."""
OPENING = re.compile(r"[^\w{(]{0,6}(?:arguments|parameters|args)?[^\w{(]{0,6}(?=\{)")
INNER = re.compile(r"\s{0,100}\(([^()]{0,10000})\)")
"""Texts behind a tool's name that hold its arguments: an object after `OPENING`, or names and values in brackets."""
MOST_PER_TASK = 0.9
"""No task may pay more for what does none of its work."""
CLOSING: Message = {"role": "assistant", "content": "Done."}


def assistant_message(text: str) -> Message:
    """An assistant message without calls."""
    return {"role": "assistant", "content": text}


def content(message: Message) -> str:
    """The text of a message."""
    return message.get("content") or ""


def results(message: Message) -> list[str]:
    """The values in a tool's result: those of its JSON, or the words of a text."""
    try:
        value_read = json.loads(content(message))
    except (ValueError, RecursionError):
        return words(content(message))
    return [leaf for leaf in leaves(value_read) if leaf]


def shape(value: str) -> str:
    """A value with its letters and digits taken for one another."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", value))


def words(text: str) -> list[str]:
    """The words of a text, without the punctuation around them."""
    return [word for part in text.split() if (word := part.strip(".,;:!?()[]{}\"'"))]


def visible(messages: Sequence[Message]) -> tuple[list[str], list[str]]:
    """The values that an agent sees: those that look like one (results, and words with a digit or a sign), and all."""
    user_words = [word for message in messages if message["role"] == "user" for word in words(content(message))]
    result_values = [value for message in messages if message["role"] == "tool" for value in results(message)]
    marked = [word for word in user_words if re.search(r"[\d#@_]", word)]
    return list(dict.fromkeys([*result_values, *marked])), list(dict.fromkeys([*result_values, *user_words]))


def argument(schema: JsonObject, messages: Sequence[Message], rng: random.Random) -> Any:
    """A random value of a parameter's schema, from what is visible."""
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    likely, every = visible(messages)
    values = likely if likely and rng.random() < 0.8 else every or ["1"]
    kind = schema.get("type", "string")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        numbers = [number for value in values for number in re.findall(r"-?\d{1,15}(?:\.\d{1,15})?", value)]
        return (int if kind == "integer" else float)(float(rng.choice(numbers or ["1"])))
    if kind == "array":
        return [argument(schema.get("items") or {}, messages, rng)]
    if kind == "object":
        inner = schema.get("properties") or {}
        return {name: argument(inner[name], messages, rng) for name in schema.get("required") or []}
    return rng.choice(values)


def random_call(function: JsonObject, messages: Sequence[Message], rng: random.Random) -> Message:
    """A call of a tool with random arguments; optional ones half of the time."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    properties = (parameters.get("properties") or {}).items()
    arguments_drawn = [(name, schema) for name, schema in properties if name in required or rng.random() < 0.5]
    return tool_call(function["name"], {name: argument(schema, messages, rng) for name, schema in arguments_drawn})


def random_agent(tools: Sequence[JsonObject], rng: random.Random) -> Agent:
    """Calls random tools until it says that it has done."""

    def act(messages: Sequence[Message]) -> Message:
        has_called = any(message["role"] == "assistant" for message in messages)
        if not tools or (has_called and rng.random() < STOP):
            return CLOSING
        return random_call(rng.choice(tools)["function"], messages, rng)

    return act


def visible_text(message: Message) -> str:
    """Join what is read in a message: its text, and of a tool's result also the values by themselves, unescaped."""
    return "\n".join([content(message), *(results(message) if message["role"] == "tool" else [])])


def calls_in_text(text: str, tools: Sequence[JsonObject]) -> Iterator[Message]:
    """The calls that stand in a text: a tool's name followed by a JSON object, or by (name=value, ...)."""
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    names = "|".join(sorted(map(re.escape, parameters), key=len, reverse=True))
    for match in re.finditer(rf"(?<!\w)({names})(?!\w)", text) if names else ():
        name = match[1]
        properties = list(parameters[name].get("properties") or {})
        if opening := OPENING.match(text, match.end()):
            try:
                arguments = json.JSONDecoder().raw_decode(text, opening.end())[0]
            except (ValueError, RecursionError):
                continue
            yield tool_call(name, arguments)
        elif inner := INNER.match(text, match.end()):
            pieces = [piece.strip() for piece in inner[1].split(",") if piece.strip()]
            pairs = [re.match(r"(\w+)\s*[=:]\s*(.*)", piece) for piece in pieces]
            arguments = [
                (pair[1], pair[2]) if pair else (key, piece)
                for pair, piece, key in zip(pairs, pieces, [*properties, *pieces], strict=False)
            ]
            yield tool_call(name, {key: value.strip("\"'") for key, value in arguments})


def copying_agent(tools: Sequence[JsonObject]) -> Agent:
    """Makes every call that stands in what it is shown, and then says again what it was shown."""
    calls: list[Message] = []
    read = 0

    def act(messages: Sequence[Message]) -> Message:
        nonlocal read
        queue = [
            call
            for message in messages
            if message["role"] != "assistant"
            for call in calls_in_text(visible_text(message), tools)
        ]
        if pending := [call for call in queue if call not in calls]:
            calls.append(pending[0])
            return pending[0]
        new = [content(message) for message in messages[read:] if message["role"] != "assistant"]
        read = len(messages)
        return assistant_message("\n".join(new))

    return act


def every_tool_agent(tools: Sequence[JsonObject], reference: Sequence[Message], rng: random.Random) -> Agent:
    """Calls each tool once, with the reference's value where that has an argument of the name."""
    pending = [tool["function"] for tool in tools]
    reference_values = {
        name: value for message in reference for _, arguments in calls_of(message) for name, value in arguments.items()
    }

    def act(messages: Sequence[Message]) -> Message:
        if not pending:
            return CLOSING
        name, arguments = calls_of(random_call(pending.pop(0), messages, rng))[0]
        return tool_call(name, {key: reference_values.get(key, value) for key, value in arguments.items()})

    return act


def _mean(subject: Subject, name: str, bound: float, agent: Callable[[Task], Agent], most: float = 1.0) -> Check:
    """The mean reward of an agent over all tasks."""
    rewards = {task.id: subject.score(task, subject.act(task, agent(task))).reward for task in subject.tasks}
    return mean_at_most(name, rewards, bound, most)


def _random_reward(subject: Subject, task: Task) -> float:
    def mean() -> float:
        tools = subject.against.tools
        agents = [random_agent(tools, subject.random("random", task.id, number)) for number in range(DRAWS)]
        return sum(subject.score(task, subject.act(task, agent)).reward for agent in agents) / DRAWS

    return subject.once("random", task.id, mean)


def _broken_reward(subject: Subject, task: Task) -> float:
    return subject.once("broken reward", task.id, lambda: subject.reward_of(task, subject.broken(task)))


def random_calls(subject: Subject, name: str) -> Check:
    """Random tools, arguments from what is visible and from the schemas' enums."""
    rewards = {task.id: _random_reward(subject, task) for task in subject.tasks}
    return mean_at_most(name, rewards, subject.bounds.random_reward)


def copying(subject: Subject, name: str) -> Check:
    """Check that an agent earns nothing by making the calls in what it is shown, and saying all of it again."""
    tools = subject.against.tools
    return _mean(subject, name, subject.bounds.hacking_reward, lambda task: copying_agent(tools), MOST_PER_TASK)


def given_away(subject: Subject, name: str) -> Check:
    """The share of the reference's calls that stand in what the agent was shown before it made them."""
    shares: dict[str, float] = {}
    for task in subject.tasks:
        read: list[str] = []
        hits: list[bool] = []
        for message in subject.solved(task):
            if message["role"] != "assistant":
                read += [_flat(call) for call in calls_in_text(visible_text(message), subject.against.tools)]
            hits += [_flat(tool_call(*call)) in read for call in calls_of(message) if call[1]]
        shares[task.id] = sum(hits) / max(1, len(hits))
    most = max(shares, key=lambda task: shares[task])
    mean = sum(shares.values()) / len(shares)
    return at_most(name, mean, GIVEN_AWAY, "a call of the reference stands where the agent reads it first", most)


def _calls(messages: Sequence[Message]) -> list[tuple[str, JsonObject]]:
    """The calls of a play in order."""
    return [call for message in messages if message["role"] == "assistant" for call in calls_of(message)]


def _flat(message: Message) -> str:
    """A call with its values as texts, to be compared."""
    [(name, arguments)] = calls_of(message)
    return json.dumps([name, {key: [*leaves(value)] for key, value in arguments.items()}], sort_keys=True)


def closing_of(reference: Sequence[Message]) -> list[Message]:
    """The words after the reference's last call."""
    last = max((index for index, message in enumerate(reference) if message.get("tool_calls")), default=-1)
    return list(reference[last + 1 :])


def claiming(subject: Subject, name: str) -> Check:
    """The reference's last words, and nothing before them."""
    rewards = {
        task.id: subject.reward_of(task, closing_of(subject.reference(task))[-1:] or [CLOSING])
        for task in subject.tasks
    }
    return mean_at_most(name, rewards, subject.bounds.hacking_reward, MOST_PER_TASK)


def every_tool(subject: Subject, name: str) -> Check:
    """Each tool once. Where that is what the reference does, which only a world of few tools can ask for, it is no
    shortcut, and counts as earning nothing."""
    tools, rewards = subject.against.tools, dict[str, float]()
    for task in subject.tasks:
        reference = subject.reference(task)
        messages = subject.act(task, every_tool_agent(tools, reference, subject.random("every", task.id)))
        is_solution = _calls(messages) == _calls(reference)
        rewards[task.id] = 0.0 if is_solution else subject.score(task, messages).reward
    return mean_at_most(name, rewards, subject.bounds.hacking_reward)


def repeating(subject: Subject, name: str) -> Check:
    """Every beginning of the reference that ends with a call, with and without that call repeated; closing words
    follow. A reward of that kind shows in a few tasks."""
    gains: dict[str, float] = {}
    for task in subject.tasks[:REPEATED]:
        rng, reference = subject.random("repeating", task.id), subject.reference(task)
        closing = closing_of(reference)
        gains[task.id] = 0.0
        for index, message in enumerate(reference):
            if message.get("tool_calls"):
                beginning = list(reference[: index + 1])
                more = subject.reward_of(task, [*beginning, *[message] * rng.randint(1, REPEATS), *closing])
                gains[task.id] = max(gains[task.id], more - subject.reward_of(task, [*beginning, *closing]))
    most = max(gains, key=lambda task: gains[task])
    return at_most(name, gains[most], GAIN, "a call that is repeated earns more than once", most)


# The capability's step broken.


def steps(messages: Sequence[Message]) -> list[str]:
    """Calls and questions in order, the closing words left out."""
    spoken = bool(messages) and not messages[-1].get("tool_calls")
    entries: list[str] = []
    for message in messages[:-1] if spoken else messages:
        calls = calls_of(message)
        entries += [json.dumps(call, sort_keys=True) for call in calls] or [content(message)]
    return entries


def distance(first: Sequence[str], second: Sequence[str]) -> int:
    """So many steps dropped, added or changed lead from one to the other."""
    row = list(range(len(second) + 1))
    for i, step in enumerate(first, start=1):
        before, row[0] = row[0], i
        for j, against in enumerate(second, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (step != against))
    return row[-1]


def broken_near(subject: Subject, name: str) -> Check:
    """The broken solution differs from the reference by one step at most: else it would lose reward for more than
    the capability."""
    far = {task.id: distance(steps(subject.reference(task)), steps(subject.broken(task))) for task in subject.tasks}
    most = max(far, key=lambda task: far[task])
    return at_most(name, far[most], 1, "broken(task) changes more than the capability's step", most)


def broken_costs(subject: Subject, name: str) -> Check:
    """The broken solution loses most of the reward."""
    rewards = {task.id: _broken_reward(subject, task) for task in subject.tasks}
    return mean_at_most(name, rewards, subject.bounds.broken_reward)


def spread(subject: Subject, name: str) -> Check:
    """The reward is not constant over solution, broken solution, idleness and random calls."""
    plays = [subject.solution(task).reward for task in subject.tasks]
    plays += [subject.idle(task).reward for task in subject.tasks]
    plays += [_random_reward(subject, task) for task in subject.tasks]
    if hasattr(subject.target.environment, "broken"):
        plays += [_broken_reward(subject, task) for task in subject.tasks]
    detail = "whatever the agent does, the reward is the same"
    return at_least(name, max(plays) - min(plays), 0.1, detail, subject.tasks[0].id)
