"""An environment under examination, and what it is held against.

The checks of a passport ask the same things of an environment again and again, and what answers may be anyone's code.
A `Evidence` asks each thing once, remembers a fault as it remembers an answer (an environment that hangs costs its
deadline once), checks the form of every message at this one place, and knows which task was last asked about.

Which tasks are checked, how many are asked for, in which order and with which random calls is drawn by a key that the
file cannot know: a digest over its own bytes and the run's seed, which never enters the sandbox. So a file that behaves
on the tasks that everybody looks at, and pays on others, is looked at where it pays.
"""

import ast
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from captrain.contract import CheckedEnvironment, closing_episodes
from captrain.environments.leakage import HeldOutTasks
from captrain.environments.loading import reopened
from captrain.environments.sandbox.confined import ChatMessage, ConfinedEnvironment
from captrain.errors import EnvironmentFault
from captrain.records import (
    CheckResult,
    JsonObject,
    Message,
    Rollout,
    Score,
    Task,
    bytes_digest,
    digest,
    first_fault,
    read_bytes,
)
from captrain.run import EnvironmentSettings, Machine

T = TypeVar("T")

Agent = Callable[[Sequence[Message]], Message | None]
"""The next assistant message after the messages so far; None: the agent leaves."""
TURNS = 16
"""Assistant messages of one play at most, references apart."""
STEPS = 200
"""The same of a reference."""
REACH = (8, 16)
"""Tasks are drawn from so many times as many as are checked, between these: those of a long training are among them."""
CHARACTERS = 1 << 18
"""Most characters of all messages of one play: nothing of ours is asked to read more."""
NO_BROKEN = "the file defines no broken(task): the reference solution with just the capability's step broken"


@dataclass(frozen=True)
class Standard:
    """Standard for every environment of one target: the schemas of its tools, its test tasks, the bounds, and the
    target itself, whose own variety is asked of no environment twice over; None where it is not at hand."""

    tools: list[JsonObject]
    tests: HeldOutTasks
    bounds: EnvironmentSettings
    target: CheckedEnvironment | None = None


def make_standard(benchmark: CheckedEnvironment, tests: int, bounds: EnvironmentSettings) -> Standard:
    """The standard of a benchmark.

    Args:
        benchmark: the target.
        tests: so many test tasks, from the first on, must not occur in an environment.
        bounds: the `environments` section.

    Raises:
        UserError: the benchmark is not installed, or has fewer test tasks.
    """
    source = Path(inspect.getfile(type(benchmark.environment))).read_text()
    size = benchmark.size("training")
    training = benchmark.tasks("training", size) if size else []
    held_out = HeldOutTasks(benchmark, benchmark.tasks("test", tests), [source], training)
    return Standard(benchmark.tools, held_out, bounds, benchmark)


class _RoleMessage(ChatMessage, frozen=True):
    # The sandbox lets any role pass; none but these earns a passport.
    role: Literal["system", "user", "assistant", "tool"]


MESSAGES = TypeAdapter(list[_RoleMessage])


def _checked(raw: object, most: int | None = None) -> list[Message]:
    """Return messages as they came, at most so many.

    Raises:
        TypeError: they are none.
        ValueError: they are more.
    """
    try:
        messages = MESSAGES.validate_python(raw, strict=True)
    except ValidationError as error:
        raise TypeError(f"no chat messages: {first_fault(error)}") from None
    if most is not None and len(messages) > most:
        raise ValueError(f"a solution of more than {most} messages")
    assert isinstance(raw, list)
    return raw


def play_agent(
    target: CheckedEnvironment, task: Task, agent: Agent, turns: int = TURNS, hurry: Callable[[], None] | None = None
) -> list[Message]:
    """Play an agent, which is asked for so many messages at most, and return all messages; `hurry` is called before
    each."""
    episode = target.open(task)
    messages: list[Message] = []

    def step(action: Message) -> bool:
        replies, over = episode.step(action)
        messages.extend([action, *_checked(replies)])
        if sum(len(message.get("content") or "") for message in messages) > CHARACTERS:
            raise ValueError(f"more than {CHARACTERS} characters in one play")
        return over

    with closing_episodes([episode]):
        messages += target.call("open", task.id, lambda: _checked(list(episode.messages)))
        for _ in range(turns):
            if hurry is not None:
                hurry()
            message = agent(messages)
            if message is None or target.call("step", task.id, partial(step, message)):
                break
    return messages


