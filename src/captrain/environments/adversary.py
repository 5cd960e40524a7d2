"""An adversary that tries to earn reward without the capability: by guessing, or by changing the solution.

`View` splits a reference solution at the step that `broken` changes. It removes the look-ups that this step needs.
The adversary then plays two kinds of scripts:

- A decision tree predicts the step from the visible rest. It is fitted on some tasks and played on others.
- Successive halving searches fixed call scripts: each candidate in turn, wildcards, parts of ids, other tools, and
  mistakes that `broken` does not make.

A script only uses values that its agent has seen.
"""

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import takewhile
from math import prod
from os.path import commonprefix
from statistics import mean, stdev

from captrain.contract import calls_of, tool_call
from captrain.environments.evidence import STEPS, TURNS, Agent, Evidence
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
    shown,
    talk,
    words,
)
from captrain.environments.worded import ANSWER, answer_of, forgetting, must_be_found, replaced, spans, usual_words
from captrain.records import JsonObject, Message, Task, leaves

ROUNDS = ((3, 16), (8, 4), (20, 4))
"""Successive halving: per round, the number of tasks that each script plays and the number of scripts kept."""
CHOICES = 12
"""Maximum number of candidates that a script tries."""
DEPTH, GAINED = 3, 1
"""Depth of the decision tree, and how many additional tasks a split must get right."""
MOST_LINES = 40
"""Maximum number of lines kept of a play."""
COMMON = 6
"""Maximum number of frequent result values, such as a status, that are tried as ids."""
FIELDS = 4
"""Maximum number of numbers, and of texts, that a rule compares in a candidate's record."""
MARKS = 16
"""Maximum number of rules that pick a candidate by a characteristic text."""
FITTED = 60
"""Maximum number of tasks on which rules are fitted."""
EXPLAINED = 800
"""Number of words of a long explanation."""
COUNTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 70, 100, 200)
"""Numbers of copies of a call that are put into one message."""
WILDCARDS = ("*", "%", "", "all", "any", "first", "latest", "current", "0", "-1", "9" * 300, "None")
"""Values that careless code may accept as the id of some record."""
SURE = 2
"""Number of standard errors by which the mean reward must exceed a bound."""

Script = Callable[["View", random.Random], "Sequence[Message] | Agent | None"]
"""Returns the messages or the agent that play a task; None if the script does not apply to the task."""


@dataclass(frozen=True)
class Answered:
    """A call with the text of its reply."""

    tool: str
    arguments: JsonObject
    reply: str

    @property
    def confirmation(self) -> str:
        """The reply with the call's argument values removed. It is constant for a tool that only confirms."""
        text = self.reply
        for leaf in sorted(filter(None, leaves(self.arguments)), key=len, reverse=True):
            text = text.replace(leaf, "")
        return text


def answered(messages: Sequence[Message]) -> list[Answered]:
    """List the calls of a play with their replies."""
    entries: list[Answered] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            replies = takewhile(lambda reply: reply["role"] == "tool", messages[index + 1 :])
            entries += [
                Answered(*call, content(reply)) for call, reply in zip(calls_of(message), replies, strict=False)
            ]
    return entries


