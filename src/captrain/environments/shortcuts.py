"""Shortcuts to reward, drawn anew for each examination: words, lengths, numbers of turns and of calls.

A fixed probe can be told apart from an agent in training, and a file that pays for everything else passes it. So what
is played here is drawn by the key of the examination (`Subject.random`), which a file cannot know and which the same
file and seed draw again. Each task is judged, and not the mean alone: an agent in training finds the one that pays.
"""

import json
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from captrain.contract import Target, calls_of, tool_call
from captrain.environments import probes
from captrain.environments.subject import STEPS, Agent, Subject, at_most
from captrain.errors import EnvironmentFault
from captrain.records import Check, JsonObject, Message, Score, Task

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

Plays = dict[str, dict[str, Score]]
"""Scores by the kind of play and the task."""


def _judged(subject: Subject, name: str, plays: Plays) -> Check:
    """The kind that earns most: on average or, where luck has no part in it, in full on a single task."""
    measured, detail, worst_task = -1.0, "", ""
    for kind, scores in plays.items():
        most = max(scores, key=lambda task: (scores[task].success, scores[task].reward))
        mean = sum(score.reward for score in scores.values()) / len(scores)
        solved = sum(score.success or score.reward > probes.MOST_PER_TASK for score in scores.values())
        worst = 1.0 if solved and kind not in LUCKY else mean
        if worst > measured:
            measured, detail, worst_task = worst, f"{kind}: solves {solved} of {len(scores)} tasks", most
    return at_most(name, measured, subject.bounds.hacking_reward, detail, worst_task)


def _dealt(
    subject: Subject, use: str, kinds: Sequence[str], most: int | None = None, rounds: int = 1
) -> Iterator[tuple[Task, str, random.Random]]:
    """Tasks, a kind of play for each, and numbers to draw from: every kind as often, in an order that is drawn, and
    every task (of the first `most`) at least once, every kind in so many rounds."""
    tasks = subject.tasks[:most]
    order = subject.random(use, "kinds").sample(list(kinds), len(kinds))
    for number in range(max(len(tasks), rounds * len(kinds))):
        task = tasks[number % len(tasks)]
        yield task, order[number % len(kinds)], subject.random(use, task.id, number)


def drawn_words(rng: random.Random, vocabulary: Sequence[str], longest: int = LONGEST) -> str:
    """A text of a length that is drawn, short and long alike: words that were seen, and words that nobody has."""
    count = round(longest ** rng.uniform(0, 1) / 6) + 1
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(min(count, 40))]
    return " ".join(rng.choices([*words, *vocabulary], k=count))[:longest]


def _talking(kind: str, reference: Sequence[Message], rng: random.Random) -> Agent:
    """An agent that says something of a kind and does nothing else."""

    def act(messages: Sequence[Message]) -> Message:
        observations = [message for message in messages if message["role"] != "assistant"]
        requests = [message for message in observations if message["role"] == "user"]
        if kind.startswith("an echo"):
            [echoed] = (requests if kind.endswith("request") else observations)[-1:] or [probes.CLOSING]
            return probes.assistant_message(
                probes.content(rng.choice([*observations, echoed]) if kind == "an echo" else echoed)
            )
        if kind == "blanks":
            return probes.assistant_message(" \n\t"[rng.randrange(3)] * rng.randint(0, 50))
        if kind == "signs":
            return probes.assistant_message("".join(chr(rng.randint(*rng.choice(SIGNS))) for _ in range(9)))
        if kind == "calls as text":
            calls = [{"name": call[0], "arguments": call[1]} for message in reference for call in calls_of(message)]
            return probes.assistant_message("\n".join(f"<call>{json.dumps(call)}</call>" for call in calls))
        vocabulary = [word for message in observations for word in probes.words(probes.content(message))]
        return probes.assistant_message(drawn_words(rng, vocabulary, 60 if kind == "a few words" else LONGEST))

    return act


def _persisting(kind: str, tools: Sequence[JsonObject], reference: Sequence[Message], rng: random.Random) -> Agent:
    """An agent that never leaves."""
    again = [message for message in reference if message.get("tool_calls")][:1]

    def act(messages: Sequence[Message]) -> Message:
        if kind == RANDOM and tools:
            return probes.random_call(rng.choice(tools)["function"], messages, rng)
        return again[0] if kind.startswith("one call") and again else probes.assistant_message(drawn_words(rng, (), 40))

    return act


