"""Classes of faults: how each changes the steps of a solution, and which causes are right for it.

A step is a tool call or a text of the agent. A class proposes changed solutions. The task's world decides which of them
fail, and what their calls return.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from captrain.benchmarks import ReplayCall
from captrain.records import JsonObject

PlantedStep = ReplayCall | str
TOKEN = re.compile(r"[#\w][\w\-.@/:]*\w")
CLOSING = "That is everything."


@dataclass(frozen=True)
class Played:
    """A played solution: messages, result and refusal of each call, and the verdict."""

    messages: list[JsonObject]
    results: tuple[str, ...]
    failed: tuple[bool, ...]
    passed: bool


@dataclass
class Tools:
    """What a benchmark's solutions show about its tools: writes, transfers to a human, arguments of look-ups, what
    was looked up, the values of every argument, and the arguments of each tool."""

    writes: set[str] = field(default_factory=set)
    handovers: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)
    values: dict[str, list[object]] = field(default_factory=dict)
    arguments: dict[str, frozenset[str]] = field(default_factory=dict)

    def add(self, call: ReplayCall, writes: bool, kind: str | None) -> None:
        """Count one call of a solution."""
        (self.handovers if kind == "handover" else self.writes if writes or kind == "write" else set[str]()).add(
            call.tool
        )
        self.arguments.setdefault(call.tool, frozenset(call.arguments))
        for name, value in call.arguments.items():
            values_of_name = self.values.setdefault(name, [])
            if value not in values_of_name:
                values_of_name.append(value)
            if not writes and kind not in ("write", "handover"):
                self.keys.add(name)
                self.looked_up.add(str(value))

    def names_record(self, name: str, value: object) -> bool:
        """Return whether an argument names a record, unlike, say, a zip code, which only describes it."""
        if not is_id(value) or not re.search(r"[A-Za-z#]|\d{8}", str(value)):
            return False
        return name in self.keys or value in self.looked_up

    def alike(self, write: ReplayCall) -> list[str]:
        """List the other writes with the same arguments."""
        names = frozenset(write.arguments)
        return [tool for tool in sorted(self.writes) if tool != write.tool and self.arguments[tool] == names and names]


@dataclass(frozen=True)
class Planted:
    """A changed solution: its steps, and the place of the faulty call, or None if a call is missing.

    `accepted` lists causes that are right beside those of its class.
    """

    steps: tuple[PlantedStep, ...]
    call: int | None
    accepted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Input of a class: the solution, how it was played, what the user said, and the tools."""

    steps: tuple[PlantedStep, ...]
    performance: Played
    words: str
    tools: Tools
    owed: tuple[str, ...]
    rng: random.Random

    def calls(self) -> Iterator[tuple[int, int, ReplayCall]]:
        """Yield (step, number, call) for each call."""
        number = -1
        for place, step in enumerate(self.steps):
            if isinstance(step, ReplayCall):
                number += 1
                yield place, number, step

    def writes(self) -> list[tuple[int, int, ReplayCall]]:
        """List the calls that change something."""
        return [entry for entry in self.calls() if entry[2].tool in self.tools.writes]

    def is_grounded(self, number: int, call: ReplayCall) -> bool:
        """Return whether the records of a call were looked up before it."""
        records = [value for name, value in call.arguments.items() if self.tools.names_record(name, value)]
        earlier = {leaf for _, place, step in self.calls() if place < number for leaf in leaves(step.arguments)}
        return all(record in earlier for record in records)

    def view(self, number: int) -> str:
        """Return the texts visible before a call: the user's words and earlier results."""
        return "\n".join([self.words, *self.performance.results[:number]])


def shape(value: object) -> str:
    """Replace letters and digits by their kind, so that ids of one sort have one shape."""
    return re.sub("[A-Z]", "A", re.sub("[a-z]", "a", re.sub(r"\d", "9", str(value))))