@dataclass(frozen=True)
class Candidate:
    """A value that the step may use, with its position among the shown values, the text around it and its record."""

    value: str
    place: int
    beside: str = ""
    record: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """Its digits as a number."""
        return number_in(self.value)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its record."""
        return [number_in(text) for text in self.record if re.search("[0-9]", text)]


def number_in(text: str) -> int:
    """Read the digits of a text as one number."""
    return int("".join(re.findall("[0-9]", text))[:15] or "0")


@dataclass(frozen=True)
class Choice:
    """What the agent sees at the point where it must choose a value.

    Attributes:
        task: the task.
        key: the name of the argument to choose; "tool" if the tool is chosen; `ANSWER` if words; "" if nothing.
        arguments: the other visible properties, by name; those of the step in an environment.
        right: the right value or tool.
        candidates: shown values with the shape of the right value.
        told: the texts of the messages to the agent that are not tool results.
        replies: values of the tool results that the agent gets.
    """

    task: Task
    key: str
    arguments: JsonObject
    right: str
    candidates: list[Candidate]
    told: list[str]
    replies: list[str]


@dataclass(frozen=True)
class View(Choice):
    """A task without the look-ups that its step needs. The step is the one that `broken` changes, in argument `key`.

    Attributes:
        before: the solution's messages before the step, without the needed look-ups.
        whole: the solution's messages before the step, with the needed look-ups.
        after: messages after the step.
        tool: the step's tool; "" if the step is words.
        wrong: the value or tool of `broken`.
        otherwise: the arguments of the tool of `broken`, if the tool is chosen.
        both: whether the right and the wrong value both appear in results or messages.
        needed: the tools whose calls are left out.
        opened: whether only look-ups about the candidates are left out. If False, all look-ups are left out.
        listed: of all results, the longest list of values that have the right shape and include the right value.
        values: all values of all results, also of look-ups that are left out.
        said: the step's words, and the same without those that only the needed look-ups tell; "" if it is a call.
    """

    before: list[Message]
    whole: list[Message]
    after: list[Message]
    tool: str
    wrong: str
    otherwise: JsonObject
    both: bool
    needed: list[str]
    opened: bool
    listed: list[str]
    values: list[str]
    said: tuple[str, str]

    def step(self, value: str) -> Message:
        """Make the step with another value.

        Replace other argument values that no message told by result values of the same shape.
        """
        if self.key == "tool":
            return tool_call(value, self.otherwise if value == self.wrong else self.arguments)
        if self.key == ANSWER:
            return say(replaced(self.said[1], self.right, value))
        place = next((one.place for one in self.candidates if one.value == value), 0)
        arguments: JsonObject = {}
        for key, old in self.arguments.items():
            text, alike = str(old), [one for one in self.replies if shape(one) == shape(str(old))]
            if key == self.key:
                text = value
            elif alike and not any(text in one for one in self.told):
                text = alike[place % len(alike)]
            if text != str(old):
                arguments[key] = int(text) if isinstance(old, int) and re.fullmatch(r"-?\d{1,15}", text) else text
            else:
                arguments[key] = old
        return tool_call(self.tool, arguments)

    def ending(self, value: str) -> list[Message]:
        """Return the messages after the step with `value` for the right value.

        Drop messages whose calls use values that the agent has not seen.
        """
        seen, kept = "\n".join([value, *self.told, *self.replies]), list[Message]()
        for message in self.after:
            text = json.dumps(message)
            if self.right:
                text = text.replace(json.dumps(self.right)[1:-1], json.dumps(value)[1:-1])
            changed: Message = json.loads(text)
            if all(leaf in seen for _, arguments in calls_of(changed) for leaf in leaves(arguments)):
                kept.append(changed)
        return kept

    @property
    def last_words(self) -> list[Message]:
        """The solution's last message if it has no tool calls, else a default closing message."""
        return [one for one in self.after[-1:] if not one.get("tool_calls")] or [CLOSING]

    def guess(self, value: str, looks: Sequence[Message] = ()) -> list[Message]:
        """Return the solution with another value, and with `looks` in place of the needed look-ups."""
        return [*self.before, *looks, self.step(value), *self.ending(value)]

    def mistake(self, value: str) -> list[Message]:
        """Return the solution, all look-ups included, with another value in the step."""
        step = say(replaced(self.said[0], self.right, value)) if self.key == ANSWER else self.step(value)
        return [*self.whole, step, *self.after]


def telling(plays: Sequence[Sequence[Message]]) -> set[str]:
    """Return the tools whose replies carry information: they vary beyond the values of their calls."""
    replies: dict[str, set[str]] = {}
    for play in plays:
        for call in answered(play):
            replies.setdefault(call.tool, set()).add(call.confirmation)
    return {tool for tool, texts in replies.items() if len(texts) > 1}


def _changed(solution: Sequence[Message], broken: Sequence[Message], tells: set[str]) -> tuple[int, int, str, str, str]:
    """Return the step that `broken` changes or leaves out.

    If it leaves out or changes only look-ups, and ends in other words, these are the step.

    Returns:
        Index of the message, index of the call in it, changed argument, right value, wrong value; both texts, if words.
    """
    place = len(commonprefix([[json.dumps(m, sort_keys=True) for m in one] for one in (solution, broken)]))
    right = calls_of(solution[place]) if place < len(solution) else []
    wrong = calls_of(broken[place]) if place < len(broken) else []
    ends = [content(one[-1]) if one and not calls_of(one[-1]) else "" for one in (solution, broken)]
    if ends[0] != ends[1] and ends[0] and {tool for tool, _ in right} <= tells:
        return len(solution) - 1, 0, ANSWER, ends[0], ends[1]
    if len(right) == 1 and not {tool for tool, _ in right} & tells and solution[place + 1 :] == broken[place:]:
        named = [(key, value) for key, value in right[0][1].items() if isinstance(value, str)]
        left_out, value = next(iter(named), ("", ""))
        return place, 0, left_out, value, ""
    number = next((n for n, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b), 0)
    if number >= len(right) or number >= len(wrong) or len(solution) != len(broken):
        return place, number, "", "", ""
    (tool, arguments), (other, others) = right[number], wrong[number]
    if tool != other:
        return place, number, "tool", tool, other
    keys = [key for key, value in arguments.items() if value != others.get(key) and isinstance(value, str | int)]
    if not keys:
        return place, number, "", "", ""
    return place, number, keys[0], str(arguments[keys[0]]), str(others.get(keys[0]))


Records = dict[str, tuple[str, ...]]
"""Result values, each with the other values of its record."""


def records_of(text: str) -> Records:
    """Return, for each value of a result, the other values of its JSON object or, if not JSON, of its line."""
    found: Records = {}

    def note(values: Sequence[str]) -> None:
        for value in values:
            found.setdefault(value, tuple(other for other in values if other != value))

    def visit(value: object) -> None:
        if isinstance(value, Mapping):
            for name, child in value.items():
                visit(child)
                if isinstance(child, Mapping):
                    note([str(name), *leaves(child)])
            note([leaf for child in value.values() if not isinstance(child, Mapping | list) for leaf in leaves(child)])
        elif isinstance(value, list):
            for child in value:
                visit(child)

    try:
        visit(json.loads(text))
    except (ValueError, RecursionError):
        for line in text.splitlines():
            note(words(line))
    return found


