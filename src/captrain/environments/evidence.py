"""An environment under examination, and the benchmark that it is compared with.

The checks ask an environment the same questions many times, and its author is not trusted. `Evidence` caches each
answer or fault, so that an environment that hangs costs its timeout only once. It also records the last task that was
asked about.

A key decides which tasks are checked, how many are requested, in which order, and which random calls are made. The key
is a digest of the file's bytes and the run's seed and never enters the sandbox. A file that behaves well on the first
tasks and pays on others is therefore examined where it pays.
"""

import ast
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from captrain.contract import CheckedEnvironment, closing_episodes
from captrain.environments.leakage import HeldOutTasks
from captrain.environments.loading import reopened
from captrain.environments.sandbox.confined import ConfinedEnvironment
from captrain.environments.sandbox.forkserver import Allowance
from captrain.errors import EnvironmentFault
from captrain.records import JsonObject, Message, Rollout, Score, Task, bytes_digest, digest, read_bytes
from captrain.run import EnvironmentSettings, Machine

P = ParamSpec("P")
T = TypeVar("T")

Agent = Callable[[Sequence[Message]], Message | None]
"""Returns the next assistant message, given all messages so far; None ends the play."""
TURNS = 16
"""Maximum number of assistant messages in a play that is not a reference."""
STEPS = 200
"""Maximum number of assistant messages in a reference."""
REACH = (8, 16)
"""Pool of training tasks, 8 to 16 times the number checked, so that tasks of a long training are included."""
ROLES = {"system", "user", "assistant", "tool"}
CHARACTERS = 1 << 18
"""Maximum number of characters in all messages of a play."""


@dataclass(frozen=True)
class Standard:
    """What every environment of a benchmark is compared with: tool schemas, test tasks and bounds.

    `target` is the benchmark itself: no environment must have more variety than it has. None skips that limit.
    """

    tools: list[JsonObject]
    tests: HeldOutTasks
    bounds: EnvironmentSettings
    target: CheckedEnvironment | None = None


def make_standard(benchmark: CheckedEnvironment, tests: int, bounds: EnvironmentSettings) -> Standard:
    """Make the standard of a benchmark.

    Args:
        benchmark: the target.
        tests: number of test tasks, from the first on, that must not occur in an environment.
        bounds: the `environments` section of the configuration.

    Raises:
        UserError: the benchmark is not installed, or has fewer test tasks.
    """
    source = Path(inspect.getfile(type(benchmark.environment))).read_text(encoding="utf-8")
    size = benchmark.size("training")
    training = benchmark.tasks("training", size) if size else []
    held_out = HeldOutTasks(benchmark, benchmark.tasks("test", tests), [source], training)
    return Standard(benchmark.tools, held_out, bounds, benchmark)


def play_agent(target: CheckedEnvironment, task: Task, agent: Agent, turns: int = TURNS) -> list[Message]:
    """Play an agent for at most `turns` messages and return all messages."""
    episode = target.open(task)
    with closing_episodes([episode]):
        messages = list(episode.messages)
        for _ in range(turns):
            if (action := agent(messages)) is None:
                break
            replies, is_over = episode.step(action)
            messages += [action, *replies]
            if sum(len(message.get("content") or "") for message in messages) > CHARACTERS:
                raise ValueError(f"more than {CHARACTERS} characters in one play")
            if strange := {message["role"] for message in messages} - ROLES:
                raise ValueError(f"messages of the role {min(strange)!r}")  # the sandbox accepts any role
            if is_over:
                break
    return messages


def once(question: Callable[Concatenate["Evidence", P], T]) -> Callable[Concatenate["Evidence", P], T]:
    """Cache a question's answer or fault, per task."""

    @wraps(question)
    def asked(self: "Evidence", *task: P.args, **options: P.kwargs) -> T:
        self.task_id = "".join(one.id for one in task if isinstance(one, Task))
        key = question, self.task_id
        if key not in self.answers:
            try:
                self.answers[key] = question(self, *task, **options)
            except EnvironmentFault as fault:
                self.answers[key], self.faulty[key] = fault, self.task_id
        if isinstance(answer := self.answers[key], EnvironmentFault):
            self.task_id = self.faulty[key]
            raise answer
        return answer

    return asked


