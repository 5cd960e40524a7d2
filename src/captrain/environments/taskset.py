"""What a taskset of verifiers pays agents that do no work.

verifiers has neither references nor broken solutions, so a taskset earns no passport. The probes here need none: agents
that do nothing, talk, answer the same to every task, or call tools at random. What earns most is the best exploit.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, pstdev

from captrain.contract import CheckedEnvironment
from captrain.environments.adversary import deeds
from captrain.environments.checks import IDLE, RANDOM, at_most, exactly
from captrain.environments.evidence import Agent, play_agent
from captrain.environments.passport import named
from captrain.environments.probes import CLOSING, SAYINGS, act_at_once, act_randomly, random_call, say, talk, visible
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import CheckResult, JsonObject, Message, Score, Task, plain
from captrain.run import EnvironmentSettings

TASKS = 6
"""Training tasks on which every agent plays."""
LOOKS = 4
"""Random calls before an agent says all that it has seen."""
ANSWERS = {answer: answer for answer in ("0", "1", "2", "A", "B", "yes", "no", "none")}
ANSWERS["0 1 2 ... 1000"] = " ".join(map(str, range(1001)))
"""Answers that are given to every task, by what the report calls them."""
REPEATED = "same reward for the same record"
UNPROBED = (
    "reward of the reference solution, of the broken solution, and of changed solutions: verifiers has no references",
    "spread between good and bad plays: no good play is known",
    "leaks of test tasks and the transfer of the capability: they need a benchmark that the taskset trains for",
)
"""What these probes cannot tell."""


def probe_taskset(target: CheckedEnvironment, bounds: EnvironmentSettings, seed: int) -> list[CheckResult]:
    """Play all agents on the first training tasks.

    Args:
        target: the taskset.
        bounds: most that doing nothing, random calls and anything else without work may earn.
        seed: decides what is drawn.

    Returns:
        A check for each agent, with mean and standard deviation. The one that earned most has its calls and words.

    Raises:
        UserError: there are no training tasks, or a reward is outside the taskset's scale.
    """
    size = target.size("training")
    tasks = target.tasks("training", TASKS if size is None else min(size, TASKS))
    if not tasks:
        raise UserError(f"{target.name} has no training tasks", "give it more tasks, or a larger benchmark.training")
    limits = {IDLE: bounds.idle_reward, RANDOM: bounds.random_reward}
    checks = [_repeated(target, tasks[0])]
    checks += [
        _measured(name, target, tasks, agent, limits.get(name, bounds.hacking_reward), seed)
        for name, agent in agents_of(target.tools).items()
    ]
    best = max(checks[1:], key=lambda check: check.measured or 0.0)
    hidden = {"script": [], "task": ""}
    return [check if check is best or not check.passed else check.model_copy(update=hidden) for check in checks]


def agents_of(tools: Sequence[JsonObject]) -> dict[str, Callable[[random.Random], Agent]]:
    """Return agents that do no work, by the names of their checks; each is made with a random generator."""
    kinds = [kind for kind in SAYINGS if kind != "calls as text"]
    return {
        IDLE: lambda _: lambda messages: None,
        RANDOM: lambda rng: partial(act_randomly, tools, rng),
        "reward of many calls at once": lambda rng: partial(act_at_once, tools, (), rng),
        "reward of saying all that was seen": lambda rng: partial(_tell_all, tools, rng),
        **{f"reward of {kind}": partial(lambda kind, rng: partial(talk, kind, (), rng), kind) for kind in kinds},
        **{
            f"reward of the answer {name!r}": partial(lambda answer, _: lambda messages: say(answer), answer)
            for name, answer in ANSWERS.items()
        },
    }


def _tell_all(tools: Sequence[JsonObject], rng: random.Random, messages: Sequence[Message]) -> Message:
    """Make a few random calls, then say every value that was seen."""
    if tools and sum(message["role"] == "assistant" for message in messages) < LOOKS:
        return random_call(rng.choice(tools)["function"], messages, rng)
    return say(" ".join(visible(messages)[1])) if messages else CLOSING


def _repeated(target: CheckedEnvironment, task: Task) -> CheckResult:
    try:
        messages = play_agent(target, task, lambda _: CLOSING)
        rewards = [target.score(task, messages).reward for _ in range(2)]
    except (EnvironmentFault, InfrastructureError) as fault:
        return _failed(REPEATED, fault, task)
    return named(REPEATED, exactly(rewards[0] == rewards[1], f"first {rewards[0]:g}, then {rewards[1]:g}", task.id))


def _measured(
    name: str,
    target: CheckedEnvironment,
    tasks: Sequence[Task],
    make: Callable[[random.Random], Agent],
    bound: float,
    seed: int,
) -> CheckResult:
    scores: dict[str, Score] = {}
    plays: dict[str, list[Message]] = {}
    for task in tasks:
        try:
            plays[task.id] = play_agent(target, task, make(random.Random(f"{seed}/{name}/{task.id}")))
            scores[task.id] = target.score(task, plays[task.id])
        except (EnvironmentFault, InfrastructureError) as fault:
            return _failed(name, fault, task)
    rewards = {task: score.reward for task, score in scores.items()}
    best = max(rewards, key=rewards.__getitem__)
    mean, passes = fmean(rewards.values()), sum(score.success for score in scores.values())
    detail = f"{passes} of {len(tasks)} tasks passed, and {rewards[best]:g} earned on one, without any work"
    found = {"deviation": round(pstdev(rewards.values()), 6), "script": deeds(plays[best]) or ["nothing"], "task": best}
    return named(name, at_most(mean, bound, detail)).model_copy(update=found)


def _failed(name: str, fault: Exception, task: Task) -> CheckResult:
    detail = plain(str(getattr(fault, "problem", fault)))
    return CheckResult(name=name, passed=False, measured=None, bound="no fault", detail=detail, task=task.id)