def _without(
    count: int, play: Sequence[Message], needed: Sequence[Answered]
) -> tuple[list[Message], list[str], list[str], Records]:
    """Remove the `needed` calls from the first `count` assistant messages of a solution.

    Also remove calls that use a value which only removed calls have shown.

    Returns:
        The kept assistant messages, the texts told to the agent, the values of the kept results, and their records.
    """
    kept: list[Message] = []
    told: list[str] = []
    replies: list[str] = []
    records: Records = {}
    pending, flags, complete = answered(play), list[bool](), True
    for message in play:
        if message["role"] == "assistant":
            if (count := count - 1) < 0:
                break
            calls = message.get("tool_calls") or []
            made, pending = pending[: len(calls)], pending[len(calls) :]
            seen = "\n".join([*told, *replies])
            flags = [call not in needed and all(leaf in seen for leaf in leaves(call.arguments)) for call in made]
            chosen = [call for call, flag in zip(calls, flags, strict=False) if flag]
            complete = complete and all(flags)
            if chosen:
                kept.append({**message, "tool_calls": chosen})
            elif complete:  # what is said after a look-up that is left out may depend on it
                kept.append(message)
        elif message["role"] == "tool":
            if flags and flags.pop(0):
                replies += shown(message)
                records = joined(records, records_of(content(message)))
        else:
            told.append(content(message))
    return kept, told, replies, records


def joined(first: Records, second: Records) -> Records:
    """Merge two sets of records."""
    beside = {value: (*first.get(value, ()), *second.get(value, ())) for value in (*first, *second)}
    return {value: tuple(dict.fromkeys(others)) for value, others in beside.items()}


def candidates_of(right: str, told: Sequence[str], replies: Sequence[str], records: Records) -> list[Candidate]:
    """List the shown values that have the shape of the right one."""
    found: dict[str, Candidate] = {}
    for text in [*replies, *(told if re.search(r"\d", right) else ())]:
        for word in words(text):
            if shape(word) == shape(right) and word not in found and len(found) < CHOICES:
                beside = text.replace(word, "", 1).strip()
                near = words(beside) if text in replies else []
                found[word] = Candidate(word, len(found), beside, (*near, *records.get(text, records.get(word, ()))))
    return [*found.values()]


@dataclass(frozen=True)
class Usual:
    """Words that nearly all tasks have: in the message that ends the reference, and in the messages to the agent."""

    said: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)


def usual_of(plays: Sequence[Sequence[Message]]) -> Usual:
    """Return the usual words of the plays of references."""
    ends = [content(play[-1]) for play in plays if play and play[-1]["role"] == "assistant"]
    return Usual(usual_words(ends), usual_words(["\n".join(told_texts(play)) for play in plays]))


def told_texts(play: Sequence[Message]) -> list[str]:
    """List the messages to the agent that are no tool results."""
    return [content(message) for message in play if message["role"] not in ("assistant", "tool")]


def view_of(evidence: Evidence, task: Task, tells: set[str], usual: Usual) -> View | None:
    """View a task without the look-ups that its step needs; None if `broken` changes no step."""
    solution, play = evidence.reference(task), evidence.solved(task)
    broken = evidence.broken(task)
    place, number, key, right, wrong = _changed(solution, broken, tells)
    if place >= len(solution):
        return None
    calls, text = calls_of(solution[place]), content(solution[place])
    if key == ANSWER:
        right, wrong = answer_of(right, wrong, usual.said, "\n".join(told_texts(play)))
    tool, arguments = calls[number] if calls else ("", {})
    made = answered(play)[: sum(len(calls_of(message)) for message in solution[:place])]
    lookups = [call for call in made if call.tool in tells and call.tool != tool]
    if key == ANSWER and not lookups:  # a reply that is the same in every task tells nothing, but may hold the answer
        lookups = [call for call in made if f" {right} " in f" {' '.join(words(call.reply))} "]
    needed = _about(key, right, arguments, lookups) or lookups
    before, told, replies, records = _without(place, play, needed)
    found = [shown({"role": "tool", "content": call.reply}) for call in made]
    lists = [[one for one in values if shape(one) == shape(right)] for values in found]
    everything = {word for text in (*told, *sum(found, [])) for word in words(text)}
    if key == ANSWER:
        known = {*usual.said, *(word for text in (*told, *replies) for word in words(text))}
        both = bool(needed) and must_be_found(right, wrong, told, sum(found, []), usual.said)
        candidates = said_candidates(right, told, replies, records, usual.told)
        said = text, forgetting(text, right, everything - known, known)
    else:
        both = key == "tool" or (key != "" and {right, wrong} <= everything)
        candidates, said = candidates_of(right, told, replies, records), ("", "")
    return View(
        task,
        key,
        arguments,
        right,
        candidates,
        told,
        replies,
        before=before,
        whole=list(solution[:place]),
        after=list(solution[place + 1 :]),
        tool=tool,
        wrong=wrong,
        otherwise=calls_of(broken[place])[number][1] if key == "tool" else {},
        both=both,
        needed=sorted({call.tool for call in needed}),
        opened=needed is not lookups,
        listed=max((one for one in lists if right in one), key=len, default=[]),
        values=sum(found, []),
        said=said,
    )


