"""What an agent sees of a task that it plays without the capability.

The solution of a task and its broken solution differ in one step: a call with another argument or tool, or a last
message with another answer. An agent needs some look-ups to choose this step well. `view_of` returns a `View`: the task
without these look-ups. It holds what the agent still sees, and builds solutions with another value in the step.

Terms:

- A look-up is a call of a tool whose replies carry information (`telling_tools`).
- Texts that are told are messages to the agent that are not tool results, such as the request.
- A candidate is a visible value with the shape of the right one, such as another order id.
- The record of a value is the rest of the JSON object or line in which a tool result shows it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix

from captrain.contract import calls_of, tool_call
from captrain.environments.evidence import Evidence
from captrain.environments.probes import CLOSING, content, say, shape, shown, words
from captrain.environments.worded import ANSWER, answer_of, forgetting, must_be_found, replaced, spans, usual_words
from captrain.records import JsonObject, Message, Task, leaves

CHOICES = 12
"""Maximum number of candidates in a task."""


# Calls and their replies.


@dataclass(frozen=True)
class Answered:
    """A tool call with the text of its reply."""

    tool: str
    arguments: JsonObject
    reply: str

    @property
    def confirmation(self) -> str:
        """The reply without the call's argument values. It is the same text in every reply that only confirms."""
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


def telling_tools(plays: Sequence[Sequence[Message]]) -> set[str]:
    """Return the tools whose replies carry information: the replies vary beyond the values of their calls."""
    replies: dict[str, set[str]] = {}
    for play in plays:
        for call in answered(play):
            replies.setdefault(call.tool, set()).add(call.confirmation)
    return {tool for tool, texts in replies.items() if len(texts) > 1}


def told_texts(play: Sequence[Message]) -> list[str]:
    """List the texts of the messages to the agent that are not tool results."""
    return [content(message) for message in play if message["role"] not in ("assistant", "tool")]


# Records and candidates.


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


def joined_records(first: Records, second: Records) -> Records:
    """Merge the records of two results: a value in both gets the other values of both."""
    beside = {value: (*first.get(value, ()), *second.get(value, ())) for value in (*first, *second)}
    return {value: tuple(dict.fromkeys(others)) for value, others in beside.items()}


def number_in(text: str) -> int:
    """Read the digits of a text as one number."""
    return int("".join(re.findall("[0-9]", text))[:15] or "0")


@dataclass(frozen=True)
class Candidate:
    """A value that the step may use, with its position among the candidates, the text around it and its record."""

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


def candidates_of(right: str, told: Sequence[str], replies: Sequence[str], records: Records) -> list[Candidate]:
    """List the visible values that have the shape of the right one, at most `CHOICES`.

    Told texts count only if the right value has a digit: otherwise every word of a text might be a candidate.
    """
    found: dict[str, Candidate] = {}
    for text in [*replies, *(told if re.search(r"\d", right) else ())]:
        for word in words(text):
            if shape(word) == shape(right) and word not in found and len(found) < CHOICES:
                beside = text.replace(word, "", 1).strip()
                near = words(beside) if text in replies else []
                found[word] = Candidate(word, len(found), beside, (*near, *records.get(text, records.get(word, ()))))
    return [*found.values()]


def candidates_in_words(
    right: str, told: Sequence[str], replies: Sequence[str], records: Records, usual: set[str]
) -> list[Candidate]:
    """List the values and the parts of told texts that have the shape of the right answer in words."""
    found = {one.value: one for one in candidates_of(right, (), replies, records)}
    more = [(value, records.get(value, ())) for value in replies if shape(value) == shape(right)]
    more += [span for text in reversed(told) for span in spans(text, right, usual)]
    for value, record in more:
        if value not in found and len(found) < CHOICES:
            found[value] = Candidate(value, len(found), "", record)
    return [*found.values()]


# What is visible at the step.


