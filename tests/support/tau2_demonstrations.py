"""Demonstrations of tau2 for a tiny model: the gold actions of a domain's training tasks, recorded."""

import random
import re
from collections import Counter
from pathlib import Path

from support.installations import data_beside, interpreter

from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.records import Message, Task
from captrain.run import compose_spec

CONF = Path(__file__).parents[2] / "conf"
WORDS = re.compile(r"[A-Za-z]+|[^A-Za-z]")


def tau2_settings(domain: str) -> tuple[str, ...]:
    """Return overrides: the installation, and a domain whose users read their scenarios aloud and leave."""
    python = interpreter("tau2")
    return (
        f"benchmark.domains=[{domain}]",
        "benchmark.user=null",
        f"machine.benchmarks.tau2.python={python}",
        f"machine.benchmarks.tau2.data={data_beside(python, 'tau2')}",
    )


class Tau2Demonstrations:
    """The demonstrations of a domain (see `captrain.training.base.demonstrations.Demonstrations`)."""

    def __init__(self, *, domain: str) -> None:
        spec = compose_spec("default", 0, ["benchmark=tau2", *tau2_settings(domain)], CONF)
        target = load_benchmark(spec.benchmark, spec.machine)
        tasks = target.tasks("training", sum(target.about["splits"]["training"].values()))
        self.tools = target.tools
        self.dialogues = [_play(target, task) for task in tasks]
        policy = self.dialogues[0][0][0]["content"]
        texts = [
            str(message.get("content", "")) for part in self.dialogues for messages in part for message in messages
        ]
        words = Counter(word for text in texts[1:] for word in {*WORDS.findall(text)} if len(word) > 2)
        self.phrases = [policy, *(word for word, count in words.items() if count > 1)]

    def demonstration(self, rng: random.Random) -> tuple[list[Message], list[Message]]:
        """Return a dialogue of a random training task."""
        return rng.choice(self.dialogues)


def _play(target: CheckedEnvironment, task: Task) -> tuple[list[Message], list[Message]]:
    episode = target.open(task, "0")
    messages: list[Message] = []
    for action in target.reference(task):
        replies, done = episode.step(action)
        messages += [action, *replies]
        if done:
            break
    return list(episode.messages), messages
