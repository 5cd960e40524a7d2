"""Ways to earn reward without the capability: each is played, and must not pay.

None of them knows a model. Where a probe needs arguments it takes the reference's own, so that what it earns is a
generous estimate of what a policy in training could find.

A fixed probe can be told apart from an agent in training, and a file that pays for everything else passes it. So
words, lengths, numbers of turns and of calls are drawn by the key of the examination (`Evidence.random`), which a file
cannot know and which the same file and seed draw again. There each task is judged, and not the mean alone: an agent in
training finds the one that pays.
"""

import json
import random
import re
import string
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from captrain.contract import CheckedEnvironment, calls_of, tool_call
from captrain.environments.subject import STEPS, Agent, Evidence, at_least, at_most, mean_at_most
from captrain.errors import EnvironmentFault
from captrain.records import CheckResult, JsonObject, Message, Score, Task, leaves

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
LONGEST = 30_000
"""Characters of the longest text that is said."""
LONG = 5
"""Tasks in which an agent goes on for up to `STEPS` turns; each costs as much as a long reference."""
LOSS = 0.05
"""A reference may lose so much by words that nobody asked for."""
ROUNDS = 6
"""Each flaw is made so often at least: in all calls, in the last, and in one, each on two tasks."""
STRICT = 0.1
"""Share of tasks in which it loses more."""

SIGNS = ((0x21, 0x2F), (0xC0, 0x24F), (0x1F600, 0x1F64F))
"""Ranges of characters that agents seldom write."""
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


def made_calls(messages: Sequence[Message]) -> list[tuple[str, JsonObject]]:
    """The calls of a play in order."""
    return [call for message in messages if message["role"] == "assistant" for call in calls_of(message)]


def solved_tasks(target: CheckedEnvironment, count: int) -> Iterator[tuple[Task, list[Message], list[Message]]]:
    """Yield the first training tasks, at most `count`, with their references and the plays of these; those without one
    are left out."""
    size = target.size("training")
    for task in target.tasks("training", count if size is None else min(count, size)):
        if reference := target.reference(task):
            yield task, reference, target.play(task, reference)


def visible(messages: Sequence[Message]) -> tuple[list[str], list[str]]:
    """The values that an agent sees: those that look like one (results, and words with a digit or a sign), and all."""
    user_words = [word for message in messages if message["role"] == "user" for word in words(content(message))]
    result_values = [value for message in messages if message["role"] == "tool" for value in results(message)]
    marked = [word for word in user_words if re.search(r"[\d#@_]", word)]
    return list(dict.fromkeys([*result_values, *marked])), list(dict.fromkeys([*result_values, *user_words]))


def argument(schema: JsonObject, messages: Sequence[Message], rng: random.Random) -> object:
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
    reference_values = {name: value for _, arguments in made_calls(reference) for name, value in arguments.items()}

    def act(messages: Sequence[Message]) -> Message:
        if not pending:
            return CLOSING
        name, arguments = calls_of(random_call(pending.pop(0), messages, rng))[0]
        return tool_call(name, {key: reference_values.get(key, value) for key, value in arguments.items()})

    return act


def _random_reward(subject: Evidence, task: Task) -> float:
    def mean() -> float:
        tools = subject.against.tools
        agents = [random_agent(tools, subject.random("random", task.id, number)) for number in range(DRAWS)]
        return sum(subject.score(task, subject.act(task, agent)).reward for agent in agents) / DRAWS

    return subject.once("random", task.id, mean)


def _broken_reward(subject: Evidence, task: Task) -> float:
    return subject.once("broken reward", task.id, lambda: subject.reward_of(task, subject.broken(task)))


def random_calls(subject: Evidence, name: str) -> CheckResult:
    """Random tools, arguments from what is visible and from the schemas' enums."""
    rewards = {task.id: _random_reward(subject, task) for task in subject.tasks}
    return mean_at_most(name, rewards, subject.bounds.random_reward)


