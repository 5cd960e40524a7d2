"""An adversary for tasksets with one answer per task: predicts answers from the prompt, and searches for texts that
earn reward.

It fits on some tasks and measures on others. Fitted rules are those of `guesses` (a choice by place, number, length
or words, and a decision tree over these), frequent answers, and the answer of the most similar prompt. It also tries
texts without an answer, and varies those that earn most. If the taskset's data contains the right answers, it also
measures what a hedged, shortened or shuffled answer earns.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean, pstdev

from captrain.contract import CheckedEnvironment, closing_episodes
from captrain.environments.adversary import SURE, Exploit, halved
from captrain.environments.checks import CHANCE, GAIN, ROUNDING
from captrain.environments.guesses import SELECTORS, Rule, fitted, nearest_task
from captrain.environments.probes import content, drawn_words, say
from captrain.environments.views import Candidate, Choice
from captrain.records import CheckResult, JsonObject, Message, Split, Task, leaves
from captrain.run import EnvironmentSettings

SPLITS: tuple[tuple[Split, int], ...] = (("training", 30), ("discovery", 30))
"""Split and maximum number of tasks for fitting scripts, and for measuring the best of them."""
ROUNDS = ((2, 12), (6, 4), (15, 3))
"""Successive halving: number of tasks that each script has played by the end of a round, and number of scripts that
continue."""
RESERVED = 1 / 3
"""Share of the time that is reserved for measuring."""
WRAPPED = {
    "as it is": "{}",
    "in \\boxed{}": "\\boxed{{{}}}",
    "in <answer> tags": "<answer>{}</answer>",
    "behind <think></think> in <answer> tags": "<think></think><answer>{}</answer>",
    "behind ####": "#### {}",
    'behind "Answer:"': "Answer: {}",
    'as {"answer": ""}': '{{"answer": "{}"}}',
    "in a block of code": "```\n{}\n```",
    "in <final_answer> tags": "<final_answer>{}</final_answer>",
}
"""Formats of an answer by name. The names continue the name of a text."""
NAMED = ("yes", "no", "true", "false", "Yes", "No", "True", "False", "none", "unknown")
CONSTANTS = [*"ABCDEFGH", *map(str, range(11)), *NAMED]
"""Answers that are tried on every task."""
OPTIONS = [*"ABCDEFGH", *map(str, range(1001)), "yes", "no", "true", "false", "none"]
LABELS = 12
"""Number of most frequent answers that are tried on every task."""
LIKELY = 16
"""Number of rules that are played if right answers are known: those that are right most often."""
DECOYS = 8
"""Number of other tasks' answers around a hedged one."""
LEAST_LENGTH = 3
"""Minimum length of an answer whose first character alone counts as a wrong answer."""
LONGEST_SHOWN = 200
SOLVING = 0.5
"""Minimum mean reward of the field in the data that is taken for the answers."""

STORED, OTHER = "reward of the stored answer", "reward of another task's answer"
PREDICTED, EMPTY = "reward of predicted answers", "reward of texts without an answer"
MISTAKEN = "reward of wrong answers made from the right one"
"""Names of the checks."""

Text = Callable[[Choice], str | None]
"""Returns the answer to a task; None if the script does not apply to the task."""


def _tokens(pattern: str, view: Choice) -> list[Candidate]:
    found = dict.fromkeys(one for text in view.told for one in re.findall(pattern, text))
    return [Candidate(value, place) for place, value in enumerate(found)]


POOLS = {
    "number": r"-?\d+(?:[.,]\d+)*",
    "word": r"[^\W\d_]+",
    "line": r"[^\n]*\S[^\n]*",
    "quotation": r"[\"'`“]([^\"'`“”\n]{1,80})[\"'`”]",
    "option": r"(?:^|[\s(])([A-H])(?=[).:])",
    "name behind a preposition": r"\b(?:of|to|in|for|from|is) ([A-Z]\w+)",
}
"""Patterns of spans of the prompt that a rule can choose from, by the name of a span."""


def _span(rule: Rule, pool: str, view: Choice) -> str | None:
    candidates = _tokens(POOLS[pool], view)
    return rule.pick(replace(view, candidates=candidates)) if candidates else None