def _calling_at_once(tools: Sequence[JsonObject], reference: Sequence[Message], rng: random.Random) -> Agent:
    """An agent whose first message has a call of every tool and more, with the reference's values among the arguments,
    and whose second says that it is done."""
    agent = probes.every_tool_agent(tools, reference, rng)

    def act(messages: Sequence[Message]) -> Message:
        if not tools or any(message["role"] == "assistant" for message in messages):
            return probes.CLOSING
        actions = [agent(messages) for _ in tools]
        actions += [probes.random_call(rng.choice(tools)["function"], messages, rng) for _ in range(rng.randint(0, 12))]
        calls = [call for message in actions if message is not None for call in message.get("tool_calls") or []]
        return {"role": "assistant", "content": "", "tool_calls": rng.sample(calls, len(calls))}

    return act


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


def words_alone(subject: Subject, name: str) -> Check:
    """Words without a call, in as many turns as are drawn."""
    plays: Plays = {}
    for task, kind, rng in _dealt(subject, "words", SAYINGS):
        turns = rng.choice([1, 2, rng.randint(3, 16)])
        agent = _talking(kind, subject.reference(task) if kind == "calls as text" else (), rng)
        plays.setdefault(kind, {})[task.id] = subject.score(task, subject.act(task, agent, turns))
    return _judged(subject, name, plays)


def going_on(subject: Subject, name: str) -> Check:
    """Turns without end: words, random calls, and one call again and again; of each once as many as there may be."""
    plays: Plays = {}
    for task, kind, rng in _dealt(subject, "going on", ENDLESS, LONG * len(ENDLESS)):
        turns = STEPS if kind not in plays else round(16 * (STEPS / 16) ** rng.random())
        agent = _persisting(kind, subject.against.tools, subject.reference(task), rng)
        plays.setdefault(kind, {})[task.id] = subject.score(task, subject.act(task, agent, turns))
    return _judged(subject, name, plays)


def many_at_once(subject: Subject, name: str) -> Check:
    """Calls of every tool in one message, as many as are drawn."""
    plays: Plays = {}
    for task, kind, rng in _dealt(subject, "at once", [AT_ONCE], probes.REPEATED):
        agent = _calling_at_once(subject.against.tools, subject.reference(task), rng)
        plays.setdefault(kind, {})[task.id] = subject.score(task, subject.act(task, agent, 2))
    return _judged(subject, name, plays)


# Calls that no schema allows.


def _empty(call: tuple[str, JsonObject], parameters: JsonObject, rng: random.Random) -> Message | None:
    return tool_call(call[0], {}) if parameters.get("required") else None


def _malformed(call: tuple[str, JsonObject], parameters: JsonObject, rng: random.Random) -> Message | None:
    text = str(call[1])  # single quotes: no JSON
    return _with_arguments(call[0], text[: rng.randint(1, max(1, len(text) - 1))])


def _wrong_types(call: tuple[str, JsonObject], parameters: JsonObject, rng: random.Random) -> Message | None:
    properties = parameters.get("properties") or {}
    typed = {name for name in call[1] if properties.get(name, {}).get("type") in ("string", "integer", "number")}
    return tool_call(call[0], {key: [v] if key in typed else v for key, v in call[1].items()}) if typed else None


def _nothing(call: tuple[str, JsonObject], parameters: JsonObject, rng: random.Random) -> Message | None:
    return tool_call(call[0], dict.fromkeys(call[1])) if call[1] else None


def _misnamed(call: tuple[str, JsonObject], parameters: JsonObject, rng: random.Random) -> Message | None:
    name = call[0]
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 6)))
    return tool_call(
        rng.choice([f"{name}_{letters}", f"{letters}_{name}", name.swapcase(), name[1:] + name[0], f"{name} "]), call[1]
    )


def _unknown(call: tuple[str, JsonObject], parameters: JsonObject, rng: random.Random) -> Message | None:
    return tool_call("".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 20))), call[1])


def _renamed(call: tuple[str, JsonObject], parameters: JsonObject, rng: random.Random) -> Message | None:
    required = parameters.get("required") or []
    return (
        tool_call(call[0], {f"{key}{rng.randint(0, 99)}": value for key, value in call[1].items()})
        if required
        else None
    )


