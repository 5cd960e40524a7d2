"""Which adapter acts on which task: retrieval, a classifier over label tokens, and the base as a route.

A router sees the opening of a test task and examples of known route: openings of each capability's environment
(training split), and openings of the discovery tasks that the base passed, whose route is the base. It never sees a
test outcome. Paper section 3.4.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import pandas as pd
from pydantic import Field

from captrain.contract import Target
from captrain.records import Message, Rollout, Task
from captrain.spec import Component, build

BASE = "base"
EXAMPLES = 100
"""Openings of each environment that a router knows."""


@dataclass(frozen=True)
class Example:
    """An opening whose route is known."""

    text: str
    route: str


class Router(Protocol):
    """Chooses a route for each opening."""

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """One of the examples' routes, or "base", for each opening."""
        ...


def opening(messages: Sequence[Message]) -> str:
    """What the user says before the agent's first turn; an assistant's greeting before that is no turn."""
    said = []
    for message in messages:
        if message["role"] == "assistant" and said:
            break
        if message["role"] == "user":
            said.append(message["content"])
    return " ".join(said)


def examples(targets: dict[str, Target], count: int, passed: Sequence[Rollout]) -> list[Example]:
    """Examples of every route: `count` openings of each environment, and those of passed base rollouts.

    Args:
        targets: capability -> its environment.
        count: openings per environment; opening a task costs no rollout.
        passed: rollouts of the base on the discovery split, of which the passed ones are used.
    """
    found = [
        Example(text, capability)
        for capability, target in targets.items()
        for text in openings(target, target.tasks("training", count))
    ]
    return found + [Example(opening(r.messages), BASE) for r in passed if r.outcome == "passed"]


def openings(benchmark: Target, tasks: Sequence[Task]) -> list[str]:
    """The openings of tasks."""
    found = []
    for task in tasks:
        episode = benchmark.open(task)
        found.append(opening(episode.messages))
        episode.close()
    return found


class Neighbours:
    """The nearest examples by TF-IDF over words and word pairs; numbers are left out: they name, they do not ask."""

    def __init__(self, known: Sequence[Example], count: int) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.known, self.count = list(known), count
        self.vectorizer = TfidfVectorizer(token_pattern=r"[A-Za-z][A-Za-z'-]+", ngram_range=(1, 2))
        self.matrix: Any = self.vectorizer.fit_transform([example.text for example in self.known])

    def of(self, text: str) -> list[tuple[float, Example]]:
        """(cosine similarity, example), nearest first; ties in the order of the examples."""
        asked: Any = self.vectorizer.transform([text])
        similarity = (self.matrix @ asked.T).toarray()[:, 0]
        nearest = sorted(range(len(self.known)), key=lambda i: (-round(similarity[i], 9), i))[: self.count]
        return [(float(similarity[i]), self.known[i]) for i in nearest]


class RetrievalRouter:
    """The route with the largest summed similarity among the nearest examples; the base where nothing is similar.

    Args:
        neighbours: how many examples vote.
    """

    def __init__(self, model: Path | None = None, *, neighbours: Annotated[int, Field(ge=1)]) -> None:
        self.neighbours = neighbours

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`."""
        if not examples:
            return [BASE] * len(openings)
        index = Neighbours(examples, self.neighbours)
        routes = []
        for text in openings:
            votes: dict[str, float] = {}
            for similarity, example in index.of(text):
                if similarity > 0:
                    votes[example.route] = votes.get(example.route, 0.0) + similarity
            routes.append(max(votes, key=lambda route: round(votes[route], 9)) if votes else BASE)
        return routes


class ClassifierRouter:
    """The base model itself as a classifier: the routes of the nearest examples are offered as letters, and the
    letter with the highest next-token probability wins.

    Args:
        model: folder of the base model.
        neighbours: examples shown, and the routes offered are theirs, the base always among them.
    """

    def __init__(self, model: Path, *, neighbours: Annotated[int, Field(ge=1)]) -> None:
        self.model, self.neighbours = model, neighbours

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`."""
        if not examples:
            return [BASE] * len(openings)
        import torch

        from captrain.policies.local import LocalPolicy

        policy = LocalPolicy(self.model, temperature=1.0, max_turns=1, max_tokens=1)
        chat, decoder = policy.chat([]), policy.decoder("")
        index = Neighbours(examples, self.neighbours)
        routes = []
        for text in openings:
            near = [example for _, example in index.of(text)]
            offered = sorted({example.route for example in near} - {BASE}) + [BASE]
            letters = [chr(ord("A") + i) for i in range(len(offered))]
            prompt = chat.prompt([{"role": "user", "content": classifier_prompt(near, offered, letters, text)}])
            decoder.reset(1)
            logits = decoder.forward(torch.tensor([prompt[-policy.room :]]))[0]
            routes.append(offered[int(logits[[chat.encode(letter)[0] for letter in letters]].argmax())])
        return routes


def classifier_prompt(near: Sequence[Example], offered: list[str], letters: list[str], text: str) -> str:
    """The question put to the classifier: the routes as letters, the nearest examples solved, and the new task."""
    letter = dict(zip(offered, letters, strict=True))
    routes = "\n".join(f"{letter[route]}: {'none' if route == BASE else re.sub('_', ' ', route)}" for route in offered)
    shown = "\n".join(f"Task: {example.text}\nAnswer: {letter[example.route]}" for example in reversed(near))
    return f"Which skill does the task need?\n{routes}\n{shown}\nTask: {text}\nAnswer:"


def route_tasks(
    component: Component, model: Path, targets: dict[str, Target], rollouts: Sequence[Rollout], benchmark: Target,
    tasks: Sequence[Task],
) -> pd.DataFrame:  # fmt: skip
    """The route of every task by each router.

    Args:
        component: the configured router, whose choices are the column `chosen`.
        model: folder of the base model.
        targets: capability -> its environment.
        rollouts: of the base, on the discovery split.
        benchmark: where the tasks are from.
        tasks: to be routed.

    Returns:
        Columns task, kind, retrieval, classifier, chosen; one row a task. The routers that were not configured are
        there for comparison, with the configured one's number of neighbours.
    """
    known, texts = examples(targets, EXAMPLES, rollouts), openings(benchmark, tasks)
    chosen = build(component, model=model)
    others = {"retrieval": RetrievalRouter, "classifier": ClassifierRouter}
    table = pd.DataFrame({"task": [task.id for task in tasks], "kind": [task.data.get("kind", "") for task in tasks]})
    for name, router in others.items():
        table[name] = router(model, neighbours=chosen.neighbours).route(known, texts)
    table["chosen"] = chosen.route(known, texts)
    return table
