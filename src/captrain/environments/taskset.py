"""Measures the reward that a taskset of verifiers gives to agents that do no work.

verifiers has neither references nor broken solutions, so a taskset cannot earn a passport. The probes here need
neither: agents that do nothing, talk, or call tools at random. The agent that earns most is the best exploit. `answers`
then searches for answers that earn reward.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from captrain.contract import CheckedEnvironment
from captrain.environments.adversary import Exploit, deeds
from captrain.environments.answers import STORED, exploited, first_tasks, probe_answers
from captrain.environments.checks import IDLE, RANDOM, ROUNDING, exactly
from captrain.environments.evidence import Agent, play_agent
from captrain.environments.passport import named
from captrain.environments.probes import CLOSING, SAYINGS, act_at_once, act_randomly, random_call, say, talk, visible
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import CheckResult, JsonObject, Message, Task, plain
from captrain.run import EnvironmentSettings

TASKS = 12
"""Training tasks on which every agent plays."""
LOOKS = 4
"""Number of random calls before an agent says all values that it has seen."""
REPEATED = "same reward for the same record"
UNPROBED = (
    "spread between good and bad plays with tools, and moves with tools that a learner would find",
    "leaks of test tasks and the transfer of the capability: they need a benchmark that the taskset trains for",
)
"""Properties that these probes cannot measure."""
UNSOLVED = (
    "reward of the solution and of changed solutions: no field of the taskset's data earns reward when it is said"
)
REMOTE = "answers that pay: the reward asks {}, and the search would send it hundreds of answers"


@dataclass(frozen=True)
class Probes:
    """The measured probes, and the probes that were left out."""

    checks: list[CheckResult]
    unprobed: list[str]


def probe_taskset(target: CheckedEnvironment, bounds: EnvironmentSettings, seed: int) -> Probes:
    """Play all agents on the first training tasks, and search for answers that pay.

    Args:
        target: the taskset.
        bounds: maximum rewards of doing nothing, of random calls, and of other agents that do no work.
        seed: seed of all draws.

    Returns:
        A check for each agent and for each kind of answer, with mean and standard deviation. The agent that earned most
        and the answers have their calls and words. Answers are not searched for if the reward asks another machine.

    Raises:
        UserError: there are no training tasks, or a reward is outside the taskset's scale.
    """
    tasks = first_tasks(target, "training", TASKS)
    if not tasks:
        raise UserError(f"{target.name} has no training tasks", "give it more tasks, or a larger benchmark.training")
    limits = {IDLE: bounds.idle_reward, RANDOM: bounds.random_reward}
    contacted: Callable[[], list[str]] = getattr(target.environment, "contacted", list)
    contacted()
    checks = [_repeated(target, tasks[0])]
    hosts = contacted()
    checks += [
        _measured(name, target, tasks, agent, limits.get(name, bounds.hacking_reward), seed)
        for name, agent in agents_of(target.tools).items()
    ]
    best = max(checks[1:], key=lambda check: check.measured or 0.0)
    hidden = {"script": [], "task": ""}
    checks = [check if check is best or not check.passed else check.model_copy(update=hidden) for check in checks]
    if hosts:
        return Probes(checks, [REMOTE.format(", ".join(hosts)), UNSOLVED, *UNPROBED])
    try:
        answers = probe_answers(target, bounds, seed)
    except (EnvironmentFault, InfrastructureError) as fault:
        return Probes([*checks, _failed("reward of answers", fault, tasks[0])], [*UNPROBED])
    solved = any(check.name == STORED for check in answers)
    return Probes([*checks, *answers], [*(() if solved else (UNSOLVED,)), *UNPROBED])


def agents_of(tools: Sequence[JsonObject]) -> dict[str, Callable[[random.Random], Agent]]:
    """Return agents that do no work, by the names of their checks; each is made with a random generator."""
    kinds = [kind for kind in SAYINGS if kind != "calls as text"]
    return {
        IDLE: lambda _: lambda messages: None,
        RANDOM: lambda rng: partial(act_randomly, tools, rng),
        "reward of many calls at once": lambda rng: partial(act_at_once, tools, (), rng),
        "reward of saying all that was seen": lambda rng: partial(_tell_all, tools, rng),
        **{f"reward of {kind}": partial(lambda kind, rng: partial(talk, kind, (), rng), kind) for kind in kinds},
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
    found = Exploit(name.removeprefix("reward of "))
    for task in tasks:
        try:
            play = play_agent(target, task, make(random.Random(f"{seed}/{name}/{task.id}")))
            found.rewards[task.id] = target.score(task, play).reward
            found.deeds[task.id] = deeds(play) or ["nothing"]
        except (EnvironmentFault, InfrastructureError) as fault:
            return _failed(name, fault, task)
    check = exploited(name, found, bound)
    if name not in (IDLE, RANDOM):
        return check
    return check.model_copy(update={"passed": found.mean <= bound + ROUNDING, "bound": f"at most {bound:g}"})


def _failed(name: str, fault: Exception, task: Task) -> CheckResult:
    detail = plain(str(getattr(fault, "problem", fault)))
    return CheckResult(name=name, passed=False, measured=None, bound="no fault", detail=detail, task=task.id)
