"""An adversary that tries to earn reward without the capability: by guessing, or by changing the solution.

It plays scripts:

- Guesses leave out the look-ups that the step needs. They use visible values: by a rule of `guesses`, or as candidates,
  wildcards and parts of ids, or they ask other tools.
- Mistakes make all look-ups and then another wrong step, or the broken solution with other words.
- Blind scripts skip the step.

Rules are fitted on some tasks, and scripts are played on others. Successive halving finds the script that earns most.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, stdev

from captrain.contract import calls_of, tool_call
from captrain.environments.evidence import STEPS, TURNS, Agent, Evidence
from captrain.environments.guesses import PARTS, Rule, constant, constants_of, fitted, labels_of, nearest_answer
from captrain.environments.probes import (
    AT_ONCE,
    CLOSING,
    ENDLESS,
    SAYINGS,
    act_at_once,
    content,
    made_calls,
    persist,
    random_call,
    results,
    say,
    shape,
    talk,
    words,
)
from captrain.environments.views import Answered, View, answered, telling_tools, usual_of, view_of
from captrain.environments.worded import ANSWER
from captrain.records import JsonObject, Message, Task, leaves

ROUNDS = ((3, 16), (8, 4), (20, 4))
"""Successive halving: per round, the number of tasks that each script plays and the number of scripts kept."""
FITTED = 60
"""Maximum number of tasks on which rules are fitted."""
WILDCARDS = ("*", "%", "", "all", "any", "first", "latest", "current", "0", "-1", "9" * 300, "None")
"""Values that careless code may accept as the id of a record."""
COMMON = 6
"""Maximum number of frequent result values, such as a status, that are tried as ids."""
COUNTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 70, 100, 200)
"""Numbers of copies of a call that are put into one message."""
EXPLAINED = 800
"""Number of words of a long explanation."""
MOST_LINES = 40
"""Maximum number of lines kept of a play, by `deeds`."""
SURE = 2
"""Number of standard errors by which the mean reward must exceed a bound."""
Script = Callable[[View, random.Random], Sequence[Message] | Agent | None]
"""Returns the messages or the agent that play a task; None if the script does not apply to the task."""


@dataclass(frozen=True)
class Exploit:
    """The results of a script: its reward on each task, and the lines of its play (`deeds`)."""

    name: str
    rewards: dict[str, float] = field(default_factory=dict)
    deeds: dict[str, list[str]] = field(default_factory=dict)
    lucky: set[str] = field(default_factory=set)
    """Tasks answered in words whose right answer was among the words said."""

    @property
    def mean(self) -> float:
        """The mean reward."""
        return mean(self.rewards.values())

    @property
    def least(self) -> float:
        """Lower bound of the mean: one zero reward is added, then the mean minus `SURE` standard errors."""
        values = [*self.rewards.values(), 0.0]
        return mean(values) - SURE * stdev(values) / len(values) ** 0.5

    @property
    def most(self) -> float:
        """Upper bound of the mean: as far above the mean as `least` is below."""
        return 2 * self.mean - self.least


def deeds(messages: Sequence[Message]) -> list[str]:
    """Write the calls and words of a play as lines."""
    lines: list[str] = []
    for message in messages[:MOST_LINES]:
        if message["role"] == "assistant":
            lines += [f"{tool}({json.dumps(arguments)[1:-1]})"[:200] for tool, arguments in calls_of(message)]
            lines += [content(message)[:200]] if content(message) else []
    return lines[:MOST_LINES]


def halved(
    names: Iterable[str],
    tasks: Sequence[Task],
    play: Callable[[Task, Exploit], None],
    rounds: Sequence[tuple[int, int]] = ROUNDS,
) -> list[Exploit]:
    """Play scripts by successive halving and return the best, best first. `play` records the reward of one task."""
    alive = [Exploit(name) for name in names]
    for number, keep in rounds:
        for task in tasks[:number]:
            for one in alive:
                play(task, one)
        alive = sorted((one for one in alive if one.rewards), key=lambda one: -one.mean)[:keep]
    return alive


# Parts of scripts.


def together(actions: Sequence[Message]) -> Message:
    """Put the calls of several messages into one."""
    calls = [call for action in actions for call in action.get("tool_calls") or []]
    return {**say("\n".join(filter(None, map(content, actions)))), **({"tool_calls": calls} if calls else {})}


def look(view: View, value: str) -> list[Message]:
    """Make a needed look-up with another value. Return no message if the look-ups are not about candidates."""
    for tool, arguments in made_calls(view.all_before):
        if view.about_candidates and view.key != "tool" and tool in view.needed:
            named = {key: value if shape(str(old)) == shape(view.right) else old for key, old in arguments.items()}
            return [tool_call(tool, named)]
    return []


def with_key(view: View, tool: JsonObject, value: str) -> list[Message]:
    """Call another tool with `value` for the argument that `broken` changes; no call if it lacks that argument."""
    parameters = tool.get("parameters") or {}
    names = parameters.get("required") or [*(parameters.get("properties") or {})]
    if view.key not in names or tool["name"] == view.tool:
        return []
    return [tool_call(tool["name"], {**{name: view.arguments.get(name, "1") for name in names}, view.key: value})]


def until_accepted(
    accepted: set[str], view: View, values: Sequence[str], undo: Callable[[str], list[Message]] = lambda _: []
) -> Agent:
    """Try each value and undo it, until the reply to the step is one of the `accepted` confirmations."""
    tries = [message for value in values for message in (view.step(value), *undo(value))]
    moves, rest = iter([*view.before, *tries]), iter(view.ending(values[0]))

    def agent(messages: Sequence[Message]) -> Message | None:
        [last] = answered(messages)[-1:] or [Answered("", {}, "")]
        move = None if last.tool == view.tool and last.confirmation in accepted else next(moves, None)
        return move or next(rest, None)

    return agent


def _following(view: View, first: Sequence[Message]) -> Agent:
    """Make the first moves, then the step with the last value of the right shape in the reply."""
    moves, rest = iter([*view.before, *first]), list[Message]()

    def agent(messages: Sequence[Message]) -> Message | None:
        if (move := next(moves, None)) is not None:
            return move
        if not rest:
            told = [word for word in words(" ".join(results(messages[-1]))) if shape(word) == shape(view.right)]
            rest.extend([view.step((told or [""])[-1]), *view.ending((told or [""])[-1]), CLOSING])
        return rest.pop(0)

    return agent


def _undoing(accepted: set[str], tool: JsonObject, view: View, values: list[str]) -> Agent | None:
    """Try each value and undo it with `tool`; None if the tool lacks the argument."""
    if not with_key(view, tool, values[0]):
        return None
    return until_accepted(accepted, view, values, lambda value: with_key(view, tool, value))


# Guesses.


Attempt = Callable[[View, list[str]], Sequence[Message] | Agent | None]
"""Plays a task with some values, of which one may be right; None if the tools do not allow the attempt."""
ATTEMPTS: dict[str, Attempt] = {
    "every value shown, one after the other": lambda v, c: [*v.before, *map(v.step, c), *v.ending(c[-1])],
    "every value shown, from the last to the first": lambda v, c: [*v.before, *map(v.step, c[::-1]), *v.ending(c[0])],
    "every value shown, in one message": lambda v, c: [*v.before, together([*map(v.step, c)]), *v.ending(c[0])],
    "every value shown, as one argument": lambda v, c: v.guess(" ".join(c)),
    "every value shown, as one argument that is looked up, too": lambda v, c: v.guess(
        " ".join(c), look(v, " ".join(c))
    ),
    "what the answer to the first value names": lambda v, c: _following(v, [v.step(c[0])]),
    "what the answer to an unknown value names": lambda v, c: _following(v, [v.step("none")]),
    "what a look at the first value names": lambda v, c: _following(v, look(v, c[0])),
    "what the user says when asked": lambda v, c: _following(v, [say(f"Which {v.key.replace('_', ' ')}?")]),
    "the first value after a look at it alone": lambda v, c: v.guess(c[0], look(v, c[0])),
    "the first value after several looks at it alone": lambda v, c: v.guess(c[0], look(v, c[0]) * len(c)),
    "no value, but naming all at the end": lambda v, c: [*v.before, say(", ".join(c))],
    "the first value, and naming all at the end": lambda v, c: [*v.before, v.step(c[0]), say(", ".join(c))],
    **{
        f"the first value {number} times": lambda v, c, n=number: [*v.before, *[v.step(c[0])] * n, *v.ending(c[0])]
        for number in (2, 3, 5, 8)
    },
}
"""Attempts by name, with a view `v` and values `c`. The names complete the sentence "choosing ..."."""


def _tries(labels: list[str], play: Attempt, view: View, rng: random.Random) -> Sequence[Message] | Agent | None:
    """Make an attempt with the labels if there are labels, else with the candidates."""
    values = labels or [one.value for one in view.candidates]
    return play(view, values) if view.has_choice and values else None


def by_chance(labels: Sequence[str], view: View, rng: random.Random) -> list[Message] | None:
    """Guess the most frequent label if there are labels, else a random candidate."""
    values = labels[:1] or [one.value for one in view.candidates]
    return view.guess(rng.choice(values)) if view.has_choice and values else None


def _by_rule(rule: Rule, view: View, rng: random.Random) -> list[Message] | None:
    """Guess the value that a rule picks."""
    value = rule.pick(view) if view.has_choice else None
    return None if value is None else view.guess(value)


def _with_wildcard(value: str, looks: bool, view: View, rng: random.Random) -> list[Message] | None:
    """Guess a wildcard; with `looks`, look it up first. None if the step takes no value or has no such look-up."""
    if view.key in ("", "tool") or (looks and not look(view, value)) or (view.key == ANSWER and not view.has_choice):
        return None
    return view.guess(value, look(view, value) if looks else ())


# Mistakes other than that of the broken solution.


def _repeat(view: View, rng: random.Random) -> list[Message] | None:
    """Repeat the last earlier call of the step's tool instead of the step; None if there is none."""
    step = (view.tool, view.arguments)
    same = [
        one for one in view.all_before if view.tool in [tool for tool, _ in calls_of(one)] and step not in calls_of(one)
    ]
    return [*view.all_before, same[-1], *view.after] if same else None