def limit(target: CheckedEnvironment, end: float | None) -> None:
    """Have the sandbox wait for no answer beyond a time, however many answers one question takes, as a listing of tasks
    does; None: it waits as long as each answer may take."""
    if isinstance(target.environment, ConfinedEnvironment):
        target.environment.end = end


class Evidence:
    """An environment under examination.

    Args:
        target: the environment, loaded.
        path: its file.
        against: what it is held against.
        evidence: failed rollouts that lack the capability.
        seed: of the run.
        seconds: that the examination may take; None: no limit, for text of our own.
        machine: where installations of benchmarks lie, for text of our own; None: for any other.
    """

    def __init__(
        self,
        target: CheckedEnvironment,
        path: Path,
        against: Standard,
        evidence: Sequence[Rollout],
        *,
        seed: int = 0,
        seconds: float | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.target, self.path, self.against, self.evidence = target, path, against, evidence
        source, self.bounds = read_bytes(path), against.bounds
        self.text = source.decode(errors="replace")
        """The file's text, and behind it the texts in it as they are when it runs, whatever they are written with."""
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            constants = [node.value for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.Constant)]
            self.text = "\n".join([self.text, *(value for value in constants if isinstance(value, str))])
        self._key, self._seconds, self._machine = digest("passport", bytes_digest(source), seed), seconds, machine
        self.end = None if seconds is None else time.monotonic() + seconds
        self.task_id = ""
        """The task last asked about: a fault is its."""
        self._answers: dict[tuple[str, str], Any] = {}

    @contextmanager
    def reopened(self) -> Iterator[CheckedEnvironment]:
        """Load the same file in fresh processes, under the time of this examination."""
        with reopened(self.path, self._machine) as target:
            limit(target, self.end)
            yield target

    def random(self, *use: object) -> random.Random:
        """Numbers for a use, drawn by the key."""
        return random.Random(f"{self._key}/{'/'.join(map(str, use))}")

    def hurry(self) -> None:
        """Go on only while there is time.

        Raises:
            EnvironmentFault: the examination has taken as long as it may.
        """
        if self.end is not None and time.monotonic() > self.end:
            raise EnvironmentFault(
                f"the examination was ended after {self._seconds:g} s (environments.seconds)",
                "make the environment faster, or its tasks less; on a busy machine, raise environments.seconds",
            )

    def once(self, question: str, task: str, function: Callable[[], T]) -> T:
        """Answer a question on a task by the function, or by what that gave the first time: an answer, or a fault."""
        self.task_id = task
        self.hurry()
        if (question, task) not in self._answers:
            try:
                self._answers[question, task] = function()
            except EnvironmentFault as fault:
                self._answers[question, task] = fault
        answer = self._answers[question, task]
        if isinstance(answer, EnvironmentFault):
            raise answer
        return answer

    @property
    def tasks(self) -> list[Task]:
        """The training tasks that are checked, as drawn."""
        return self.once("tasks", "", lambda: self.drawn(self.reach))

    @property
    def first_tasks(self) -> list[Task]:
        """The first `count` training tasks, of which most training takes its own."""
        return self.once("first tasks", "", lambda: self.target.tasks("training", self.count))

    @property
    def count(self) -> int:
        """Number of tasks that are checked: as many as asked for, or all that there are."""
        return self.bounds.seeds if self.size is None else min(self.size, self.bounds.seeds)

    @property
    def size(self) -> int | None:
        """Number of training tasks, as first answered; None: as many as one asks for."""
        return self.once("size", "", lambda: self.target.size("training"))

    @property
    def all_tasks(self) -> list[Task]:
        """The first tasks and those that were drawn."""
        return [*{task.id: task for task in (*self.first_tasks, *self.tasks)}.values()]

    @property
    def reach(self) -> int:
        """Number of tasks that are asked for to draw from; fewer where the environment has not so many."""
        return self.once("reach", "", self._reach)

    def _reach(self) -> int:
        low, high = REACH
        count = self.random("reach").randint(low * self.count, high * self.count)
        while count > self.count:
            try:
                self.target.tasks("training", count)
            except EnvironmentFault:
                self.hurry()
                count //= 2
            else:
                return count
        return self.count

    def drawn(self, count: int, target: CheckedEnvironment | None = None) -> list[Task]:
        """Draw the tasks that are checked, out of so many that are asked for (at least `reach`)."""
        numbers = self.random("tasks").sample(range(self.reach), self.count)
        tasks = (target or self.target).tasks("training", count)
        return [tasks[number] for number in numbers]

    def another_count(self, use: str) -> int:
        """Draw another count to ask for: at least as many as tasks are drawn from, where there are more."""

        def has_more() -> bool:
            try:
                return bool(self.target.tasks("training", self.reach + self.bounds.seeds))
            except EnvironmentFault:
                return False

        return self.reach + (self.random(use).randint(1, self.bounds.seeds) if self.once("more", "", has_more) else 0)

    def reference(self, task: Task) -> list[Message]:
        """The assistant messages of the reference solution."""
        ask = lambda: _checked(self.target.environment.reference(task.model_dump()), STEPS)  # noqa: E731
        return self.once("reference", task.id, lambda: self.target.call("reference", task.id, ask))

    def broken(self, task: Task) -> list[Message]:
        """The reference with the capability's step broken.

        Raises:
            EnvironmentFault: the file does not say, or raised.
        """
        breaks = getattr(self.target.environment, "broken", None)
        if breaks is None:
            self.task_id = ""
            raise EnvironmentFault(NO_BROKEN, "define it")
        ask = lambda: _checked(breaks(task.model_dump()), STEPS)  # noqa: E731
        return self.once("broken", task.id, lambda: self.target.call("broken", task.id, ask))

    def solved(self, task: Task) -> list[Message]:
        """All messages of the reference's play."""
        return self.once("solved", task.id, lambda: self.play(task, self.reference(task)))

    def score(self, task: Task, messages: Sequence[Message], target: CheckedEnvironment | None = None) -> Score:
        """Score recorded messages."""
        self.task_id = task.id
        self.hurry()
        return (target or self.target).score(task, messages)

    def solution(self, task: Task) -> Score:
        """The score of the reference's play."""
        return self.once("solution", task.id, lambda: self.target.score(task, self.solved(task)))

    def idle(self, task: Task) -> Score:
        """The score of an agent that does nothing."""
        return self.once("idle", task.id, lambda: self.target.floor(task))

    def act(
        self, task: Task, agent: Agent, turns: int = TURNS, target: CheckedEnvironment | None = None
    ) -> list[Message]:
        """Return all messages of an agent's play."""
        self.task_id = task.id
        return play_agent(target or self.target, task, agent, turns, self.hurry)

    def play(self, task: Task, actions: Sequence[Message], target: CheckedEnvironment | None = None) -> list[Message]:
        """Return all messages of a play of these assistant messages, or of as many as the episode takes."""
        pending = iter(actions)
        return self.act(task, lambda _: next(pending, None), STEPS, target)

    def reward_of(self, task: Task, actions: Sequence[Message]) -> float:
        """The reward of a play of these assistant messages."""
        return self.score(task, self.play(task, actions)).reward