def _span_name(rule: str, pool: str) -> str:
    for selector, place in (("the one with the smallest place", "first"), ("the one with the largest place", "last")):
        rule = f"the {place} {pool} of the prompt" if rule == selector else rule
    return rule.replace("the one", f"the {pool}").replace("of those shown", f"of the {pool}s")


SPANS = [Rule(_span_name(rule.name, pool), partial(_span, rule, pool)) for pool in POOLS for rule in SELECTORS]
"""Rules that copy a span of the prompt."""


@dataclass
class Quiz:
    """A taskset that scores single answers, each once.

    Attributes:
        end: value of `time.monotonic` after which nothing more is scored.
    """

    target: CheckedEnvironment
    end: float
    openings: dict[str, list[Message]] = field(default_factory=dict)
    rewards: dict[tuple[str, str], float] = field(default_factory=dict)

    def opening(self, task: Task) -> list[Message]:
        """Return the messages with which a task begins."""
        if task.id not in self.openings:
            episode = self.target.open(task)
            with closing_episodes([episode]):
                self.openings[task.id] = list(episode.messages)
        return self.openings[task.id]

    def reward(self, task: Task, text: str) -> float | None:
        """Return the reward of an answer; None if it is unknown and no time is left."""
        if (task.id, text) not in self.rewards:
            if time.monotonic() > self.end:
                return None
            record = [*self.opening(task), say(text)]
            self.rewards[task.id, text] = self.target.score(task, record).reward
        return self.rewards[task.id, text]

    def stored(self, task: Task) -> dict[str, str]:
        """Return the fields of a task's data that the prompt does not show, if the taskset reveals them."""
        ask: Callable[[JsonObject], JsonObject] | None = getattr(self.target.environment, "hidden", None)
        data = self.target.call("hidden", task.id, lambda: ask(task.model_dump())) if ask else {}
        return {name: ", ".join(leaves(value)) for name, value in data.items() if [*leaves(value)]}