def _about(key: str, right: str, arguments: JsonObject, lookups: list[Answered]) -> list[Answered]:
    """List the look-ups about the candidates for the step's value; none if there are none, or all name the right one.

    An answer in words is a candidate only if one of them names it.
    """
    if key == "tool":
        return [call for call in lookups if {*leaves(call.arguments)} & {*leaves(arguments)}]
    about = [call for call in lookups if key and shape(right) in map(shape, leaves(call.arguments))]
    named = [right in leaves(call.arguments) for call in about]  # if all name it, it was known before
    return [] if all(named) or (key == ANSWER and not any(named)) else about


def said_candidates(
    right: str, told: Sequence[str], replies: Sequence[str], records: Records, usual: set[str]
) -> list[Candidate]:
    """List the shown values and the parts of the prompt that have the shape of the right answer."""
    found = {one.value: one for one in candidates_of(right, (), replies, records)}
    more = [(value, records.get(value, ())) for value in replies if shape(value) == shape(right)]
    more += [span for text in reversed(told) for span in spans(text, right, usual)]
    for value, record in more:
        if value not in found and len(found) < CHOICES:
            found[value] = Candidate(value, len(found), "", record)
    return [*found.values()]


# Shallow models.


@dataclass(frozen=True)
class Rule:
    """A way to choose the step's value from what is visible."""

    name: str
    pick: Callable[[Choice], str | None]


@dataclass(frozen=True)
class Trait:
    """A visible property of a task, on which a choice may depend."""

    name: str
    holds: Callable[[Choice], bool]


def _distance(one: Candidate, view: Choice) -> int:
    numbers = [int(number) for text in view.told for number in re.findall(r"\d{1,15}", text)]
    return min((abs(one.number - number) for number in numbers), default=0)


def _turned(place: int, one: Candidate, view: Choice) -> int:
    """The candidate's position relative to a number in the last message, modulo the number of candidates."""
    numbers = [int(number) for text in view.told[-1:] for number in re.findall(r"\d{1,15}", text)]
    return (one.place - (numbers[place] if -len(numbers) <= place < len(numbers) else 0)) % len(view.candidates)


def _field(place: int, one: Candidate, view: Choice) -> int:
    """The number at index `place` of the candidate's record; 0 if there is none."""
    return one.numbers[place] if place < len(one.numbers) else 0


def _text(place: int, one: Candidate, view: Choice) -> str:
    """The text at index `place` of the candidate's record; "" if there is none."""
    return one.record[place] if place < len(one.record) else ""


def _alike(one: Candidate, view: Choice) -> int:
    """Count how often the values of the candidate's record occur in the records of the other candidates."""
    return sum(text in other.record for text in one.record for other in view.candidates if other is not one)


Order = Callable[[Candidate, Choice], int | str]
"""Sort key of a candidate."""
PROPERTIES: dict[str, Order] = {
    "place": lambda one, _: one.place,
    "number": lambda one, _: one.number,
    "spelling": lambda one, _: one.value,
    "length": lambda one, _: len(one.value),
    "last digit": lambda one, _: one.number % 10,
    "remainder by two": lambda one, _: one.number % 2,
    "remainder by three": lambda one, _: one.number % 3,
    "sum of digits": lambda one, _: sum(map(int, str(one.number))),
    "count in what is told": lambda one, view: sum(words(text).count(one.value) for text in view.told),
    "count in the results": lambda one, view: sum(one.value in text for text in view.replies),
    "length of the words beside it": lambda one, _: len(one.beside),
    "distance from a number that is told": _distance,
    "place counted from a number that is told": partial(_turned, -1),
    "place counted from the last number but one that is told": partial(_turned, -2),
    "place counted from the last number but two that is told": partial(_turned, -3),
    "place counted from the first number that is told": partial(_turned, 0),
}
"""Sort keys of candidates, by name."""
RECORDED: dict[str, Order] = {
    **{f"number {place + 1} in its record": partial(_field, place) for place in range(FIELDS)},
    **{f"text {place + 1} in its record": partial(_text, place) for place in range(FIELDS)},
    "likeness of its record to the others": _alike,
}
"""Sort keys that use a candidate's record, by name."""
RANKS = {
    "smallest": (0, False),
    "second smallest": (1, False),
    "middle": (0.5, False),
    "second largest": (1, True),
    "largest": (0, True),
}
"""Ranks in an order: the index, or the share of the candidates before it, and whether it counts from the end."""


def _ranked(place: float, last: bool, order: Order, view: Choice) -> str | None:
    keys = {one.value: order(one, view) for one in view.candidates}
    ranked = sorted(keys, key=lambda value: _comparable(keys[value]), reverse=last)
    index = int(place * len(ranked)) if 0 < place < 1 else int(place)
    return ranked[min(index, len(ranked) - 1)] if ranked else None


def _comparable(key: int | str) -> tuple[int, str]:
    return (key, "") if isinstance(key, int) else (0, key)


def _selectors(properties: Mapping[str, Order]) -> list[Rule]:
    return [
        Rule(f"the one with the {rank} {name}", partial(_ranked, *end, key))
        for name, key in properties.items()
        for rank, end in RANKS.items()
    ]