class Evidence:
    """All that the checks may ask about an environment.

    Args:
        target: the environment, loaded.
        path: its file.
        against: the standard.
        failures: failed rollouts that lack the capability.
        seed: run seed.
        allowance: time of a confined environment; None for our own text.
        machine: where benchmarks are installed, for our own text; None otherwise.
    """

    def __init__(
        self,
        target: CheckedEnvironment,
        path: Path,
        against: Standard,
        failures: Sequence[Rollout],
        *,
        seed: int = 0,
        allowance: Allowance | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.target, self.path, self.against, self.failures = target, path, against, failures
        self.bounds, self.tools, source = against.bounds, against.tools, read_bytes(path)
        self._seed, self._allowance, self._machine = seed, allowance, machine
        self._key = digest("passport", bytes_digest(source), seed)
        self.text = source.decode(errors="replace")
        """The file's text, followed by its string constants without their escapes."""
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            constants = [node.value for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.Constant)]
            self.text = "\n".join([self.text, *(value for value in constants if isinstance(value, str))])
        self.task_id = ""
        """The task that was asked about last: a fault belongs to it."""
        self.answers: dict[tuple[object, str], Any] = {}
        self.faulty: dict[tuple[object, str], str] = {}
        """The task of each fault among the answers."""
        self._plays: dict[str, list[Message]] = {}
        self._scores: dict[str, Score] = {}
        self.limit(allowance)

    def limit(self, allowance: Allowance | None) -> None:
        """Let a confined environment use up an allowance; None limits each single answer alone."""
        if isinstance(self.target.environment, ConfinedEnvironment):
            self.target.environment.allowance = allowance

    @contextmanager
    def reopened(self) -> Iterator["Evidence"]:
        """Load the same file in fresh processes, under the same time limit."""
        with reopened(self.path, self._machine) as target:
            yield Evidence(target, self.path, self.against, self.failures, seed=self._seed, allowance=self._allowance)

    def forgetful(self) -> "Evidence":
        """Return the same evidence without its plays and their scores, to ask for them again."""
        again = copy(self)
        again._plays, again._scores = {}, {}
        return again

    def random(self, *use: object) -> random.Random:
        """Make a random generator for a use; the key seeds it."""
        return random.Random(f"{self._key}/{'/'.join(map(str, use))}")

    @property
    @once
    def tasks(self) -> list[Task]:
        """The drawn training tasks, which the checks use."""
        return self.draw()

    def draw(self) -> list[Task]:
        """List training tasks, and draw those that are checked."""
        tasks = self.target.tasks("training", self.reach)
        return [tasks[number] for number in self.random("tasks").sample(range(self.reach), self.count)]

    @property
    @once
    def first_tasks(self) -> list[Task]:
        """The first training tasks, as many as are checked: training uses these most."""
        return self.target.tasks("training", self.count)

    @property
    def all_tasks(self) -> list[Task]:
        """The first tasks and the drawn ones."""
        return [*{task.id: task for task in (*self.first_tasks, *self.tasks)}.values()]

    @property
    @once
    def size(self) -> int | None:
        """Number of training tasks, as answered first; None if there is no limit."""
        return self.target.size("training")

    @property
    def count(self) -> int:
        """Number of checked tasks: as configured, or all if there are fewer."""
        return self.bounds.seeds if self.size is None else min(self.size, self.bounds.seeds)

    @property
    @once
    def reach(self) -> int:
        """Number of tasks to draw from; fewer if the environment does not have that many."""
        low, high = REACH
        reach = self.random("reach").randint(low * self.count, high * self.count)
        while reach > self.count:
            with suppress(EnvironmentFault):
                self.target.tasks("training", reach)
                return reach
            reach //= 2
        return self.count

    @once
    def reference(self, task: Task) -> list[Message]:
        """Return the assistant messages of the reference solution."""
        return self._bounded(self.target.reference(task))

    @once
    def broken(self, task: Task) -> list[Message]:
        """Return the reference solution with the capability's step broken."""
        ask = getattr(self.target.environment, "broken", None)
        if ask is None:
            fault = "the file defines no broken(task): the reference solution with just the capability's step broken"
            raise EnvironmentFault(fault, "define it")
        return self._bounded(self.target.call("broken", task.id, lambda: ask(task.model_dump())))

    def _bounded(self, solution: list[Message]) -> list[Message]:
        if len(solution) > STEPS:
            raise ValueError(f"a solution of more than {STEPS} messages")
        return solution

    @property
    def has_broken(self) -> bool:
        """True if the file defines `broken`."""
        return hasattr(self.target.environment, "broken")

    @once
    def solved(self, task: Task) -> list[Message]:
        """Return all messages of the reference's play."""
        return self.play(task, self.reference(task))

    @once
    def solution(self, task: Task) -> Score:
        """Score the reference's play."""
        return self.score(task, self.solved(task))

    @once
    def idle(self, task: Task) -> Score:
        """Score an agent that does nothing."""
        return self.target.floor(task)

    def score(self, task: Task, messages: Sequence[Message]) -> Score:
        """Score recorded messages. Many scripts come to the same messages: each is scored once."""
        self.task_id, key = task.id, digest(task.id, list(messages))
        if key not in self._scores:
            self._scores[key] = self.target.score(task, messages)
        return self._scores[key]

    def act(self, task: Task, agent: Agent, turns: int = TURNS) -> list[Message]:
        """Play an agent and return all messages."""
        self.task_id = task.id
        return play_agent(self.target, task, agent, turns)

    def play(self, task: Task, actions: Sequence[Message]) -> list[Message]:
        """Play assistant messages until they run out or the episode ends, and return all messages. Play each once."""
        pending, key = iter(actions), digest(task.id, list(actions))
        if key not in self._plays:
            self._plays[key] = self.act(task, lambda _: next(pending, None), STEPS)
        return list(self._plays[key])

    def reward_of(self, task: Task, actions: Sequence[Message]) -> float:
        """Play assistant messages and return the reward."""
        return self.score(task, self.play(task, actions)).reward
