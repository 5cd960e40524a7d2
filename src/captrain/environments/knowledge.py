"""Solvability: what an agent can know when it acts, from request, policy and tool results.

A reference may use what the environment knows and no agent can. So the values in its calls are looked for in what it
had been shown before: as they are, as another spelling, or as a sum, difference, product or total of numbers. Only
values that cannot be guessed are asked for (with a digit or a sign): words may be the agent's own. The other way round,
a value that look-ups are to find must stand neither in the request nor always in the same place of what they show.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise, takewhile

from captrain.contract import calls_of
from captrain.environments import probes
from captrain.environments.leakage import normalised
from captrain.environments.subject import Evidence, at_most
from captrain.records import CheckResult, Message, Task, leaves

UNKNOWN = 0.3
"""Share of tasks in which a value of the reference is nowhere to be known; benchmarks of others have such tasks."""
FORBIDDEN = 0.1
"""Share of tasks whose reference does what the policy forbids."""
PREDICTED = 0.9
"""Share of tasks in which the value that look-ups are to find is known without them."""
FEWEST = 3
"""Records among which one is to be found, and tasks, from which on such a share means anything."""
NUMBERS = 60
"""Numbers shown that are computed with."""
SMALL = 31
"""Counts, days and hours may be the agent's own; a range that is shown and is no longer may be gone through."""
NEGATED = re.compile(
    r"\b(?:never|do not|don't|must not|may not|cannot|can't|not allowed to|forbidden to)\s+([^.;:!?\n]*)"
)
CONDITION = re.compile(
    r"\b(?:unless|if|before|without|until|when|whenever|that|which|who|whose|only|after|more|than|except|other|another|"
    r"any\s+other|again|twice|while|not|for)\b"
)

PLAIN_WORDS = {
    "a",
    "all",
    "an",
    "any",
    "anybody",
    "anyone",
    "anything",
    "at",
    "ever",
    "for",
    "of",
    "the",
    "their",
    "to",
}
"""Words of a prohibition that narrow nothing."""


def _text(messages: Sequence[Message]) -> str:
    return normalised("\n".join(probes.visible_text(message) for message in messages if message["role"] != "assistant"))


def _computed(value: str, visible_before: Sequence[float], text: str) -> bool:
    """Tell if a number is a sum, difference, product or share of those shown, a total, or within a short range of which
    one end is named after the other."""
    try:
        number = abs(float(value))
    except ValueError:
        return False
    near = lambda result: abs(result - number) < 0.011  # noqa: E731
    latest = [*dict.fromkeys(visible_before)][-NUMBERS:]
    if number <= SMALL or near(sum(latest)):
        return True
    if any(low <= number <= high <= low + SMALL for low, high in pairwise(visible_before)):
        return True
    pairs = combinations(latest, 2)
    if any(near(a + b) or near(abs(a - b)) or near(a * b) or near(a * b / 100) for a, b in pairs):
        return True
    # Totals are over what is listed alike: the n-th numbers of all entries of one shape.
    tables: dict[str, list[list[str]]] = {}
    for entry in re.split(r"[;\n{}\[\],]", text):
        tables.setdefault(probes.shape(entry.strip()), []).append(re.findall(r"\d{1,12}", entry))
    return any(near(sum(map(float, column))) for rows in tables.values() for column in zip(*rows, strict=True))


def is_known(value: str, text: str, numbers: Sequence[float]) -> bool:
    """Tell if an argument's value can be known from a text.

    Args:
        value: one that an argument holds.
        text: all that was shown, normalised.
        numbers: in it.
    """
    value = normalised(value)
    plain_value, plain_text = (re.sub(r"[\W_]+", "", words) for words in (value, text))
    if not re.search(r"[\d#@_]", value) or value in text or plain_value in plain_text:
        return True
    if _computed(value, numbers, text):
        return True
    if re.search(r"[#@_]|[^\W\d]\d|\d[^\W\d]", value):
        return False
    # A date or a formula in another spelling: its numbers are known one by one.
    pieces = re.findall(r"\d+(?:\.\d+)?", value)
    return bool(pieces) and all(
        re.search(rf"(?<!\d)0*{re.escape(piece.lstrip('0') or '0')}(?!\d)", text) or _computed(piece, numbers, text)
        for piece in pieces
    )


def _unknown_value(subject: Evidence, task: Task) -> str | None:
    """The first value of the reference's calls that nothing has shown by then."""
    allowed = normalised(" ".join(leaves(subject.against.tools)))
    visible_before: list[Message] = []
    for message in subject.solved(task):
        if message["role"] == "assistant":
            text = f"{_text(visible_before)} {allowed}"
            numbers = [float(number) for number in re.findall(r"\d{1,12}(?:\.\d{1,6})?", text.replace(",", ""))]
            for value in (leaf for _, arguments in calls_of(message) for leaf in leaves(arguments)):
                if not is_known(value, text, numbers):
                    return value
        visible_before.append(message)
    return None