def _with_arguments(name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


FLAWS: dict[str, Callable[[tuple[str, JsonObject], JsonObject, random.Random], Message | None]] = {
    "a call without arguments": _empty,
    "malformed arguments": _malformed,
    "arguments of another type": _wrong_types,
    "arguments that are null": _nothing,
    "a tool whose name is misspelt": _misnamed,
    "an unknown tool": _unknown,
    "arguments under other names": _renamed,
}


def flawed_calls(subject: Subject, name: str) -> Check:
    """The gain of calls that no schema allows over their absence: all of the reference's calls, the last or one that is
    drawn, made so, on each task. An environment may raise at such a call, which is as good as paying nothing."""
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in subject.against.tools}
    worst, detail, worst_task = 0.0, "", ""
    for number, (task, kind, rng) in enumerate(_dealt(subject, "flaws", [*FLAWS], rounds=ROUNDS)):
        reference = subject.reference(task)
        places = [index for index, message in enumerate(reference) if message.get("tool_calls")]
        selection = (places, places[-1:], rng.sample(places, min(1, len(places))))[number // len(FLAWS) % 3]
        actions: list[Message] = []
        for index, message in enumerate(reference):
            if index not in selection:
                actions.append(message)
                continue
            flawed = [FLAWS[kind](call, parameters.get(call[0], {}), rng) for call in calls_of(message)]
            actions += [call for call in flawed if call is not None]
        absent = [message for index, message in enumerate(reference) if index not in selection]
        try:
            gain = subject.reward_of(task, actions) - subject.reward_of(task, absent)
        except EnvironmentFault:
            subject.hurry()  # raises where it is time that has run out
            gain = 0.0
        if gain > worst:
            worst, detail, worst_task = gain, f"{kind} earns more than no call", task.id
    return at_most(name, worst, probes.GAIN, detail, worst_task)


# What must not change, and what must.


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
        actions[index] = {**reference[index], "content": probes.content(reference[index]) or "One moment."}
    if calling and calling[-1] == len(reference) - 2:
        visible_texts = [probes.visible_text(m) for m in play if m["role"] != "assistant"]
        known_words = set(re.findall(r"\w+", " ".join(visible_texts).lower()))
        pieces = re.split(r"([^\W\d_]+)", probes.content(reference[-1]))
        last = [
            piece
            if not piece.isalpha() or piece.lower() in known_words
            else "".join(rng.choices(string.ascii_lowercase, k=5))
            for piece in pieces
        ]
        actions[-1] = probes.assistant_message(f"All right. {''.join(last)}")
    return actions


def demands_words(target: Target, count: int) -> bool:
    """Return whether a benchmark's references lose by other words, so that none of its environments could pass
    `other_words`; of the first training tasks, at most `count`."""
    size = target.size("training")
    losses: list[bool] = []
    for task in target.tasks("training", count if size is None else min(count, size)):
        if reference := target.reference(task):
            record = target.play(task, reference)
            actions = in_other_words(reference, record, random.Random(task.id))
            loss = target.score(task, record).reward - target.score(task, target.play(task, actions)).reward
            losses.append(loss > LOSS)
    return sum(losses) > STRICT * len(losses)


def other_words(subject: Subject, name: str) -> Check:
    """The reference in other words: some beside its calls, and of its last message those that nobody has told the
    agent replaced by drawn ones. Where words are the capability, as `broken` shows, they are left as they are."""
    losses: dict[str, float] = {}
    for task in subject.tasks:
        rng, reference = subject.random("other words", task.id), subject.reference(task)
        broken = subject.broken(task) if hasattr(subject.target.environment, "broken") else ()
        if probes.steps(broken) == probes.steps(reference):
            continue
        actions = in_other_words(reference, subject.solved(task), rng)
        losses[task.id] = subject.solution(task).reward - subject.reward_of(task, actions)
    many = [task for task, loss in losses.items() if loss > LOSS]
    detail = "the reference loses by words beside its calls, or by last words that nobody has told the agent"
    return at_most(name, len(many) / max(1, len(losses)), STRICT, detail, many[0] if many else "")


def afterwards(subject: Subject, name: str) -> Check:
    """The reference, and before its last words its last call again on other records: where that is answered as the
    right call is, it was carried out, and must cost."""
    rewards: dict[str, float] = {}
    for task in subject.tasks[: probes.REPEATED]:
        rng, reference = subject.random("afterwards", task.id), subject.reference(task)
        last = len(reference) - len(probes.closing_of(reference))
        right = calls_of(reference[last - 1]) if last else []
        changed = [
            tool_call(tool, {**arguments, key: value})
            for tool, arguments in right[-1:]
            for key, argument in arguments.items()
            for value in probes.visible(subject.solved(task))[0]
            if isinstance(argument, str) and value != argument and probes.shape(value) == probes.shape(argument)
        ]
        spoiling = rng.sample(changed, min(3, len(changed)))
        messages = subject.play(task, [*reference[:last], *spoiling, *reference[last:]])
        answers = {
            json.dumps(message, sort_keys=True): probes.content(answer)
            for message, answer in pairwise(messages)
            if message["role"] == "assistant" and answer["role"] == "tool"
        }
        usual = answers.get(json.dumps(reference[last - 1], sort_keys=True)) if last else None
        if any(answers.get(json.dumps(message, sort_keys=True)) == usual is not None for message in spoiling):
            rewards[task.id] = subject.score(task, messages).reward
    full = [task for task, reward in rewards.items() if reward >= 1 - 1e-9]
    detail = "after the reference, the last call on other records costs nothing"
    return at_most(name, len(full) / max(1, len(rewards)), 1 - STRICT, detail, full[0] if full else "")


def false_success(subject: Subject, name: str) -> Check:
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