def finding(name: str, passed: bool, measured: float, bound: str, detail: str = "", task: str = "") -> CheckResult:
    """Make a check; detail and task are for the failure."""
    if passed:
        detail = task = ""
    return CheckResult(name=name, passed=passed, measured=round(measured, 6), bound=bound, detail=detail, task=task)


def at_most(name: str, value: float, bound: float, detail: str = "", task: str = "") -> CheckResult:
    """Make a check of an upper bound; detail and task are for the failure."""
    return finding(name, value <= bound + 1e-9, value, f"at most {bound}", detail, task)


def at_least(name: str, value: float, bound: float, detail: str = "", task: str = "") -> CheckResult:
    """Make a check of a lower bound; detail and task are for the failure."""
    return finding(name, value >= bound - 1e-9, value, f"at least {bound}", detail, task)


def mean_at_most(name: str, rewards: dict[str, float], bound: float, highest: float = 1.0) -> CheckResult:
    """A check of the mean reward over tasks, none of which may have more than `highest`; the task of the highest shows
    a failure."""
    most = max(rewards, key=lambda task: rewards[task])
    mean = sum(rewards.values()) / len(rewards)
    check = at_most(name, mean, bound, f"most on this task: {rewards[most]:.3g}", most)
    if not check.passed or rewards[most] <= highest:
        return check
    detail = f"{rewards[most]:.3g} on this task, {sum(reward > highest for reward in rewards.values())} like it"
    return check.model_copy(update={"passed": False, "detail": detail, "task": most})