def copying(subject: Evidence, name: str) -> CheckResult:
    """Check that an agent earns nothing by making the calls in what it is shown, and saying all of it again."""
    tools = subject.against.tools
    rewards = {task.id: subject.score(task, subject.act(task, copying_agent(tools))).reward for task in subject.tasks}
    return mean_at_most(name, rewards, subject.bounds.hacking_reward, MOST_PER_TASK)


def given_away(subject: Evidence, name: str) -> CheckResult:
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


def _flat(message: Message) -> str:
    """A call with its values as texts, to be compared."""
    [(name, arguments)] = calls_of(message)
    return json.dumps([name, {key: [*leaves(value)] for key, value in arguments.items()}], sort_keys=True)


def closing_of(reference: Sequence[Message]) -> list[Message]:
    """The words after the reference's last call."""
    last = max((index for index, message in enumerate(reference) if message.get("tool_calls")), default=-1)
    return list(reference[last + 1 :])


def claiming(subject: Evidence, name: str) -> CheckResult:
    """The reference's last words, and nothing before them."""
    rewards = {
        task.id: subject.reward_of(task, closing_of(subject.reference(task))[-1:] or [CLOSING])
        for task in subject.tasks
    }
    return mean_at_most(name, rewards, subject.bounds.hacking_reward, MOST_PER_TASK)


def every_tool(subject: Evidence, name: str) -> CheckResult:
    """Each tool once. Where that is what the reference does, which only a world of few tools can ask for, it is no
    shortcut, and counts as earning nothing."""
    tools, rewards = subject.against.tools, dict[str, float]()
    for task in subject.tasks:
        reference = subject.reference(task)
        messages = subject.act(task, every_tool_agent(tools, reference, subject.random("every", task.id)))
        is_solution = made_calls(messages) == made_calls(reference)
        rewards[task.id] = 0.0 if is_solution else subject.score(task, messages).reward
    return mean_at_most(name, rewards, subject.bounds.hacking_reward)


def repeating(subject: Evidence, name: str) -> CheckResult:
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


def broken_near(subject: Evidence, name: str) -> CheckResult:
    """The broken solution differs from the reference by one step at most: else it would lose reward for more than
    the capability."""
    far = {task.id: distance(steps(subject.reference(task)), steps(subject.broken(task))) for task in subject.tasks}
    most = max(far, key=lambda task: far[task])
    return at_most(name, far[most], 1, "broken(task) changes more than the capability's step", most)


def broken_costs(subject: Evidence, name: str) -> CheckResult:
    """The broken solution loses most of the reward."""
    rewards = {task.id: _broken_reward(subject, task) for task in subject.tasks}
    return mean_at_most(name, rewards, subject.bounds.broken_reward)


def spread(subject: Evidence, name: str) -> CheckResult:
    """The reward is not constant over solution, broken solution, idleness and random calls."""
    plays = [subject.solution(task).reward for task in subject.tasks]
    plays += [subject.idle(task).reward for task in subject.tasks]
    plays += [_random_reward(subject, task) for task in subject.tasks]
    if hasattr(subject.target.environment, "broken"):
        plays += [_broken_reward(subject, task) for task in subject.tasks]
    detail = "whatever the agent does, the reward is the same"
    return at_least(name, max(plays) - min(plays), 0.1, detail, subject.tasks[0].id)


Plays = dict[str, dict[str, Score]]
"""Scores by the kind of play and the task."""


def _judged(subject: Evidence, name: str, plays: Plays) -> CheckResult:
    """The kind that earns most: on average or, where luck has no part in it, in full on a single task."""
    measured, detail, worst_task = -1.0, "", ""
    for kind, scores in plays.items():
        most = max(scores, key=lambda task: (scores[task].success, scores[task].reward))
        mean = sum(score.reward for score in scores.values()) / len(scores)
        solved = sum(score.success or score.reward > MOST_PER_TASK for score in scores.values())
        worst = 1.0 if solved and kind not in LUCKY else mean
        if worst > measured:
            measured, detail, worst_task = worst, f"{kind}: solves {solved} of {len(scores)} tasks", most
    return at_most(name, measured, subject.bounds.hacking_reward, detail, worst_task)


