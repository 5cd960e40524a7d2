"""Search for test tasks that have leaked into an environment.

Small worlds share short texts: two tasks of a service desk may name the same order in the same words. So a test task
is recognised by runs of words that no other test task has, and only by enough of them; what the benchmark's own source
says is nobody's in particular, nor is what its training tasks say, where these have an end. A leak in other words, or
one that the file hides from itself, is not found.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

from captrain.contract import CheckedEnvironment, calls_of
from captrain.records import Message, Task, leaves

WORDS = 8
"""Words of a run."""
SHARE = 0.5
"""So much of a test task's own runs, found in one place, is that test task."""
LEAST = 12
"""And at least so many, 19 words in a row: fewer are met by chance in a small world."""
LEAST_ID = 6
"""Characters of an id that is more than a number, and so cannot stand in a text by chance."""


def normalised(text: str) -> str:
    """A text as it is compared: compatibility forms (NFKC) in lower case, signs that nobody sees left out."""
    if text.isascii():
        return text.lower()
    visible_signs = "".join(sign for sign in unicodedata.normalize("NFKC", text) if unicodedata.category(sign) != "Cf")
    return visible_signs.lower()


def runs(text: str) -> set[str]:
    """The runs of words in a text."""
    words = re.findall(r"\w+", normalised(text))
    return {" ".join(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)}


def _runs_of_each(messages: Sequence[Message]) -> set[str]:
    return {run for message in messages for run in runs(message.get("content") or "")}


def runs_of(task: Task, messages: Sequence[Message]) -> set[str]:
    """The runs in a task: in its messages, its data, and what the agent does in it."""
    pieces: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            pieces.append(message.get("content") or "")
            pieces += [leaf for _, arguments in calls_of(message) for leaf in leaves(arguments)]
    return _runs_of_each(messages) | runs(" ".join(leaves(task.data))) | runs(" ".join(pieces))


class HeldOutTasks:
    """The test tasks of a benchmark, as they would be recognised.

    Args:
        benchmark: the target.
        tasks: its test tasks.
        common_texts: texts whose words are nobody's.
        training: its training tasks, whose words are as little the test's.
    """

    def __init__(
        self,
        benchmark: CheckedEnvironment,
        tasks: Sequence[Task],
        common_texts: Sequence[str] = (),
        training: Sequence[Task] = (),
    ) -> None:
        self.ids = [task.id for task in tasks]
        bodies: list[tuple[str, set[str]]] = []
        holders: dict[str, set[str]] = defaultdict(set)
        for task in tasks:
            opening = benchmark.idle(task, ())
            whole = runs_of(task, [*opening, *benchmark.reference(task)])
            bodies += [(task.id, _runs_of_each(opening)), (task.id, whole)]
            for run in whole:
                holders[run].add(task.id)
        common = {run for text in common_texts for run in runs(text)}
        for task in training:
            common |= runs_of(task, [*benchmark.idle(task, ()), *benchmark.reference(task)])
        distinctive = [(name, {run for run in body if len(holders[run]) == 1} - common) for name, body in bodies]
        self._sizes = [(name, len(body)) for name, body in distinctive]
        self._bodies_by_run: dict[str, list[int]] = defaultdict(list)
        for index, (_, body) in enumerate(distinctive):
            for run in body:
                self._bodies_by_run[run].append(index)

    def nearest(self, runs_there: set[str]) -> tuple[float, str]:
        """The largest share of a test task's own runs that is in one place, and that test task; runs too few to mean
        anything are none."""
        hits = Counter(body for run in runs_there for body in self._bodies_by_run.get(run, ()))
        shares = [(hit / self._sizes[body][1], self._sizes[body][0]) for body, hit in hits.items() if hit >= LEAST]
        return max(shares, default=(0.0, ""))

    def quoted_id(self, text: str) -> str:
        """A test task's id that stands in a text whole, and not as a part of a longer word or path, or ""."""
        text = normalised(text)
        for name in self.ids:
            same = normalised(name)
            is_quoted = len(name) >= LEAST_ID and not name.isdigit() and same in text
            if is_quoted and re.search(rf"(?<![\w/]){re.escape(same)}(?![\w/])", text):
                return name
        return ""