def _listed(place: int, view: Choice) -> str | None:
    return view.candidates[place].value if place < len(view.candidates) else None


SELECTORS = _selectors(PROPERTIES)
SELECTORS += [Rule(f"number {place + 1} of those shown", partial(_listed, place)) for place in range(1, 5)]


def labels_of(views: Sequence[Choice]) -> list[str]:
    """List the right tools, or the right values if they are few, most frequent first."""
    counts = Counter(view.right for view in views)
    few = len(counts) <= max(2, len(views) / 4) or all(view.key == "tool" for view in views)
    return [label for label, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))] if few else []


def traits_of(views: Sequence[Choice]) -> list[Trait]:
    """List the words that some tasks have, and properties of the step's numbers."""
    heard = [vocabulary_of(view) for view in views]
    counts = Counter(word for one in heard for word in sorted(one))
    traits: list[Trait] = []
    for word, count in sorted(counts.items()):
        if 0.1 * len(views) <= count <= 0.9 * len(views):
            traits.append(Trait(f'the word "{word}"', partial(_says, word)))
    kinds = {view.key for view in views}
    if len(kinds) > 1:
        traits += [Trait(f"a choice of {key}", partial(_chooses, key)) for key in sorted(kinds)]
    # An argument that only one of the tools takes would tell the right tool: no agent sees it before it has chosen.
    choosing_tool = any(view.key == "tool" for view in views)
    together = set.intersection if choosing_tool else set.union
    names = [{*view.arguments} - {view.key} for view in views]
    shared = together(*names) if names else set[str]()
    for key in sorted(shared):
        numbers = sorted(Candidate(str(view.arguments.get(key)), 0).number for view in views)
        middle = numbers[len(numbers) // 2]
        traits.append(Trait(f"an odd {key}", partial(_numbered, key, lambda number: number % 2 == 1)))
        traits.append(Trait(f"a {key} from {middle} on", partial(_numbered, key, middle.__le__)))
    return traits


def _says(word: str, view: Choice) -> bool:
    return word in vocabulary_of(view)


def _chooses(key: str, view: Choice) -> bool:
    return view.key == key


def _numbered(key: str, holds: Callable[[int], bool], view: Choice) -> bool:
    return holds(Candidate(str(view.arguments.get(key)), 0).number)


PARTS = {
    "the first sign": slice(1),
    "the first two signs": slice(2),
    "all but the last sign": slice(-1),
    "the last sign": slice(-1, None),
    "all but the first sign": slice(1, None),
}
"""Parts of a value. Careless code may accept a part as the value, or a part may reveal the right value."""


def _marks(one: Candidate) -> set[tuple[str, str]]:
    """List the texts that tell a candidate from others: parts of its value, and its record."""
    parts = {(f"as {name}", one.value[part]) for name, part in PARTS.items()}
    return parts | {("in its record", text) for text in one.record}


def _marked(mark: tuple[str, str], view: Choice) -> str | None:
    found = [one for one in view.candidates if mark in _marks(one)] or view.candidates
    return found[0].value if found else None


def marks_of(views: Sequence[Choice]) -> list[Rule]:
    """Return rules that pick the candidate with a certain text, for texts more frequent in right candidates."""
    more: defaultdict[tuple[str, str], float] = defaultdict(float)
    for view in views:
        for one in view.candidates:
            for mark in _marks(one):
                more[mark] += float(one.value == view.right) - 1 / len(view.candidates)
    best = sorted((mark for mark in more if more[mark] > GAINED), key=lambda mark: (-more[mark], mark))[:MARKS]
    return [Rule(f'the one with "{mark[1]}" {mark[0]}', partial(_marked, mark)) for mark in best]


def rules_of(views: Sequence[Choice]) -> list[Rule]:
    """List the rules that a tree may use: properties of the candidates, frequent answers, and computed ones."""
    labels = [Rule(label, partial(_constant, label)) for label in labels_of(views)]
    computed = computed_of([view for view in views if view.key == ANSWER])
    return [*SELECTORS, *_selectors(RECORDED), *marks_of(views), *labels, *computed]


def nearest_of(views: Sequence[Choice], view: Choice) -> Choice | None:
    """Return the other task whose messages share most words with those of a task."""
    own = vocabulary_of(view)

    def likeness(other: Choice) -> float:
        heard = vocabulary_of(other)
        return len(own & heard) / max(1, len(own | heard))

    return max((other for other in views if other.task.id != view.task.id), key=likeness, default=None)


def vocabulary_of(view: Choice) -> frozenset[str]:
    """Return the words of the messages to the agent."""
    return _vocabulary(tuple(view.told))


@lru_cache(maxsize=256)
def _vocabulary(texts: Sequence[str]) -> frozenset[str]:
    return frozenset(word.lower() for text in texts for word in words(text))


def _nearest(views: Sequence[Choice], view: Choice) -> str | None:
    other = nearest_of(views, view)
    return other and other.right


def told_numbers(view: Choice) -> list[int]:
    """List the numbers of the last message to the agent."""
    return [int(number) for text in view.told[-1:] for number in re.findall(r"\d{1,9}", text)]


def _shown_records(view: Choice) -> int:
    """Count the shown values of the most frequent shape, such as the ids of a list."""
    return max(Counter(map(shape, view.replies)).values(), default=0)


COMPUTED: dict[str, Callable[[Choice], int]] = {
    "the number of values in the results": _shown_records,
    "the sum of the numbers that are told": lambda view: sum(told_numbers(view)),
    "the difference of the last two numbers that are told": lambda view: abs(
        next(iter(told_numbers(view)[-2:-1]), 0) - next(iter(told_numbers(view)[-1:]), 0)
    ),
    "the product of the last two numbers that are told": lambda view: prod(told_numbers(view)[-2:]),
    **{
        f"{name} number that is told": lambda view, n=place: next(iter(told_numbers(view)[n:][:1]), 0)
        for name, place in (("the first", 0), ("the second", 1), ("the last", -1), ("the last but one", -2))
    },
}
"""Numbers that are computed from what is visible, by name."""


def computed_of(views: Sequence[Choice]) -> list[Rule]:
    """Return rules that compute a number: one of `COMPUTED`, times or plus the number that fits most tasks."""
    rules: list[Rule] = []
    for name, number in COMPUTED.items():
        pairs = [(number(view), number_in(view.right)) for view in views]
        factors = Counter(right / seen for seen, right in pairs if seen and right)
        sums = Counter(right - seen for seen, right in pairs)
        if factors:
            [(factor, _)] = factors.most_common(1)
            rules.append(Rule(f"{name}, times {factor:g}", partial(_computed, number, factor, 0)))
            [(added, _)] = sums.most_common(1)
            rules.append(Rule(f"{name}, plus {added}", partial(_computed, number, 1.0, added)))
    return rules


def _computed(number: Callable[[Choice], int], factor: float, added: int, view: Choice) -> str | None:
    """Write a number as the right answer is written: "$40.00" for "$30.00"."""
    found, places = round(number(view) * factor) + added, re.search(r"\d\.(\d+)", view.right)
    text = f"{found / 10 ** len(places[1]):.{len(places[1])}f}" if places else str(found)
    return re.sub(r"\d+(?:\.\d+)?", text, view.right, count=1) if re.search(r"\d", view.right) else None


def constants_of(views: Sequence[Choice]) -> list[str]:
    """List the most frequent answer in words, and the one in the middle by number: rewards may pay for being near."""
    rights = sorted((view.right for view in views if view.key == ANSWER), key=lambda right: (number_in(right), right))
    often = Counter(rights).most_common(1)
    return list(dict.fromkeys([*(right for right, _ in often), *rights[len(rights) // 2 :][:1]]))


def is_right(rule: Rule, view: Choice) -> float:
    """Return 1 if a rule picks the right value."""
    return float(rule.pick(view) == view.right)


def fitted(
    views: Sequence[Choice],
    rules_for: Callable[[Sequence[Choice]], list[Rule]] = rules_of,
    worth: Callable[[Rule, Choice], float] = is_right,
    depth: int = DEPTH,
) -> Rule:
    """Fit a decision tree over rules. Split by a trait only if the split gains more than `GAINED`."""
    rules = rules_for(views)
    hits = {rule: [worth(rule, view) for view in views] for rule in rules}
    best = max(rules, key=lambda rule: sum(hits[rule]))
    most, chosen = sum(hits[best]) + GAINED, None
    traits = traits_of(views) if depth else []
    for trait in traits:
        holds = [trait.holds(view) for view in views]
        found = 0.0
        for side in (True, False):
            found += max(
                sum(hit for hit, held in zip(hits[rule], holds, strict=True) if held == side) for rule in rules
            )
        if found > most:
            most, chosen = found, trait
    if chosen is None:
        return best
    first, second = (
        fitted([view for view in views if chosen.holds(view) == side], rules_for, worth, depth - 1)
        for side in (True, False)
    )
    name = f"{first.name} where there is {chosen.name}, else {second.name}"
    return Rule(name, partial(_either, chosen, first, second))


def _constant(label: str, view: Choice) -> str | None:
    return label


def _either(trait: Trait, first: Rule, second: Rule, view: Choice) -> str | None:
    return (first if trait.holds(view) else second).pick(view)


# Moves.


def together(actions: Sequence[Message]) -> Message:
    """Put the calls of several messages into one."""
    calls = [call for action in actions for call in action.get("tool_calls") or []]
    return {**say("\n".join(filter(None, map(content, actions)))), **({"tool_calls": calls} if calls else {})}


def look(view: View, value: str) -> list[Message]:
    """Make a needed look-up with another value. Return no message if the look-ups are not about candidates."""
    for tool, arguments in made_calls(view.whole):
        if view.opened and view.key != "tool" and tool in view.needed:
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
    """Try each value and undo it, until a reply equals a reply to a reference, apart from values."""
    tries = [message for value in values for message in (view.step(value), *undo(value))]
    moves, rest = iter([*view.before, *tries]), iter(view.ending(values[0]))

    def agent(messages: Sequence[Message]) -> Message | None:
        [last] = answered(messages)[-1:] or [Answered("", {}, "")]
        move = None if last.tool == view.tool and last.confirmation in accepted else next(moves, None)
        return move or next(rest, None)

    return agent


def _undoing(accepted: set[str], tool: JsonObject, view: View, values: list[str]) -> Agent | None:
    """Try each value and undo it with `tool`; None if the tool lacks the argument."""
    if not with_key(view, tool, values[0]):
        return None
    return until_accepted(accepted, view, values, lambda value: with_key(view, tool, value))


def following(view: View, first: Sequence[Message]) -> Agent:
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


Attempt = Callable[[View, list[str]], "Sequence[Message] | Agent | None"]
"""Tries values without knowing the right one; None if the tools do not allow the attempt."""

ATTEMPTS: dict[str, Attempt] = {
    "every value shown, one after the other": lambda v, c: [*v.before, *map(v.step, c), *v.ending(c[-1])],
    "every value shown, from the last to the first": lambda v, c: [*v.before, *map(v.step, c[::-1]), *v.ending(c[0])],
    "every value shown, in one message": lambda v, c: [*v.before, together([*map(v.step, c)]), *v.ending(c[0])],
    "every value shown, as one argument": lambda v, c: v.guess(" ".join(c)),
    "every value shown, as one argument that is looked up, too": lambda v, c: v.guess(
        " ".join(c), look(v, " ".join(c))
    ),
    "what the answer to the first value names": lambda v, c: following(v, [v.step(c[0])]),
    "what the answer to an unknown value names": lambda v, c: following(v, [v.step("none")]),
    "what a look at the first value names": lambda v, c: following(v, look(v, c[0])),
    "what the user says when asked": lambda v, c: following(v, [say(f"Which {v.key.replace('_', ' ')}?")]),
    "the first value after a look at it alone": lambda v, c: v.guess(c[0], look(v, c[0])),
    "the first value after several looks at it alone": lambda v, c: v.guess(c[0], look(v, c[0]) * len(c)),
    "no value, but naming all at the end": lambda v, c: [*v.before, say(", ".join(c))],
    "the first value, and naming all at the end": lambda v, c: [*v.before, v.step(c[0]), say(", ".join(c))],
    **{
        f"the first value {number} times": lambda v, c, n=number: [*v.before, *[v.step(c[0])] * n, *v.ending(c[0])]
        for number in (2, 3, 5, 8)
    },
}
"""Attempts by name. The names complete the sentence "choosing ..."."""


@dataclass(frozen=True)
class Exploit:
    """A script's reward on each task, and the lines of its play there."""

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
        """Lower bound of the mean: `SURE` standard errors below it, with one zero reward added."""
        values = [*self.rewards.values(), 0.0]
        return mean(values) - SURE * stdev(values) / len(values) ** 0.5

    @property
    def most(self) -> float:
        """Upper bound of the mean: as far above the mean as `least` is below."""
        return 2 * self.mean - self.least


def halved(
    names: Iterable[str],
    tasks: Sequence[Task],
    play: Callable[[Task, Exploit], None],
    rounds: Sequence[tuple[int, int]] = ROUNDS,
) -> list[Exploit]:
    """Play scripts by successive halving and return the best, best first. `play` records a reward."""
    alive = [Exploit(name) for name in names]
    for number, keep in rounds:
        for task in tasks[:number]:
            for one in alive:
                play(task, one)
        alive = sorted((one for one in alive if one.rewards), key=lambda one: -one.mean)[:keep]
    return alive


class Adversary:
    """Scripts for one environment, fitted on its first tasks and played on the drawn ones.

    Args:
        evidence: the environment.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        tasks = evidence.first_tasks[:FITTED]
        plays = {task.id: evidence.solved(task) for task in tasks}
        self.tells, self.usual = telling([*plays.values()]), usual_of([*plays.values()])
        views = [view for task in tasks if (view := self.view(task))]
        self.views = [view for view in views if view.both]
        self.labels = labels_of(self.views)
        self.written = {view.tool for view in views}
        calls = [call for play in plays.values() for call in answered(play)]
        self.accepted = {call.confirmation for call in calls if call.tool in self.written}
        self.used = {call.tool for call in calls}
        values = Counter(value for play in plays.values() for value in sorted({*told_values(play)}))
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
        """View a task without its look-ups."""
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
        scripts: dict[str, Script] = {name: partial(_attempt, self.labels, play) for name, play in attempts.items()}
        if self.views:
            rule = fitted(self.views)
            scripts[rule.name] = partial(_by_rule, rule)
            if self.labels or any(view.key == ANSWER for view in self.views):
                nearest = Rule("that of the most similar task", partial(_nearest, self.views))
                scripts[nearest.name] = partial(_by_rule, nearest)
        for value in constants_of(self.views):
            scripts[f"{value[:40]!r} always"] = partial(_by_rule, Rule(value, partial(_constant, value)))
        for value in self.wildcards:
            scripts[f"{value[:9]!r}"] = partial(_wild, value, False)
            scripts[f"{value[:9]!r}, looked up, too"] = partial(_wild, value, True)
        return scripts

    def mistakes(self) -> dict[str, Script]:
        """Scripts that make all look-ups and then another mistake than `broken`. Names complete "a solution ..."."""
        scripts: dict[str, Script] = {
            "that stops before the step": lambda v, _: [*v.whole, *v.after],
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


def deeds(messages: Sequence[Message]) -> list[str]:
    """Write the calls and words of a play as lines."""
    lines: list[str] = []
    for message in messages[:MOST_LINES]:
        if message["role"] == "assistant":
            lines += [f"{tool}({json.dumps(arguments)[1:-1]})"[:200] for tool, arguments in calls_of(message)]
            lines += [content(message)[:200]] if content(message) else []
    return lines[:MOST_LINES]


def told_values(play: Sequence[Message]) -> list[str]:
    """List the values of all results of a play."""
    return [value for message in play if message["role"] == "tool" for value in results(message)]


# Scripts.


def _attempt(labels: list[str], play: Attempt, view: View, rng: random.Random) -> Sequence[Message] | Agent | None:
    values = labels or [one.value for one in view.candidates]
    return play(view, values) if view.both and values else None


def by_chance(labels: Sequence[str], view: View, rng: random.Random) -> list[Message] | None:
    """Guess the most frequent label if there are labels, else a random candidate."""
    values = labels[:1] or [one.value for one in view.candidates]
    return view.guess(rng.choice(values)) if view.both and values else None


def _by_rule(rule: Rule, view: View, rng: random.Random) -> list[Message] | None:
    value = rule.pick(view) if view.both else None
    return None if value is None else view.guess(value)


def _wild(value: str, looks: bool, view: View, rng: random.Random) -> list[Message] | None:
    if view.key in ("", "tool") or (looks and not look(view, value)) or (view.key == ANSWER and not view.both):
        return None
    return view.guess(value, look(view, value) if looks else ())


def _repeat(view: View, rng: random.Random) -> list[Message] | None:
    step = (view.tool, view.arguments)
    same = [one for one in view.whole if view.tool in [tool for tool, _ in calls_of(one)] and step not in calls_of(one)]
    return [*view.whole, same[-1], *view.after] if same else None


def _shorten(view: View, rng: random.Random) -> list[Message] | None:
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
    looks = [one for one in view.whole if calls_of(one) and {tool for tool, _ in calls_of(one)} <= {*view.needed}]
    return [*view.before, view.step(view.wrong), *looks, *view.after] if looks and view.tool and view.wrong else None


def _other_value(view: View, rng: random.Random) -> list[Message] | None:
    """Use another listed value that is new to the dialogue, or else the right value with random digits."""
    used = {leaf for tool, arguments in made_calls(view.whole) if tool == view.tool for leaf in leaves(arguments)}
    alike = [value for value in view.listed if value not in {view.right, view.wrong, *used}]
    drawn = re.sub(r"\d", lambda _: str(rng.randint(0, 9)), view.right)
    value = rng.choice(alike) if alike else drawn
    return None if view.key in ("", "tool") or value in (view.right, view.wrong) else view.mistake(value)


def _other_number(sign: int, view: View, rng: random.Random) -> list[Message] | None:
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
    return [*view.whole, tool_call(rng.choice(alike), view.arguments), *view.after] if len(alike) > 1 else None


def sources(tells: set[str], view: View) -> list[Message]:
    """Return the look-ups that the step's choice does not need."""
    kept = [one for one in view.before if one.get("tool_calls")] if view.both else []
    return [one for one in kept if {tool for tool, _ in calls_of(one)} <= tells]


def stopping(agent: Agent, turns: int) -> Agent:
    """End an agent's play after some turns."""
    return lambda messages: agent(messages) if sum(one["role"] == "assistant" for one in messages) < turns else None


def _talks(evidence: Evidence, kind: str, tells: set[str], view: View, rng: random.Random) -> Agent | None:
    looks = sources(tells, view)
    moves, known = iter(looks), evidence.reference(view.task) if kind == "calls as text" else ()
    turns = len(looks) + rng.choice([1, 2, rng.randint(3, TURNS)])
    speak = stopping(partial(talk, kind, known, rng), turns)
    return None if tells and not looks else lambda messages: next(moves, None) or speak(messages)


def _persists(evidence: Evidence, kind: str, view: View, rng: random.Random) -> Agent:
    turns = STEPS if rng.random() < 0.5 else round(TURNS * (STEPS / TURNS) ** rng.random())
    return stopping(partial(persist, kind, evidence.tools, evidence.reference(view.task), rng), turns)


def _at_once(evidence: Evidence, view: View, rng: random.Random) -> Agent:
    return stopping(partial(act_at_once, evidence.tools, evidence.reference(view.task), rng), 2)


def _many(tells: set[str], count: int, view: View, rng: random.Random) -> list[Message] | None:
    first = next((tool_call(*call) for call in made_calls(view.whole) if call[0] in tells), None)
    return None if first is None else [together([first] * count), CLOSING]


def _unused(tool: JsonObject, tells: set[str], view: View, rng: random.Random) -> list[Message]:
    """Call a tool that no solution calls, on a record that is not the right one."""
    right = {str(value) for value in view.arguments.values()}
    others = [value for value in view.values if shape(value) in map(shape, right) and value not in right]
    seen = rng.sample(others, min(1, len(others))) or ["1"]
    call = random_call(tool, [{"role": "tool", "content": json.dumps(seen)}], rng)
    return [*sources(tells, view), call, *view.last_words]