def unknowable(subject: Evidence, name: str) -> CheckResult:
    """Tasks whose reference holds a value that the episode has not revealed."""
    first_unknown = {task.id: _unknown_value(subject, task) for task in subject.tasks}
    tasks = [task for task, value in first_unknown.items() if value is not None]
    detail = f"nothing that the agent was shown has {first_unknown[tasks[0]]!r:.60}" if tasks else ""
    return at_most(name, len(tasks) / len(first_unknown), UNKNOWN, detail, tasks[0] if tasks else "")


def _chosen(subject: Evidence, task: Task) -> tuple[str, list[str], list[str]] | None:
    """The value that the capability's step takes where its broken form takes another record's, the records among which
    it is chosen, and those that one result lists with it, in their order; None: the step is none of that kind."""
    right, wrong = probes.made_calls(subject.reference(task)), probes.made_calls(subject.broken(task))
    changed = [(a[1], b[1]) for a, b in zip(right, wrong, strict=False) if a[0] == b[0] and a[1] != b[1]]
    if len(right) != len(wrong) or len(changed) != 1:
        return None
    keys = [key for key, value in changed[0][0].items() if changed[0][1].get(key) != value]
    if len(keys) != 1:
        return None
    value, wrong_value = str(changed[0][0][keys[0]]), str(changed[0][1].get(keys[0]))
    results = [m for m in subject.solved(task) if m["role"] == "tool"]
    visible_before = list(dict.fromkeys(leaf for message in results for leaf in probes.results(message)))
    alike = [leaf for leaf in visible_before if probes.shape(leaf) == probes.shape(value)]
    lists = [[leaf for leaf in dict.fromkeys(probes.results(m)) if leaf in alike] for m in results]
    longest = max((entries for entries in lists if value in entries), key=len, default=[])
    return (value, alike, longest) if value in alike and wrong_value in alike else None


def given_before(subject: Evidence, name: str) -> CheckResult:
    """Tasks in which what look-ups are to find stands in the opening messages, or always at one end of what they
    show."""
    tasks_given: list[str] = []
    places: Counter[str] = Counter()
    choices = {task.id: choice for task in subject.tasks if (choice := _chosen(subject, task))}
    for task in subject.tasks:
        if task.id not in choices:
            continue
        value, alike, entries = choices[task.id]
        opening = takewhile(lambda message: message["role"] != "assistant", subject.solved(task))
        words = {normalised(word) for message in opening for word in probes.words(probes.visible_text(message))}
        tasks_given += [task.id] * ([leaf for leaf in alike if normalised(leaf) in words] == [value])
        if len(entries) >= FEWEST:
            places["first"] += value == entries[0]
            places["last"] += value == entries[-1]
            places["all"] += 1
    share, detail = len(tasks_given) / max(1, len(choices)), "the opening messages have what is to be looked up"
    for place in ("first", "last"):
        predicted = places[place] / max(1, places["all"])
        if places["all"] >= FEWEST and predicted > share:
            share, detail = predicted, f"what is to be looked up is the {place} that results show"
    if len(choices) < FEWEST:
        share = 0.0
    task_shown = (tasks_given or [*choices])[0] if share > PREDICTED else ""
    return at_most(name, share, PREDICTED, detail, task_shown)


def forbidden(subject: Evidence, name: str) -> CheckResult:
    """Tasks whose reference calls a tool that the policy forbids outright: "never", "do not", and all words of the
    tool's name, without a condition and with no word that its description does not have: "do not refund used goods"
    forbids no refund. Other words for it are not understood."""
    broken: dict[str, str] = {}
    functions = {tool["function"]["name"]: tool["function"] for tool in subject.against.tools}
    for task in subject.tasks:
        opening = [m for m in subject.solved(task) if m["role"] == "system"]
        clauses = [clause for clause in NEGATED.findall(_text(opening)) if not CONDITION.search(clause)]
        for tool in {call[0] for message in subject.reference(task) for call in calls_of(message)}:
            words = [word.rstrip("s") for word in _words(tool)]
            usual = _words(f"{tool} {functions.get(tool, {}).get('description', '')}") | PLAIN_WORDS
            for clause in clauses:
                narrower = {word for word in _words(clause) if not {word, word.rstrip("s")} & usual}
                if not narrower and all(re.search(rf"\b{re.escape(word)}", clause) for word in words):
                    broken[task.id] = tool
    task, tool = next(iter(broken.items()), ("", ""))
    return at_most(name, len(broken) / len(subject.tasks), FORBIDDEN, f"the policy forbids {tool}", task)


def _words(text: str) -> set[str]:
    return {word for word in re.split(r"[_\W]+", text.lower()) if word}
