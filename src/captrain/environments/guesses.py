"""Rules that predict a step from what is visible without its look-ups.

If a rule is right in many tasks, an agent can earn reward without the capability. A `Rule` picks a value for a task:

- a candidate by its rank in some order, such as the largest number (`SELECTORS`, `RECORDED`)
- a candidate with a certain text in its value or its record (`rules_by_mark`)
- the same value in every task (`labels_of`, `constants_of`)
- a number computed from the visible ones (`rules_by_arithmetic`)
- the right answer of the most similar task (`nearest_answer`)

`rules_of` lists the rules that a decision tree may use, and `fitted` builds the tree greedily.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

from captrain.environments.probes import shape, words
from captrain.environments.views import Candidate, Choice, number_in
from captrain.environments.worded import ANSWER

DEPTH, GAINED = 3, 1
"""Depth of the decision tree, and the gain in tasks that a split or a mark must exceed."""
FIELDS = 4
"""Maximum number of numbers, and of texts, of a candidate's record that get a rule each."""
MARKS = 16
"""Maximum number of rules that pick the candidate with a certain text."""


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


def is_right(rule: Rule, view: Choice) -> float:
    """Return 1 if a rule picks the right value, else 0."""
    return float(rule.pick(view) == view.right)


# Candidates by rank in an order.


def _distance_from_told(one: Candidate, view: Choice) -> int:
    """Return the distance of the candidate's number from the closest number that is told."""
    numbers = [int(number) for text in view.told for number in re.findall(r"\d{1,15}", text)]
    return min((abs(one.number - number) for number in numbers), default=0)


def _place_from_told(place: int, one: Candidate, view: Choice) -> int:
    """Return the candidate's position minus a number in the last told text, modulo the number of candidates."""
    numbers = [int(number) for text in view.told[-1:] for number in re.findall(r"\d{1,15}", text)]
    return (one.place - (numbers[place] if -len(numbers) <= place < len(numbers) else 0)) % len(view.candidates)


def _number_of_record(place: int, one: Candidate, view: Choice) -> int:
    """Return the number at index `place` of the candidate's record; 0 if there is none."""
    return one.numbers[place] if place < len(one.numbers) else 0


def _text_of_record(place: int, one: Candidate, view: Choice) -> str:
    """Return the text at index `place` of the candidate's record; "" if there is none."""
    return one.record[place] if place < len(one.record) else ""