def _dealt(
    subject: Evidence, use: str, kinds: Sequence[str], most: int | None = None, rounds: int = 1
) -> Iterator[tuple[Task, str, random.Random]]:
    """Tasks, a kind of play for each, and numbers to draw from: every kind as often, in an order that is drawn, and
    every task (of the first `most`) at least once, every kind in so many rounds."""
    tasks = subject.tasks[:most]
    order = subject.random(use, "kinds").sample(list(kinds), len(kinds))
    for number in range(max(len(tasks), rounds * len(kinds))):
        task = tasks[number % len(tasks)]
        yield task, order[number % len(kinds)], subject.random(use, task.id, number)


def _drawn_words(rng: random.Random, vocabulary: Sequence[str], longest: int = LONGEST) -> str:
    """A text of a length that is drawn, short and long alike: words that were seen, and words that nobody has."""
    count = round(longest ** rng.uniform(0, 1) / 6) + 1
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(min(count, 40))]
    return " ".join(rng.choices([*words, *vocabulary], k=count))[:longest]


def _talk(kind: str, reference: Sequence[Message], rng: random.Random, messages: Sequence[Message]) -> Message:
    """Say something of a kind, and do nothing else."""
    observations = [message for message in messages if message["role"] != "assistant"]
    requests = [message for message in observations if message["role"] == "user"]
    if kind.startswith("an echo"):
        [echoed] = (requests if kind.endswith("request") else observations)[-1:] or [CLOSING]
        return assistant_message(content(rng.choice([*observations, echoed]) if kind == "an echo" else echoed))
    if kind == "blanks":
        return assistant_message(" \n\t"[rng.randrange(3)] * rng.randint(0, 50))
    if kind == "signs":
        return assistant_message("".join(chr(rng.randint(*rng.choice(SIGNS))) for _ in range(9)))
    if kind == "calls as text":
        calls = [{"name": call[0], "arguments": call[1]} for message in reference for call in calls_of(message)]
        return assistant_message("\n".join(f"<call>{json.dumps(call)}</call>" for call in calls))
    vocabulary = [word for message in observations for word in words(content(message))]
    return assistant_message(_drawn_words(rng, vocabulary, 60 if kind == "a few words" else LONGEST))


def _persist(
    kind: str,
    tools: Sequence[JsonObject],
    reference: Sequence[Message],
    rng: random.Random,
    messages: Sequence[Message],
) -> Message:
    """Go on in a way of `ENDLESS`, and never leave."""
    again = [message for message in reference if message.get("tool_calls")][:1]
    if kind == RANDOM and tools:
        return random_call(rng.choice(tools)["function"], messages, rng)
    return again[0] if kind.startswith("one call") and again else assistant_message(_drawn_words(rng, (), 40))


def _call_at_once(
    tools: Sequence[JsonObject], reference: Sequence[Message], rng: random.Random, messages: Sequence[Message]
) -> Message:
    """Make a call of every tool and more in the first message, with the reference's values among the arguments; say in
    the second that it is done."""
    if not tools or any(message["role"] == "assistant" for message in messages):
        return CLOSING
    agent = every_tool_agent(tools, reference, rng)
    actions = [agent(messages) for _ in tools]
    actions += [random_call(rng.choice(tools)["function"], messages, rng) for _ in range(rng.randint(0, 12))]
    calls = [call for message in actions if message is not None for call in message.get("tool_calls") or []]
    return {"role": "assistant", "content": "", "tool_calls": rng.sample(calls, len(calls))}


AT_ONCE, RANDOM = "a message of many calls", "random calls"
LUCKY = {AT_ONCE, RANDOM}
"""Plays that may solve a task by chance, or with the reference's own values."""
ENDLESS = ("talk", RANDOM, "one call again and again")
SAYINGS = (
    "a few words",
    "a text",
    "an echo",
    "an echo of the request",
    "blanks",
    "signs",
    "calls as text",
)


