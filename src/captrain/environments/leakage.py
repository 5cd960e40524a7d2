"""Finds test tasks that have leaked into an environment.

Tasks of a small world share short texts: two tasks of a service desk may name the same order in the same words. So a
test task is recognised by runs of words that no other test task has, and only by enough of them. Runs in the
benchmark's source, or in its training tasks if their number is limited, do not count. A paraphrased leak is not found.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

from captrain.contract import CheckedEnvironment, calls_of
from captrain.records import Message, Task, leaves

WORDS = 8
"""Words in a run."""
SHARE = 0.5
"""Share of a test task's own runs in one place that counts as a leak."""
LEAST = 12
"""Least number of such runs (19 words in a row): fewer occur by chance in a small world."""
LEAST_ID = 6
"""Least characters of an id: shorter ones occur by chance."""


def normalised(text: str) -> str:
    """Normalise a text for comparison: NFKC, lower case, no invisible characters."""
    if text.isascii():
        return text.lower()
    visible_signs = "".join(sign for sign in unicodedata.normalize("NFKC", text) if unicodedata.category(sign) != "Cf")
    return visible_signs.lower()


def runs(text: str) -> set[str]:
    """Return the runs of words in a text."""
    words = re.findall(r"\w+", normalised(text))
    return {" ".join(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)}


def _runs_of_each(messages: Sequence[Message]) -> set[str]:
    return {run for message in messages for run in runs(message.get("content") or "")}


def runs_of(task: Task, messages: Sequence[Message]) -> set[str]:
    """Return the runs in a task's messages and data, and in the agent's texts and arguments."""
    pieces: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            pieces.append(message.get("content") or "")
            pieces += [leaf for _, arguments in calls_of(message) for leaf in leaves(arguments)]
    return _runs_of_each(messages) | runs(" ".join(leaves(task.data))) | runs(" ".join(pieces))


class HeldOutTasks:
    """The test tasks of a benchmark, and the runs by which each is recognised.

    Args:
        benchmark: the target.
        tasks: its test tasks.
        common_texts: texts whose runs do not count.
        training: training tasks, whose runs do not count either.
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
        """Return the largest share of a test task's own runs, and the test task; (0, "") if there are too few runs."""
        hits = Counter(body for run in runs_there for body in self._bodies_by_run.get(run, ()))
        shares = [(hit / self._sizes[body][1], self._sizes[body][0]) for body, hit in hits.items() if hit >= LEAST]
        return max(shares, default=(0.0, ""))

    def quoted_id(self, text: str) -> str:
        """Return the id of a test task that a text has as a whole word, or ""."""
        text = normalised(text)
        for name in self.ids:
            same = normalised(name)
            is_quoted = len(name) >= LEAST_ID and not name.isdigit() and same in text
            if is_quoted and re.search(rf"(?<![\w/]){re.escape(same)}(?![\w/])", text):
                return name
        return ""