def _likeness_of_record(one: Candidate, view: Choice) -> int:
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
    "distance from a number that is told": _distance_from_told,
    "place counted from a number that is told": partial(_place_from_told, -1),
    "place counted from the last number but one that is told": partial(_place_from_told, -2),
    "place counted from the last number but two that is told": partial(_place_from_told, -3),
    "place counted from the first number that is told": partial(_place_from_told, 0),
}
"""Sort keys of candidates, by name."""
RECORDED: dict[str, Order] = {
    **{f"number {place + 1} in its record": partial(_number_of_record, place) for place in range(FIELDS)},
    **{f"text {place + 1} in its record": partial(_text_of_record, place) for place in range(FIELDS)},
    "likeness of its record to the others": _likeness_of_record,
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


def _comparable(key: int | str) -> tuple[int, str]:
    """Make numbers and texts comparable: numbers by size, texts by spelling."""
    return (key, "") if isinstance(key, int) else (0, key)


def _ranked(place: float, last: bool, order: Order, view: Choice) -> str | None:
    """Return the candidate at a rank of `RANKS` in an order; None if there are no candidates."""
    keys = {one.value: order(one, view) for one in view.candidates}
    ranked = sorted(keys, key=lambda value: _comparable(keys[value]), reverse=last)
    index = int(place * len(ranked)) if 0 < place < 1 else int(place)
    return ranked[min(index, len(ranked) - 1)] if ranked else None


def _selectors(properties: Mapping[str, Order]) -> list[Rule]:
    """Return one rule for each order and rank."""
    return [
        Rule(f"the one with the {rank} {name}", partial(_ranked, *end, key))
        for name, key in properties.items()
        for rank, end in RANKS.items()
    ]


def _at_place(place: int, view: Choice) -> str | None:
    """Return the candidate at index `place`; None if there are fewer."""
    return view.candidates[place].value if place < len(view.candidates) else None


SELECTORS = _selectors(PROPERTIES)
SELECTORS += [Rule(f"number {place + 1} of those shown", partial(_at_place, place)) for place in range(1, 5)]


# Candidates by mark: a text in the value or the record.


PARTS = {
    "the first sign": slice(1),
    "the first two signs": slice(2),
    "all but the last sign": slice(-1),
    "the last sign": slice(-1, None),
    "all but the first sign": slice(1, None),
}
"""Parts of a value. Careless code may accept a part as the value, or a part may reveal the right value."""


def _marks(one: Candidate) -> set[tuple[str, str]]:
    """Return the texts by which a candidate can be recognised: parts of its value, and its record."""
    parts = {(f"as {name}", one.value[part]) for name, part in PARTS.items()}
    return parts | {("in its record", text) for text in one.record}


def _with_mark(mark: tuple[str, str], view: Choice) -> str | None:
    """Return the first candidate with a text, else the first candidate; None if there are no candidates."""
    found = [one for one in view.candidates if mark in _marks(one)] or view.candidates
    return found[0].value if found else None


def rules_by_mark(views: Sequence[Choice]) -> list[Rule]:
    """Return rules that pick the candidate with a certain text, for texts more frequent in right candidates."""
    more: defaultdict[tuple[str, str], float] = defaultdict(float)
    for view in views:
        for one in view.candidates:
            for mark in _marks(one):
                more[mark] += float(one.value == view.right) - 1 / len(view.candidates)
    best = sorted((mark for mark in more if more[mark] > GAINED), key=lambda mark: (-more[mark], mark))[:MARKS]
    return [Rule(f'the one with "{mark[1]}" {mark[0]}', partial(_with_mark, mark)) for mark in best]


# The same value in every task.


def constant(label: str, view: Choice) -> str | None:
    """Return the same value in every task."""
    return label


def labels_of(views: Sequence[Choice]) -> list[str]:
    """List the distinct right values, most frequent first; none if they are many, unless all are tools."""
    counts = Counter(view.right for view in views)
    few = len(counts) <= max(2, len(views) / 4) or all(view.key == "tool" for view in views)
    return [label for label, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))] if few else []