def words_alone(subject: Evidence, name: str) -> CheckResult:
    """Words without a call, in as many turns as are drawn."""
    plays: Plays = {}
    for task, kind, rng in _dealt(subject, "words", SAYINGS):
        turns = rng.choice([1, 2, rng.randint(3, 16)])
        agent = partial(_talk, kind, subject.reference(task) if kind == "calls as text" else (), rng)
        plays.setdefault(kind, {})[task.id] = subject.score(task, subject.act(task, agent, turns))
    return _judged(subject, name, plays)


def going_on(subject: Evidence, name: str) -> CheckResult:
    """Turns without end: words, random calls, and one call again and again; of each once as many as there may be."""
    plays: Plays = {}
    for task, kind, rng in _dealt(subject, "going on", ENDLESS, LONG * len(ENDLESS)):
        turns = STEPS if kind not in plays else round(16 * (STEPS / 16) ** rng.random())
        agent = partial(_persist, kind, subject.against.tools, subject.reference(task), rng)
        plays.setdefault(kind, {})[task.id] = subject.score(task, subject.act(task, agent, turns))
    return _judged(subject, name, plays)


def many_at_once(subject: Evidence, name: str) -> CheckResult:
    """Calls of every tool in one message, as many as are drawn."""
    plays: Plays = {}
    for task, kind, rng in _dealt(subject, "at once", [AT_ONCE], REPEATED):
        agent = partial(_call_at_once, subject.against.tools, subject.reference(task), rng)
        plays.setdefault(kind, {})[task.id] = subject.score(task, subject.act(task, agent, 2))
    return _judged(subject, name, plays)


FLAWS = (
    "a call without arguments",
    "malformed arguments",
    "arguments of another type",
    "arguments that are null",
    "a tool whose name is misspelt",
    "an unknown tool",
    "arguments under other names",
)
"""Ways in which no schema allows a call."""


def _flawed(kind: str, name: str, arguments: JsonObject, parameters: JsonObject, rng: random.Random) -> Message | None:
    """Make a call with a flaw; None where it can have none of the kind."""
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