def leaves(value: object) -> Iterator[str]:
    """Yield the texts and numbers in a value as texts."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        yield str(value)
        return
    for element in inner:
        yield from leaves(element)


def is_id(value: object) -> bool:
    """Return whether a value looks like the id of a record."""
    return isinstance(value, str) and bool(re.search(r"\d", value)) and 3 <= len(value) <= 40 and " " not in value


def siblings(value: str, view: str) -> list[str]:
    """List other visible values of the same sort, which have the same letters before a number."""
    alike = {token for token in TOKEN.findall(view) if shape(token) == shape(value) and token != value}
    if prefix := re.fullmatch(r"(\D+)\d+", value):
        alike = {token for token in alike if token.startswith(prefix[1])}
    return sorted(alike)


def put(steps: Sequence[PlantedStep], place: int, *new: PlantedStep) -> tuple[PlantedStep, ...]:
    """Replace one step by others."""
    return (*steps[:place], *new, *steps[place + 1 :])


def changed(call: ReplayCall, name: str, value: object) -> ReplayCall:
    """Return a call with another value for one argument."""
    return replace(call, arguments={**call.arguments, name: value})


def skip_lookup(case: Case) -> Iterator[Planted]:
    """Skip the look-up that alone shows a value, and guess the value.

    A value that appears nowhere is a fabricated fact as well. Skipping one of several look-ups with the same tool
    leaves the search incomplete.
    """
    entries = list(case.calls())
    counts = Counter(call.tool for _, _, call in entries)
    for place, number, lookup in entries:
        if lookup.tool in case.tools.writes | case.tools.handovers:
            continue
        search = ("incomplete_search",) if counts[lookup.tool] > 1 else ()
        remainder = case.words + "".join(case.performance.results[:number] + case.performance.results[number + 1 :])
        for later, _, write in (entry for entry in case.writes() if entry[0] > place):
            for name, value in write.arguments.items():
                visible = [leaf for leaf in leaves(value) if leaf in case.performance.results[number] and len(leaf) > 1]
                if isinstance(value, list | dict) or not visible or str(value) in remainder:
                    continue
                for guess in guesses(case, name, value):
                    steps = put(case.steps, later, changed(write, name, guess))
                    guessed = () if str(guess) in remainder else ("fabricated_fact",)
                    yield Planted(put(steps, place), number_of(steps, later) - 1, (*search, *guessed))
            # Or the look-up decides which operation is right.
            if set(map(str, lookup.arguments.values())) & set(map(str, write.arguments.values())):
                for tool in case.tools.alike(write):
                    steps = put(case.steps, later, replace(write, tool=tool))
                    yield Planted(put(steps, place), number_of(steps, later) - 1, search)


def guesses(case: Case, name: str, value: object) -> list[object]:
    """Return other values of the same sort for the argument, or else values slightly off."""
    pool = [entry for entry in case.tools.values.get(name, []) if type(entry) is type(value) and entry != value]
    pool = [entry for entry in pool if shape(entry) == shape(value)] or pool
    return case.rng.sample(pool, min(3, len(pool))) or list(off(value))


def off(value: object) -> Iterator[object]:
    """Yield values near one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value + 1, value + 7, value * 3)
    if isinstance(value, str) and (digit := re.search(r"\d(?!.*\d)", value)):
        yield f"{value[: digit.start()]}{(int(digit[0]) + 3) % 10}{value[digit.end() :]}"


def other_record(case: Case) -> Iterator[Planted]:
    """Make a change on another visible record than the intended one."""
    for place, number, write in case.writes():
        for name, value in write.arguments.items():
            if case.tools.names_record(name, value):
                for sibling in siblings(value, case.view(number))[:4]:
                    yield Planted(put(case.steps, place, changed(write, name, sibling)), number)


def value_off(case: Case) -> Iterator[Planted]:
    """Change a value that the user gave to one that appears nowhere. If it names a record, it is an invented name,
    too."""
    for place, number, write in case.writes():
        for name, value in write.arguments.items():
            if case.tools.names_record(name, value) or isinstance(value, list | dict | bool) or len(str(value)) < 2:
                continue
            if str(value) not in case.words:
                continue
            for wrong in (*off(value), *guesses(case, name, value)):
                if str(wrong) not in case.view(number):
                    accepted = ("fabricated_fact",) if name in case.tools.keys else ()
                    yield Planted(put(case.steps, place, changed(write, name, wrong)), number, accepted)