def constants_of(views: Sequence[Choice]) -> list[str]:
    """List the most frequent answer in words, and the one in the middle by number: rewards may pay for being near."""
    rights = sorted((view.right for view in views if view.key == ANSWER), key=lambda right: (number_in(right), right))
    often = Counter(rights).most_common(1)
    return list(dict.fromkeys([*(right for right, _ in often), *rights[len(rights) // 2 :][:1]]))


# Computed numbers.


def told_numbers(view: Choice) -> list[int]:
    """List the numbers in the last told text."""
    return [int(number) for text in view.told[-1:] for number in re.findall(r"\d{1,9}", text)]


def _shown_records(view: Choice) -> int:
    """Count the values of the most frequent shape in the results, such as the ids of a list."""
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


def _calculated(number: Callable[[Choice], int], factor: float, added: int, view: Choice) -> str | None:
    """Write a number as the right answer is written: 4000 becomes "$40.00" if that is "$30.00"."""
    found, places = round(number(view) * factor) + added, re.search(r"\d\.(\d+)", view.right)
    text = f"{found / 10 ** len(places[1]):.{len(places[1])}f}" if places else str(found)
    return re.sub(r"\d+(?:\.\d+)?", text, view.right, count=1) if re.search(r"\d", view.right) else None


def rules_by_arithmetic(views: Sequence[Choice]) -> list[Rule]:
    """Return rules that compute a number: one of `COMPUTED`, times or plus the number that fits most tasks."""
    rules: list[Rule] = []
    for name, number in COMPUTED.items():
        pairs = [(number(view), number_in(view.right)) for view in views]
        factors = Counter(right / seen for seen, right in pairs if seen and right)
        sums = Counter(right - seen for seen, right in pairs)
        if factors:
            [(factor, _)] = factors.most_common(1)
            rules.append(Rule(f"{name}, times {factor:g}", partial(_calculated, number, factor, 0)))
            [(added, _)] = sums.most_common(1)
            rules.append(Rule(f"{name}, plus {added}", partial(_calculated, number, 1.0, added)))
    return rules


# The most similar task.


@lru_cache(maxsize=256)
def _vocabulary(texts: Sequence[str]) -> frozenset[str]:
    return frozenset(word.lower() for text in texts for word in words(text))


def vocabulary_of(view: Choice) -> frozenset[str]:
    """Return the words of the told texts, in lower case."""
    return _vocabulary(tuple(view.told))


def nearest_task(views: Sequence[Choice], view: Choice) -> Choice | None:
    """Return the other task whose told texts share most words with those of a task."""
    own = vocabulary_of(view)

    def likeness(other: Choice) -> float:
        heard = vocabulary_of(other)
        return len(own & heard) / max(1, len(own | heard))

    return max((other for other in views if other.task.id != view.task.id), key=likeness, default=None)


def nearest_answer(views: Sequence[Choice], view: Choice) -> str | None:
    """Return the right value of the most similar other task; None if there is no other task."""
    other = nearest_task(views, view)
    return other and other.right


# The decision tree.


def rules_of(views: Sequence[Choice]) -> list[Rule]:
    """List the rules that a tree may use: candidates by order and by mark, frequent values, and computed numbers."""
    labels = [Rule(label, partial(constant, label)) for label in labels_of(views)]
    computed = rules_by_arithmetic([view for view in views if view.key == ANSWER])
    return [*SELECTORS, *_selectors(RECORDED), *rules_by_mark(views), *labels, *computed]


def _has_word(word: str, view: Choice) -> bool:
    return word in vocabulary_of(view)


def _has_key(key: str, view: Choice) -> bool:
    return view.key == key


def _has_number(key: str, holds: Callable[[int], bool], view: Choice) -> bool:
    return holds(Candidate(str(view.arguments.get(key)), 0).number)


def traits_of(views: Sequence[Choice]) -> list[Trait]:
    """List the properties that divide tasks: words of told texts, kinds of choices, and numbers of the step."""
    heard = [vocabulary_of(view) for view in views]
    counts = Counter(word for one in heard for word in sorted(one))
    traits: list[Trait] = []
    for word, count in sorted(counts.items()):
        if 0.1 * len(views) <= count <= 0.9 * len(views):
            traits.append(Trait(f'the word "{word}"', partial(_has_word, word)))
    kinds = {view.key for view in views}
    if len(kinds) > 1:
        traits += [Trait(f"a choice of {key}", partial(_has_key, key)) for key in sorted(kinds)]
    # An argument that only one of the tools takes would tell the right tool: no agent sees it before it has chosen.
    choosing_tool = any(view.key == "tool" for view in views)
    together = set.intersection if choosing_tool else set.union
    names = [{*view.arguments} - {view.key} for view in views]
    shared = together(*names) if names else set[str]()
    for key in sorted(shared):
        numbers = sorted(Candidate(str(view.arguments.get(key)), 0).number for view in views)
        middle = numbers[len(numbers) // 2]
        traits.append(Trait(f"an odd {key}", partial(_has_number, key, lambda number: number % 2 == 1)))
        traits.append(Trait(f"a {key} from {middle} on", partial(_has_number, key, middle.__le__)))
    return traits


def _branch(trait: Trait, first: Rule, second: Rule, view: Choice) -> str | None:
    return (first if trait.holds(view) else second).pick(view)


def fitted(
    views: Sequence[Choice],
    rules_for: Callable[[Sequence[Choice]], list[Rule]] = rules_of,
    worth: Callable[[Rule, Choice], float] = is_right,
    depth: int = DEPTH,
) -> Rule:
    """Fit a decision tree of traits, with rules at its leaves. Split only if the split gains more than `GAINED`.

    Args:
        views: the tasks to fit on.
        rules_for: lists the rules for some tasks.
        worth: what a rule is worth on a task; the tree maximises the sum.
        depth: maximum number of splits between the root and a leaf.
    """
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
    return Rule(name, partial(_branch, chosen, first, second))