@dataclass(frozen=True)
class Choice:
    """A task at the point where the agent must choose a value: what the agent sees, and the right value.

    Attributes:
        task: the task.
        key: name of the argument to choose; "tool" to choose a tool, `ANSWER` to choose words, "" to choose nothing.
        arguments: the arguments of the step, by name; for a taskset of verifiers, other visible properties.
        right: the right value or tool.
        candidates: visible values with the shape of the right value.
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
    """A task without the look-ups that its step needs. The broken solution changes this step, in argument `key`.

    Attributes:
        before: the solution's messages before the step, without the needed look-ups.
        all_before: the solution's messages before the step, with the needed look-ups.
        after: the solution's messages after the step.
        tool: the step's tool; "" if the step is words.
        wrong: the value or tool in the step of the broken solution; "" if it leaves the call out.
        wrong_arguments: the arguments of the wrong tool, if the tool is chosen.
        has_choice: whether results or told texts show both the right and the wrong value. True if the tool is chosen;
            for words, see `must_be_found`.
        needed: the tools whose calls are left out.
        about_candidates: whether the needed look-ups are those about candidates. If False, all look-ups are needed.
        listed: of the results before the step, the longest list of values of the right shape with the right value.
        values: all values in results before the step, also of look-ups that are left out.
        said: the step's words, and the same without those that only the needed look-ups tell; both "" for a call.
    """

    before: list[Message]
    all_before: list[Message]
    after: list[Message]
    tool: str
    wrong: str
    wrong_arguments: JsonObject
    has_choice: bool
    needed: list[str]
    about_candidates: bool
    listed: list[str]
    values: list[str]
    said: tuple[str, str]

    def step(self, value: str) -> Message:
        """Make the step with `value`.

        An agent may not know the step's other arguments either. Replace those that no told text has by result values
        of the same shape.
        """
        if self.key == "tool":
            return tool_call(value, self.wrong_arguments if value == self.wrong else self.arguments)
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
        """Return the messages after the step, with `value` in place of the right value.

        Calls with values that the agent has not seen are left out.
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
        """Return the solution with `value` in the step, and with `looks` in place of the needed look-ups."""
        return [*self.before, *looks, self.step(value), *self.ending(value)]

    def mistake(self, value: str) -> list[Message]:
        """Return the solution, all look-ups included, with `value` in the step."""
        step = say(replaced(self.said[0], self.right, value)) if self.key == ANSWER else self.step(value)
        return [*self.all_before, step, *self.after]


# The view of a task.


@dataclass(frozen=True)
class Usual:
    """Words of nearly all tasks: in the message that ends the reference (`said`), and in told texts (`told`)."""

    said: set[str]
    told: set[str]


def usual_of(plays: Sequence[Sequence[Message]]) -> Usual:
    """Return the usual words in plays of reference solutions."""
    ends = [content(play[-1]) for play in plays if play and play[-1]["role"] == "assistant"]
    return Usual(usual_words(ends), usual_words(["\n".join(told_texts(play)) for play in plays]))


def _changed_step(
    solution: Sequence[Message], broken: Sequence[Message], tells: set[str]
) -> tuple[int, int, str, str, str]:
    """Return the step that `broken` changes or leaves out.

    If `broken` leaves out or changes only look-ups, and ends in other words, the last message is the step.

    Returns:
        Index of the message, index of the call in it, changed argument, right value, wrong value. If the step is words,
        the values are the whole messages.
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


def _lookups_about_candidates(key: str, right: str, arguments: JsonObject, lookups: list[Answered]) -> list[Answered]:
    """List the look-ups whose arguments name candidates for the step's value, or for a tool, an argument of the step.

    The list is empty if all of them name the right value, because then it was known before. It is also empty for an
    answer in words that no look-up names.
    """
    if key == "tool":
        return [call for call in lookups if {*leaves(call.arguments)} & {*leaves(arguments)}]
    about = [call for call in lookups if key and shape(right) in map(shape, leaves(call.arguments))]
    named = [right in leaves(call.arguments) for call in about]
    return [] if all(named) or (key == ANSWER and not any(named)) else about


def _without_calls(
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
                records = joined_records(records, records_of(content(message)))
        else:
            told.append(content(message))
    return kept, told, replies, records


def view_of(evidence: Evidence, task: Task, tells: set[str], usual: Usual) -> View | None:
    """Return a task without the look-ups that its step needs; None if the broken solution changes no step.

    The needed look-ups are those about candidates. If there are none, all look-ups before the step are needed.

    Args:
        evidence: the environment.
        task: one of its tasks.
        tells: tools whose replies carry information.
        usual: words of nearly all tasks.
    """
    solution, play = evidence.reference(task), evidence.solved(task)
    broken = evidence.broken(task)
    place, number, key, right, wrong = _changed_step(solution, broken, tells)
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
    needed = _lookups_about_candidates(key, right, arguments, lookups) or lookups
    before, told, replies, records = _without_calls(place, play, needed)
    found = [shown({"role": "tool", "content": call.reply}) for call in made]
    lists = [[one for one in values if shape(one) == shape(right)] for values in found]
    everything = {word for text in (*told, *sum(found, [])) for word in words(text)}
    if key == ANSWER:
        known = {*usual.said, *(word for text in (*told, *replies) for word in words(text))}
        has_choice = bool(needed) and must_be_found(right, wrong, told, sum(found, []), usual.said)
        candidates = candidates_in_words(right, told, replies, records, usual.told)
        said = text, forgetting(text, right, everything - known, known)
    else:
        has_choice = key == "tool" or (key != "" and {right, wrong} <= everything)
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
        all_before=list(solution[:place]),
        after=list(solution[place + 1 :]),
        tool=tool,
        wrong=wrong,
        wrong_arguments=calls_of(broken[place])[number][1] if key == "tool" else {},
        has_choice=has_choice,
        needed=sorted({call.tool for call in needed}),
        about_candidates=needed is not lookups,
        listed=max((one for one in lists if right in one), key=len, default=[]),
        values=sum(found, []),
        said=said,
    )