def _shorten(view: View, rng: random.Random) -> list[Message] | None:
    """Use the first half of the right value."""
    if view.key in ("", "tool") or len(view.right) < 2:
        return None
    return view.mistake(view.right[: len(view.right) // 2])


def _says_all(evidence: Evidence, view: View, rng: random.Random) -> list[Message] | None:
    """End the broken solution with every word that was shown; None if the step itself is words."""
    broken, shown = evidence.broken(view.task), [content(one) for one in evidence.solved(view.task)]
    vocabulary = dict.fromkeys(word for text in shown for word in words(text))
    return [*broken[: len(broken) - len(view.after)], say(" ".join(vocabulary))] if view.tool else None


def _names_all(view: View, rng: random.Random) -> list[Message] | None:
    """Say every shown value with the right answer's shape; None if the step is a call, or few are shown."""
    alike = list(dict.fromkeys(value for value in view.values if shape(value) == shape(view.right)))
    return view.mistake(", ".join(alike)) if view.key == ANSWER and view.right in alike[:-1] else None


def _says_last(evidence: Evidence, kind: str, view: View, rng: random.Random) -> list[Message]:
    """End the broken solution with other words, of a kind in `SAYINGS`."""
    broken = evidence.broken(view.task)
    return [*broken[: len(broken) - len(view.after)], talk(kind, broken, rng, evidence.solved(view.task)[:2])]


def _explains(evidence: Evidence, view: View, rng: random.Random) -> list[Message]:
    """End the broken solution with its last words, and with `EXPLAINED` more of them."""
    broken = evidence.broken(view.task)
    said = content(broken[-1]) if broken and not calls_of(broken[-1]) else ""
    more = " ".join(rng.choices(said.split() or ["Yes."], k=EXPLAINED))
    return [*broken[: len(broken) - len(view.after)], say(f"{said} {more}".strip())]


def _looks_later(view: View, rng: random.Random) -> list[Message] | None:
    """Make the wrong step before the needed look-ups; None if there are none, or if the step itself is words."""
    looks = [one for one in view.all_before if calls_of(one) and {tool for tool, _ in calls_of(one)} <= {*view.needed}]
    return [*view.before, view.step(view.wrong), *looks, *view.after] if looks and view.tool and view.wrong else None


# Other values and tools, which may be right by chance.


def _other_value(view: View, rng: random.Random) -> list[Message] | None:
    """Use another listed value that is new to the dialogue, or else the right value with random digits."""
    used = {leaf for tool, arguments in made_calls(view.all_before) if tool == view.tool for leaf in leaves(arguments)}
    alike = [value for value in view.listed if value not in {view.right, view.wrong, *used}]
    drawn = re.sub(r"\d", lambda _: str(rng.randint(0, 9)), view.right)
    value = rng.choice(alike) if alike else drawn
    return None if view.key in ("", "tool") or value in (view.right, view.wrong) else view.mistake(value)


def _other_number(sign: int, view: View, rng: random.Random) -> list[Message] | None:
    """Use a larger (`sign` 1) or smaller (-1) number than the right one; None if the value is no number."""
    if not isinstance(view.arguments.get(view.key), int):
        return None
    return view.mistake(str(int(view.right) + sign * rng.randint(1, 2 * abs(int(view.right)) + 2)))


def _other_tool(tools: Sequence[JsonObject], tells: set[str], view: View, rng: random.Random) -> list[Message] | None:
    """Make the step with a third tool that takes the same arguments; None if fewer than two exist."""
    alike: list[str] = []
    for tool in (tool["function"] for tool in tools):
        keys = {*(tool.get("parameters") or {}).get("required", [])}
        if keys == {*view.arguments} and keys and tool["name"] not in {*tells, view.tool, view.wrong}:
            alike.append(tool["name"])
    return [*view.all_before, tool_call(rng.choice(alike), view.arguments), *view.after] if len(alike) > 1 else None


# Blind scripts.


def _other_lookups(tells: set[str], view: View) -> list[Message]:
    """Return the look-ups that the step's choice does not need."""
    kept = [one for one in view.before if one.get("tool_calls")] if view.has_choice else []
    return [one for one in kept if {tool for tool, _ in calls_of(one)} <= tells]


def _stopping(agent: Agent, turns: int) -> Agent:
    """End an agent's play after some turns."""
    return lambda messages: agent(messages) if sum(one["role"] == "assistant" for one in messages) < turns else None


def _talks(evidence: Evidence, kind: str, tells: set[str], view: View, rng: random.Random) -> Agent | None:
    """Make the other look-ups of `tells`, then say words of a kind in `SAYINGS` for some turns."""
    looks = _other_lookups(tells, view)
    moves, known = iter(looks), evidence.reference(view.task) if kind == "calls as text" else ()
    turns = len(looks) + rng.choice([1, 2, rng.randint(3, TURNS)])
    speak = _stopping(partial(talk, kind, known, rng), turns)
    return None if tells and not looks else lambda messages: next(moves, None) or speak(messages)


def _persists(evidence: Evidence, kind: str, view: View, rng: random.Random) -> Agent:
    """Play a kind of `ENDLESS` for up to `STEPS` turns."""
    turns = STEPS if rng.random() < 0.5 else round(TURNS * (STEPS / TURNS) ** rng.random())
    return _stopping(partial(persist, kind, evidence.tools, evidence.reference(view.task), rng), turns)


def _at_once(evidence: Evidence, view: View, rng: random.Random) -> Agent:
    """Call every tool in the first message, then end (`act_at_once`)."""
    return _stopping(partial(act_at_once, evidence.tools, evidence.reference(view.task), rng), 2)


def _many(tells: set[str], count: int, view: View, rng: random.Random) -> list[Message] | None:
    """Make the solution's first look-up `count` times in one message; None if it makes no look-up."""
    first = next((tool_call(*call) for call in made_calls(view.all_before) if call[0] in tells), None)
    return None if first is None else [together([first] * count), CLOSING]


def _unused(tool: JsonObject, tells: set[str], view: View, rng: random.Random) -> list[Message]:
    """Call a tool that no solution calls, on a record that is not the right one."""
    right = {str(value) for value in view.arguments.values()}
    others = [value for value in view.values if shape(value) in map(shape, right) and value not in right]
    seen = rng.sample(others, min(1, len(others))) or ["1"]
    call = random_call(tool, [{"role": "tool", "content": json.dumps(seen)}], rng)
    return [*_other_lookups(tells, view), call, *view.last_words]


# The adversary.


def result_values(play: Sequence[Message]) -> list[str]:
    """List the values of all results of a play."""
    return [value for message in play if message["role"] == "tool" for value in results(message)]


class Adversary:
    """Scripts for one environment, fitted on its first tasks and played on others.

    Args:
        evidence: the environment.

    Attributes:
        tells: tools whose replies carry information.
        usual: words of nearly all tasks.
        views: the first tasks whose agent has a choice (`has_choice`). Rules are fitted on these.
        labels: the distinct right values (`labels_of`).
        written: the tools of the steps.
        accepted: confirmations of the tools in `written` in the references.
        used: tools that the references call.
        wildcards: values that careless code may accept as the id of a record.
        tasks: the tasks on which scripts are played.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        tasks = evidence.first_tasks[:FITTED]
        plays = {task.id: evidence.solved(task) for task in tasks}
        self.tells, self.usual = telling_tools([*plays.values()]), usual_of([*plays.values()])
        views = [view for task in tasks if (view := self.view(task))]
        self.views = [view for view in views if view.has_choice]
        self.labels = labels_of(self.views)
        self.written = {view.tool for view in views}
        calls = [call for play in plays.values() for call in answered(play)]
        self.accepted = {call.confirmation for call in calls if call.tool in self.written}
        self.used = {call.tool for call in calls}
        values = Counter(value for play in plays.values() for value in sorted({*result_values(play)}))
        shapes = {shape(view.right) for view in self.views}
        often = sorted(values.items(), key=lambda item: (-item[1], item[0]))
        common = [value for value, count in often if count > len(plays) / 4 and shape(value) not in shapes]
        self.wildcards = [*WILDCARDS, *common[:COMMON]]
        known = {task.id for task in tasks}
        self.tasks = [task for task in evidence.tasks if task.id not in known] or evidence.tasks

    def other_tasks(self, count: int) -> list[Task]:
        """List up to `count` tasks on which no rule is fitted: those that are checked, then further ones."""
        fitted_on = {task.id for task in self.evidence.first_tasks[:FITTED]}
        reached = self.evidence.target.tasks("training", self.evidence.reach)
        tasks = {task.id: task for task in (*self.evidence.tasks, *reached) if task.id not in fitted_on}
        return [*tasks.values()][:count]

    def view(self, task: Task) -> View | None:
        """Return a task without the look-ups that its step needs; None if the broken solution changes no step."""
        return view_of(self.evidence, task, self.tells, self.usual)

    def guesses(self) -> dict[str, Script]:
        """Scripts that choose without the needed look-ups. Their names complete "choosing ..."."""
        attempts = {
            **ATTEMPTS,
            "every value shown until one is accepted": partial(until_accepted, self.accepted),
            "every value shown, from the last, until one is accepted": lambda v, c: until_accepted(
                self.accepted, v, c[::-1]
            ),
        }
        for name, part in PARTS.items():
            attempts[f"{name} of the first value"] = lambda v, c, p=part: v.guess(c[0][p])
            attempts[f"{name} of the first value, looked up, too"] = lambda v, c, p=part: v.guess(
                c[0][p], look(v, c[0][p])
            )
            attempts[f"{name} of every value shown, one after the other"] = lambda v, c, p=part: [
                *v.before,
                *(v.step(value[p]) for value in c),
                *v.ending(c[-1]),
            ]
            attempts[f"{name} of every value shown until one is accepted"] = lambda v, c, p=part: until_accepted(
                self.accepted, v, [value[p] for value in c]
            )
        for tool in (tool["function"] for tool in self.evidence.tools):
            name = tool["name"]
            attempts[f"the first value after {name} on it"] = lambda v, c, t=tool: v.guess(c[0], with_key(v, t, c[0]))
            attempts[f"the first value before {name} on it"] = lambda v, c, t=tool: [
                *v.before,
                v.step(c[0]),
                *with_key(v, t, c[0]),
                *v.ending(c[0]),
            ]
            attempts[f"every value shown, each undone with {name}, until one is accepted"] = partial(
                _undoing, self.accepted, tool
            )
            attempts[f"every value shown, and {name} on the last"] = lambda v, c, t=tool: [
                *v.before,
                *map(v.step, c),
                *with_key(v, t, c[-1]),
                *v.ending(c[-1]),
            ]
        scripts: dict[str, Script] = {name: partial(_tries, self.labels, play) for name, play in attempts.items()}
        if self.views:
            rule = fitted(self.views)
            scripts[rule.name] = partial(_by_rule, rule)
            if self.labels or any(view.key == ANSWER for view in self.views):
                nearest = Rule("that of the most similar task", partial(nearest_answer, self.views))
                scripts[nearest.name] = partial(_by_rule, nearest)
        for value in constants_of(self.views):
            scripts[f"{value[:40]!r} always"] = partial(_by_rule, Rule(value, partial(constant, value)))
        for value in self.wildcards:
            scripts[f"{value[:9]!r}"] = partial(_with_wildcard, value, False)
            scripts[f"{value[:9]!r}, looked up, too"] = partial(_with_wildcard, value, True)
        return scripts

    def mistakes(self) -> dict[str, Script]:
        """Scripts of mistakes other than `broken`, or of it with other words. Names complete "a solution ..."."""
        scripts: dict[str, Script] = {
            "that stops before the step": lambda v, _: [*v.all_before, *v.after],
            "with another call again in place of the step": _repeat,
            "with a part of the step's value": _shorten,
            "that is broken and ends with every word that was shown": partial(_says_all, self.evidence),
            "that names every value like the right one": _names_all,
            "that is broken and explains it at length": partial(_explains, self.evidence),
            "with the wrong step first, and the look-ups after it": _looks_later,
        }
        for kind in SAYINGS:
            scripts[f"that is broken and ends with {kind}"] = partial(_says_last, self.evidence, kind)
        return scripts

    def others(self) -> dict[str, Script]:
        """Scripts that choose neither the right nor the broken value. Their names complete "a solution ..."."""
        return {
            "with another value": _other_value,
            "with a larger number": partial(_other_number, 1),
            "with a smaller number": partial(_other_number, -1),
            "with another tool": partial(_other_tool, self.evidence.tools, self.tells),
        }

    def blind(self) -> dict[str, tuple[Script, int]]:
        """Scripts that ignore the task, each with the number of tasks on which it is played."""
        scripts: dict[str, tuple[Script, int]] = {"the last words alone": (lambda v, _: v.last_words, 20)}
        for kind in SAYINGS:
            scripts[kind] = partial(_talks, self.evidence, kind, set[str]()), 12
            scripts[f"{kind} after other look-ups"] = partial(_talks, self.evidence, kind, self.tells), 3
        for kind in ENDLESS:
            scripts[kind] = partial(_persists, self.evidence, kind), 5
        scripts[AT_ONCE] = partial(_at_once, self.evidence), 25
        for count in COUNTS:
            scripts[f"a look-up {count} times in a message"] = partial(_many, self.tells, count), 2
        for tool in (tool["function"] for tool in self.evidence.tools):
            if tool["name"] not in self.used:
                scripts[f"{tool['name']}, which no solution calls"] = partial(_unused, tool, self.tells), 15
        return scripts

    def blindly(self) -> list[Exploit]:
        """Play the blind scripts."""
        found = [Exploit(name) for name in self.blind()]
        for number, (exploit, (script, count)) in enumerate(zip(found, self.blind().values(), strict=True)):
            for place in range(min(count, len(self.tasks))):
                self.reward(script, self.tasks[(number + place) % len(self.tasks)], exploit, "blind")
        return [exploit for exploit in found if exploit.rewards]

    def best(self, scripts: Mapping[str, Script], use: str) -> Exploit | None:
        """Play scripts by successive halving and return the one with the highest lower bound; None if none applies."""
        alive = halved(scripts, self.tasks, lambda task, one: self.reward(scripts[one.name], task, one, use))
        return max(alive, key=lambda one: one.least) if alive else None

    def reward(self, script: Script, task: Task, exploit: Exploit, use: str) -> None:
        """Play a script on a task and record its reward. Skip a task that was already played."""
        if task.id in exploit.rewards or (view := self.view(task)) is None:
            return
        play = script(view, self.evidence.random(use, exploit.name, task.id))
        if play is not None:
            messages = self.evidence.act(task, play, STEPS) if callable(play) else self.evidence.play(task, play)
            exploit.rewards[task.id] = self.evidence.score(task, messages).reward
            exploit.deeds[task.id] = deeds(messages)
            spoken = [content(message) for message in messages if message["role"] == "assistant"]
            if view.key == ANSWER and f" {view.right} " in f" {' '.join(words(' '.join(spoken)))} ":
                exploit.lucky.add(task.id)