class Answerer:
    """Scripts for one taskset, fitted on some of its tasks.

    Args:
        quiz: the taskset.
        fitting: tasks to fit on.
        measuring: other tasks, to measure on.
        seed: seed of all draws.
    """

    def __init__(self, quiz: Quiz, fitting: Sequence[Task], measuring: Sequence[Task], seed: int) -> None:
        self.quiz, self.fitting, self.measuring, self.seed = quiz, fitting, measuring, seed
        self.views = {task.id: self._view(task) for task in (*fitting, *measuring)}
        self.known: dict[str, str] = {}
        """Task id -> right answer, for tasks whose data contains it."""
        self.format = "as it is"
        self._learn_answers()
        self.views = {name: replace(view, right=self.known.get(name, "")) for name, view in self.views.items()}

    def _view(self, task: Task) -> Choice:
        told = [content(message) for message in self.quiz.opening(task)]
        return Choice(task, "", {"length of the prompt": len("".join(told))}, "", [], told, [])

    def _learn_answers(self) -> None:
        """Find the field of the data and the format that earn most as an answer."""
        stored = {task.id: self.quiz.stored(task) for task in (*self.fitting, *self.measuring)}
        names = dict.fromkeys(name for task in self.fitting for name in stored[task.id])

        def said(name: str, wrap: str, view: Choice) -> str | None:
            value = stored[view.task.id].get(name)
            return None if value is None else WRAPPED[wrap].format(value)

        for wraps in (["as it is"], [wrap for wrap in WRAPPED if wrap != "as it is"]):
            ways = {f"{name} {wrap}": (name, wrap) for wrap in wraps for name in names}
            found = self.search({words: partial(said, *way) for words, way in ways.items()})
            if found and found[0].mean >= SOLVING:
                name, self.format = ways[found[0].name]
                self.known = {task: fields[name] for task, fields in stored.items() if name in fields}
                break

    # Playing.

    def search(self, scripts: Mapping[str, Text]) -> list[Exploit]:
        """Return the scripts that earn most on the tasks for fitting, by successive halving."""
        return halved(scripts, self.fitting, lambda task, one: self.play(scripts[one.name], task, one), ROUNDS)

    def play(self, script: Text, task: Task, exploit: Exploit) -> None:
        """Give a script's answer to a task and record its reward. Skip a task that was already played."""
        text = None if task.id in exploit.rewards else script(self.views[task.id])
        if text is not None and (reward := self.quiz.reward(task, text)) is not None:
            exploit.rewards[task.id] = reward
            exploit.deeds[task.id] = [text[:LONGEST_SHOWN] if text.strip() else repr(text)]

    def measured(self, scripts: Mapping[str, Text]) -> Exploit | None:
        """Play scripts on the tasks for measuring. Return the one with the highest lower bound, or None."""
        found = [Exploit(name) for name in scripts]
        for one in found:
            for task in self.measuring:
                self.play(scripts[one.name], task, one)
        return max((one for one in found if one.rewards), key=lambda one: one.least, default=None)

    # Scripts.

    def formatted(self, text: Text) -> Text:
        """Put the answers of a script into the format in which the taskset's own answers earn reward."""

        def said(view: Choice) -> str | None:
            value = text(view)
            return None if value is None else WRAPPED[self.format].format(value)

        return said

    @cached_property
    def answers(self) -> list[str]:
        """The known answers of the tasks for fitting, most frequent first."""
        counts = Counter(self.known[task.id] for task in self.fitting if task.id in self.known)
        return [answer for answer, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]

    def predictions(self) -> dict[str, Text]:
        """Return scripts that predict the answer from the prompt without doing the task, by name."""
        rules = self._rules()
        scripts = {f"answering {rule.name}": self.formatted(rule.pick) for rule in rules}
        views = [self.views[task.id] for task in self.fitting]

        def worth(rule: Rule, view: Choice) -> float:
            text = scripts[f"answering {rule.name}"](view)
            paid = None if text is None else self.quiz.rewards.get((view.task.id, text))
            return paid if paid is not None else float(bool(view.right) and rule.pick(view) == view.right)

        likely = sorted(rules, key=lambda rule: -sum(worth(rule, view) for view in views))[
            : LIKELY if self.known else None
        ]
        best = [
            one.name
            for one in self.search({f"answering {rule.name}": scripts[f"answering {rule.name}"] for rule in likely})
        ]
        tree = fitted(views, lambda _: rules, worth)
        return {**{name: scripts[name] for name in best[:2]}, f"answering {tree.name}": self.formatted(tree.pick)}

    def _rules(self) -> list[Rule]:
        """List the rules that predict an answer: frequent ones, the most similar prompt's, and spans of the prompt."""
        constants = dict.fromkeys([*self.answers[:LABELS], *CONSTANTS])
        rules = [Rule(f"{text!r} always", partial(_always, text)) for text in constants]
        if self.known:
            rules.append(Rule("as the most similar prompt is answered", self._nearest))
        return [*rules, *SPANS]

    def _nearest(self, view: Choice) -> str | None:
        """Return the answer of the most similar prompt among those to fit on."""
        other = nearest_task([self.views[task.id] for task in self.fitting if task.id in self.known], view)
        return other and other.right

    def texts(self) -> dict[str, Text]:
        """Return scripts whose text has no answer, or all answers, by name."""
        many = ", ".join(self.answers[:200])
        letters = Counter("".join(self.answers) or "etaoinshrdlu etaoin")
        length = round(fmean(map(len, self.answers))) if self.answers else 20
        total = letters.total()
        spread = "".join(letter * max(1, round(count * length / total)) for letter, count in letters.most_common())
        filler = drawn_words(random.Random(f"{self.seed}/filler"), (), 20_000)
        scripts: dict[str, Text] = {
            "all options and numbers to 1000": partial(_said, " ".join(OPTIONS)),
            "all option letters": partial(_said, "A, B, C, D, E, F, G, H"),
            "all option letters, one in a line": partial(_said, "\n".join("ABCDEFGH")),
            "yes and no, true and false": partial(_said, "yes no true false"),
            "the prompt": lambda view: "\n".join(view.told),
            "the prompt in capital letters": lambda view: "\n".join(view.told).upper(),
            "the prompt in small letters": lambda view: "\n".join(view.told).lower(),
            "all numbers of the prompt": partial(_all_of, "number"),
            "all words of the prompt": partial(_all_of, "word"),
            "all lines of the prompt as a list": lambda view: "- " + "\n- ".join("\n".join(view.told).splitlines()),
            "nothing": partial(_said, ""),
            "blanks": partial(_said, "   \n\n\t  "),
            "capital letters": partial(_said, "ANSWER"),
            "a few words": partial(_said, "The answer is as follows."),
            "steps without content": partial(_said, "Step 1: First.\nStep 2: Second.\nStep 3: Therefore."),
            "a heading and a list": partial(_said, "# Answer\n\n- **First**\n- **Second**\n\n1. Third"),
            "an excuse": partial(_said, "I do not know."),
            "the alphabet": partial(_said, "abcdefghijklmnopqrstuvwxyz"),
            "frequent letters": partial(_said, spread),
            "one letter 5000 times": partial(_said, "a" * 5000),
            "a word 500 times": partial(_said, "so " * 500),
            "a long text of made-up words": partial(_said, filler),
            "a text of 50 made-up words": partial(_said, " ".join(filler.split()[:50])),
            "a text of 200 made-up words": partial(_said, " ".join(filler.split()[:200])),
        }
        if many:
            scripts["all answers of other tasks"] = partial(_said, many)
        for name, wrap in WRAPPED.items():
            scripts[f"an empty answer {name}"] = partial(_said, wrap.format(""))
            scripts[f"a made-up answer {name}"] = partial(_said, wrap.format("xyzzy"))
        scripts["every format, empty"] = partial(_said, "\n".join(wrap.format("") for wrap in WRAPPED.values()))
        return scripts

    def changed(self, scripts: Mapping[str, Text], kept: Sequence[str]) -> dict[str, Text]:
        """Return variants of the best texts: repeated, in capital letters, in other formats, and two of them joined."""
        found: dict[str, Text] = {}
        for name in kept:
            found[f"{name}, three times"] = partial(_joined, [scripts[name]] * 3)
            found[f"{name}, behind the prompt"] = partial(_joined, [lambda view: "\n".join(view.told), scripts[name]])
            found[f"{name}, in capital letters"] = partial(_upper, scripts[name])
            for wrap in WRAPPED:
                found[f"{name}, {wrap}"] = partial(_wrapped, scripts[name], wrap)
            for other in kept:
                if other != name:
                    found[f"{name}, then {other}"] = partial(_joined, [scripts[name], scripts[other]])
        return found

    def mistakes(self) -> dict[str, Text]:
        """Return scripts that turn the right answer into a wrong one; {} if right answers are unknown."""
        names = {
            "the right answer among other tasks' answers": self._hedged,
            "the letters of the right answer in the order of the alphabet": _sorted_letters,
            "the first sign of the right answer": _first_sign,
        }
        return {name: self.formatted(text) for name, text in names.items()} if self.known else {}

    def _hedged(self, view: Choice) -> str | None:
        others = [one for one in self.answers if one != view.right]
        rng = random.Random(f"{self.seed}/hedge/{view.task.id}")
        if len(others) < 2 or not view.right:
            return None
        decoys = rng.sample(others, min(DECOYS, len(others)))
        half = len(decoys) // 2
        return ", ".join([*decoys[:half], view.right, *decoys[half:]])

    def right_answer(self, view: Choice) -> str | None:
        """Return the right answer in the data; None if it is unknown."""
        return view.right or None

    def other_answer(self, view: Choice) -> str | None:
        """Return the right answer of another task; None if it is unknown."""
        rng = random.Random(f"{self.seed}/other/{view.task.id}")
        others = [self.known[task.id] for task in self.fitting if task.id in self.known]
        return rng.choice(others) if others and view.right else None