def left_out(case: Case) -> Iterator[Planted]:
    """Leave out one of several changes, after its record was looked up, and make the later ones."""
    writes = case.writes()
    for place, number, write in case.rng.sample(writes[:-1], len(writes[:-1])):
        if not case.is_grounded(number, write):
            continue
        before = place - 1 if place and case.steps[place - 1] == request_of(case.steps[place]) else place
        yield Planted((*case.steps[:before], *case.steps[place + 1 :]), None)


def request_of(step: PlantedStep) -> str | None:
    """Return the sentence in which the agent asks the user to use one of the user's tools."""
    return f"Please do this: {step.tool}." if isinstance(step, ReplayCall) and step.by == "user" else None


def added(case: Case) -> Iterator[Planted]:
    """Add a change that nobody asked for, on another visible record.

    Records that are looked up or changed later are left out: changing them would be a decision without its look-up.
    """
    for place, number, write in case.writes():
        later = {
            leaf for step in case.steps[place + 1 :] if isinstance(step, ReplayCall) for leaf in leaves(step.arguments)
        }
        if write.by == "assistant":
            for name, value in write.arguments.items():
                if case.tools.names_record(name, value):
                    for sibling in [peer for peer in siblings(value, case.view(number)) if peer not in later][:4]:
                        yield Planted(put(case.steps, place, write, changed(write, name, sibling)), number + 1)


def swapped(case: Case) -> Iterator[Planted]:
    """Carry out another operation with the same arguments."""
    for place, number, write in case.writes():
        for tool in case.tools.alike(write):
            yield Planted(put(case.steps, place, replace(write, tool=tool)), number)


def handed_over(case: Case) -> Iterator[Planted]:
    """Transfer the user to a human instead of making a change and everything after it.

    If the step was the user's own, it was then never asked for.
    """
    for place, number, write in case.writes():
        for tool in sorted(case.tools.handovers):
            summary = dict.fromkeys(case.tools.arguments[tool], "The user needs help with the rest.")
            start = place - 1 if place and case.steps[place - 1] == request_of(write) else place
            steps = (*case.steps[:start], ReplayCall(tool, summary), "You are being transferred.")
            yield Planted(steps, number, ("missing_write",) if write.by == "user" else ())


def stopped(case: Case) -> Iterator[Planted]:
    """Say goodbye before a change whose record was looked up, and skip everything after it."""
    turns = [place for place, step in enumerate(case.steps) if isinstance(step, str)]
    for place, number, write in case.writes():
        if not case.is_grounded(number, write):
            continue
        start = place - 1 if place and case.steps[place - 1] == request_of(write) else place
        later = [CLOSING for turn in turns if turn >= place] or [CLOSING]
        yield Planted((*case.steps[:start], *later), None)


def unsaid(case: Case) -> Iterator[Planted]:
    """Leave the required content out of the answer."""
    if case.owed:
        last = max((place for place, step in enumerate(case.steps) if isinstance(step, str)), default=len(case.steps))
        yield Planted(put(case.steps, last, CLOSING), None)


def number_of(steps: Sequence[PlantedStep], place: int) -> int:
    """Return the number of the call at a place."""
    return sum(isinstance(step, ReplayCall) for step in steps[:place])


CLASSES: dict[str, tuple[Callable[[Case], Iterator[Planted]], tuple[str, ...]]] = {
    "look-up skipped": (skip_lookup, ("missing_lookup",)),
    "other record": (other_record, ("wrong_record",)),
    "value off": (value_off, ("wrong_argument",)),
    "change left out": (left_out, ("missing_write",)),
    "change added": (added, ("extra_write",)),
    "operation swapped": (swapped, ("wrong_operation",)),
    "handed over": (handed_over, ("over_escalation",)),
    "stopped early": (stopped, ("premature_stop", "missing_write")),
    "answer without the value": (unsaid, ("missing_information",)),
}
"""Name -> the class and its right causes, the intended one first."""
REFUSABLE = ("look-up skipped", "value off")
"""Classes whose call a tool may refuse."""