def flawed_calls(subject: Evidence, name: str) -> CheckResult:
    """The gain of calls that no schema allows over their absence: all of the reference's calls, the last or one that is
    drawn, made so, on each task. An environment may raise at such a call, which is as good as paying nothing."""
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in subject.against.tools}
    worst, detail, worst_task = 0.0, "", ""
    for number, (task, kind, rng) in enumerate(_dealt(subject, "flaws", FLAWS, rounds=ROUNDS)):
        reference = subject.reference(task)
        places = [index for index, message in enumerate(reference) if message.get("tool_calls")]
        selection = (places, places[-1:], rng.sample(places, min(1, len(places))))[number // len(FLAWS) % 3]
        actions: list[Message] = []
        for index, message in enumerate(reference):
            if index not in selection:
                actions.append(message)
                continue
            flawed = [_flawed(kind, *call, parameters.get(call[0], {}), rng) for call in calls_of(message)]
            actions += [call for call in flawed if call is not None]
        absent = [message for index, message in enumerate(reference) if index not in selection]
        try:
            gain = subject.reward_of(task, actions) - subject.reward_of(task, absent)
        except EnvironmentFault:
            subject.hurry()  # raises where it is time that has run out
            gain = 0.0
        if gain > worst:
            worst, detail, worst_task = gain, f"{kind} earns more than no call", task.id
    return at_most(name, worst, GAIN, detail, worst_task)


def in_other_words(reference: Sequence[Message], play: Sequence[Message], rng: random.Random) -> list[Message]:
    """Return a reference with words beside its calls, and those of its last message replaced that nobody has told the
    agent.

    Args:
        reference: its assistant messages.
        play: all messages of its play.
        rng: draws the words.
    """
    calling = [i for i, message in enumerate(reference) if message.get("tool_calls")]
    actions = list(reference)
    for index in calling:
        actions[index] = {**reference[index], "content": content(reference[index]) or "One moment."}
    if calling and calling[-1] == len(reference) - 2:
        visible_texts = [visible_text(m) for m in play if m["role"] != "assistant"]
        known_words = set(re.findall(r"\w+", " ".join(visible_texts).lower()))
        pieces = re.split(r"([^\W\d_]+)", content(reference[-1]))
        last = [
            piece
            if not piece.isalpha() or piece.lower() in known_words
            else "".join(rng.choices(string.ascii_lowercase, k=5))
            for piece in pieces
        ]
        actions[-1] = assistant_message(f"All right. {''.join(last)}")
    return actions


def demands_words(target: CheckedEnvironment, count: int) -> bool:
    """Return whether a benchmark's references lose by other words, so that none of its environments could pass
    `other_words`; of the first training tasks, at most `count`."""
    losses: list[bool] = []
    for task, reference, record in solved_tasks(target, count):
        actions = in_other_words(reference, record, random.Random(task.id))
        loss = target.score(task, record).reward - target.score(task, target.play(task, actions)).reward
        losses.append(loss > LOSS)
    return sum(losses) > STRICT * len(losses)


def other_words(subject: Evidence, name: str) -> CheckResult:
    """The reference in other words: some beside its calls, and of its last message those that nobody has told the
    agent replaced by drawn ones. Where words are the capability, as `broken` shows, they are left as they are."""
    losses: dict[str, float] = {}
    for task in subject.tasks:
        rng, reference = subject.random("other words", task.id), subject.reference(task)
        broken = subject.broken(task) if hasattr(subject.target.environment, "broken") else ()
        if steps(broken) == steps(reference):
            continue
        actions = in_other_words(reference, subject.solved(task), rng)
        losses[task.id] = subject.solution(task).reward - subject.reward_of(task, actions)
    many = [task for task, loss in losses.items() if loss > LOSS]
    detail = "the reference loses by words beside its calls, or by last words that nobody has told the agent"
    return at_most(name, len(many) / max(1, len(losses)), STRICT, detail, many[0] if many else "")


def afterwards(subject: Evidence, name: str) -> CheckResult:
    """The reference, and before its last words its last call again on other records: where that is answered as the
    right call is, it was carried out, and must cost."""
    rewards: dict[str, float] = {}
    for task in subject.tasks[:REPEATED]:
        rng, reference = subject.random("afterwards", task.id), subject.reference(task)
        last = len(reference) - len(closing_of(reference))
        right = calls_of(reference[last - 1]) if last else []
        changed = [
            tool_call(tool, {**arguments, key: value})
            for tool, arguments in right[-1:]
            for key, argument in arguments.items()
            for value in visible(subject.solved(task))[0]
            if isinstance(argument, str) and value != argument and shape(value) == shape(argument)
        ]
        spoiling = rng.sample(changed, min(3, len(changed)))
        messages = subject.play(task, [*reference[:last], *spoiling, *reference[last:]])
        answers = {
            json.dumps(message, sort_keys=True): content(answer)
            for message, answer in pairwise(messages)
            if message["role"] == "assistant" and answer["role"] == "tool"
        }
        usual = answers.get(json.dumps(reference[last - 1], sort_keys=True)) if last else None
        if any(answers.get(json.dumps(message, sort_keys=True)) == usual is not None for message in spoiling):
            rewards[task.id] = subject.score(task, messages).reward
    full = [task for task, reward in rewards.items() if reward >= 1 - 1e-9]
    detail = "after the reference, the last call on other records costs nothing"
    return at_most(name, len(full) / max(1, len(rewards)), 1 - STRICT, detail, full[0] if full else "")


def false_success(subject: Evidence, name: str) -> CheckResult:
    """Tasks of which a play that does not solve them is called a success: doing nothing, random calls, the broken
    solution."""
    wrong: list[str] = []
    for task in subject.tasks:
        scores = [subject.idle(task)]
        if hasattr(subject.target.environment, "broken"):
            scores.append(subject.score(task, subject.play(task, subject.broken(task))))
        wrong += [task.id] * any(score.success and score.reward < 1 - 1e-9 for score in scores)
    detail = "a play that earns less than all is called a success"
    return at_most(name, len(wrong) / len(subject.tasks), STRICT, detail, wrong[0] if wrong else "")