def _always(text: str, view: Choice) -> str:
    return text


_said = _always


def _all_of(pool: str, view: Choice) -> str:
    return " ".join(one.value for one in _tokens(POOLS[pool], view))


def _joined(scripts: Sequence[Text], view: Choice) -> str | None:
    texts = [text for script in scripts if (text := script(view)) is not None]
    return "\n".join(texts) if len(texts) == len(scripts) else None


def _upper(script: Text, view: Choice) -> str | None:
    text = script(view)
    return None if text is None else text.upper()


def _wrapped(script: Text, wrap: str, view: Choice) -> str | None:
    text = script(view)
    return None if text is None else WRAPPED[wrap].format(text)


def _first_sign(view: Choice) -> str | None:
    return view.right[:1] if len(view.right) >= LEAST_LENGTH else None


def _sorted_letters(view: Choice) -> str | None:
    text = "".join(sorted(view.right))
    return text if text not in (view.right, "") else None


# Checks.


def probe_answers(target: CheckedEnvironment, bounds: EnvironmentSettings, seed: int) -> list[CheckResult]:
    """Search for answers that earn reward without work, and measure the best ones on other tasks.

    A check fails if the mean reward minus `SURE` standard errors is above its bound, as in an environment. The bound is
    `hacking_reward` for a text without an answer, and `broken_reward` for a wrong answer. A prediction may earn
    `broken_reward`, or `GAIN` more than the most frequent answer or another task's answer earns.

    Args:
        target: the taskset; it is fitted on training tasks and measured on discovery tasks.
        bounds: the bounds, and `seconds`, the time limit.
        seed: decides what is drawn.
    """
    start = time.monotonic()
    fitting, measuring = (first_tasks(target, split, count) for split, count in SPLITS)
    quiz = Quiz(target, start + bounds.seconds * (1 - RESERVED))
    player = Answerer(quiz, fitting, measuring, seed)
    texts = player.texts()
    best = [one.name for one in player.search(texts)]
    predictions = player.predictions()
    texts |= player.changed(texts, best)
    found = [one.name for one in player.search({name: texts[name] for name in texts if name not in best})]
    empty = {name: texts[name] for name in (*best[:1], *found[:2])}
    late, quiz.end = time.monotonic() > quiz.end, start + bounds.seconds
    note = f"; after {bounds.seconds:g} s the search was cut short" if late else ""
    checks: list[CheckResult] = []
    chance = [player.measured({"": player.formatted(partial(_always, text))}) for text in player.answers[:1]]
    for name, text, bound in ((STORED, player.right_answer, 1.0), (OTHER, player.other_answer, CHANCE)):
        if player.known and (found := player.measured({name.removeprefix("reward of "): player.formatted(text)})):
            checks.append(exploited(name, found, bound, note))
            chance += [found] if name == OTHER else []
    likely = max((one.mean for one in chance if one), default=0.0)
    guess = round(max(bounds.broken_reward, min(CHANCE, likely + GAIN)), 3)
    for name, scripts, bound in (
        (PREDICTED, predictions, guess),
        (EMPTY, empty, bounds.hacking_reward),
        (MISTAKEN, player.mistakes(), bounds.broken_reward),
    ):
        if found := player.measured(scripts):
            checks.append(exploited(name, found, bound, note))
    return checks


def first_tasks(target: CheckedEnvironment, split: Split, count: int) -> list[Task]:
    """Return the first tasks of a split, at most `count`."""
    size = target.size(split)
    return target.tasks(split, count if size is None else min(size, count))


def exploited(name: str, found: Exploit, bound: float, note: str = "") -> CheckResult:
    """Compare the lower bound of a script's reward with `bound`, and describe the answer and its reward."""
    rewards = [*found.rewards.values()]
    error = SURE * pstdev(rewards) / len(rewards) ** 0.5
    low, high = max(0.0, found.mean - error), min(1.0, found.mean + error)
    task = max(found.rewards, key=lambda task: found.rewards[task])
    return CheckResult(
        name=name,
        passed=found.least <= bound + ROUNDING,
        measured=round(found.mean, 6),
        bound=f"at most {bound:g} after {SURE} standard errors",
        detail=f"{found.name} earns {found.mean:.2f} ({low:.2f} to {high:.2f}) on {len(rewards)} tasks{note}",
        task=task,
        deviation=round(pstdev(rewards), 6),
        script=found.deeds[task],
    )
