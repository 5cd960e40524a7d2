"""Audit of the tasks that an adapter is trained on: they must be such as the passport has measured.

A passport looks at tasks that a key has drawn, and a file may still behave otherwise on those that training asks for:
where so many are asked for, from such a place on. So the tasks of the training itself, as it has got them, are held
against what the passport says: references earn everything there, and doing nothing or anything at random no more than
it did.
"""

import random
from collections.abc import Sequence

from captrain.contract import Target, closing_episodes
from captrain.environments.probes import random_agent
from captrain.errors import UserError
from captrain.records import Message, Passport, Score, Task, digest

AUDITED = 16
"""Tasks of a training that are looked at."""
DRIFT = 0.25
"""A mean reward over these may lie so much above what the passport has measured over its own."""
TURNS = 16
REFERENCE = "reward of the reference solution"
IDLE = "reward of doing nothing"
RANDOM = "reward of random calls"


def audit(target: Target, passport: Passport, tasks: Sequence[Task], seed: int) -> None:
    """Hold tasks of a training against the environment's passport; what this measured none of is not asked.

    Args:
        target: the environment, as it is trained in.
        passport: its passport.
        tasks: those of the training.
        seed: of the run; with passport and tasks it decides which are looked at.

    Raises:
        UserError: they deviate: nothing is trained on them.
        EnvironmentFault: the environment broke its contract.
    """
    measured = {check.name: check.measured for check in passport.checks if check.measured is not None}
    key = digest("audit", passport.environment, seed, [task.id for task in tasks])
    sample = random.Random(key).sample(list(tasks), min(AUDITED, len(tasks)))
    if not sample:
        return
    if REFERENCE in measured:
        for task in sample:
            score = target.score(task, target.play(task, target.reference(task)))
            if score.reward < 1 - 1e-9 or not score.success:
                raise _deviation(target, f"the reference of {task.id} earns {score.reward:g}", "1")
    rewards = {
        IDLE: lambda task: target.floor(task),
        RANDOM: lambda task: _at_random(target, task, random.Random(f"{key}/{task.id}")),
    }
    for name, score_of in rewards.items():
        if name in measured:
            mean = sum(score_of(task).reward for task in sample) / len(sample)
            if mean > measured[name] + DRIFT:
                raise _deviation(target, f"{name} is {mean:.2f} on {len(sample)} of them", f"{measured[name]:.2f}")


def _at_random(target: Target, task: Task, rng: random.Random) -> Score:
    agent, episode = random_agent(target.tools, rng), target.open(task)
    with closing_episodes([episode]):
        messages: list[Message] = list(episode.messages)
        for _ in range(TURNS):
            message = agent(messages)
            if message is None:
                break
            replies, is_over = episode.step(message)
            messages += [message, *replies]
            if is_over:
                break
    return target.score(task, messages)


def _deviation(target: Target, finding: str, expected: str) -> UserError:
    return UserError(
        f"environment {target.name} is another one on the tasks of this training than on those of its passport: "
        f"{finding}, and the passport has {expected}",
        f"do not train in it: read {target.source}, remove it with its passport, and run `dvc repro environments`",
    )
