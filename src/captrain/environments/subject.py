"""An environment under examination, and what it is held against.

The checks of a passport ask the same things of an environment again and again, and what answers may be anyone's code.
A `Subject` asks each thing once, remembers a fault as it remembers an answer (an environment that hangs costs its
deadline once), checks the form of every message at this one place, and knows which task was last asked about.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from captrain.config import Environments
from captrain.contract import Target, closing_episodes
from captrain.environments.leakage import HeldOutTasks
from captrain.errors import EnvironmentFault
from captrain.records import Check, JsonObject, Message, Rollout, Score, Task

T = TypeVar("T")

Agent = Callable[[Sequence[Message]], Message | None]
"""The next assistant message after the messages so far; None: the agent leaves."""
TURNS = 16
"""Assistant messages of one play at most, references apart."""
STEPS = 200
"""The same of a reference."""
NO_BROKEN = "the file defines no broken(task): the reference solution with just the capability's step broken"


@dataclass(frozen=True)
class Standard:
    """What every environment for one target is held against: the schemas of its tools, its test tasks, the bounds."""

    tools: list[JsonObject]
    tests: HeldOutTasks
    bounds: Environments


def make_standard(benchmark: Target, tests: int, bounds: Environments) -> Standard:
    """The standard of a benchmark.

    Args:
        benchmark: the target.
        tests: so many test tasks, from the first on, must not occur in an environment.
        bounds: the `environments` section.

    Raises:
        UserError: the benchmark is not installed, or has fewer test tasks.
    """
    source = Path(inspect.getfile(type(benchmark.environment))).read_text()
    return Standard(benchmark.tools, HeldOutTasks(benchmark, benchmark.tasks("test", tests), [source]), bounds)


class _FunctionCall(BaseModel):
    name: str
    arguments: JsonObject | str


class _ToolCall(BaseModel):
    function: _FunctionCall


class _ChatMessage(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


MESSAGES = TypeAdapter(list[_ChatMessage])


def _checked_messages(raw: Any) -> list[Message]:
    """The messages, if that is what they are.

    Raises:
        TypeError: they are not.
    """
    try:
        MESSAGES.validate_python(raw, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise TypeError(f"no chat messages: {first['msg']}{f' at {place}' if place else ''}") from None
    return raw


class Subject:
    """An environment under examination.

    Args:
        target: the environment, loaded.
        path: its file.
        against: what it is held against.
        evidence: failed rollouts that lack the capability.
    """

    def __init__(self, target: Target, path: Path, against: Standard, evidence: Sequence[Rollout]) -> None:
        self.target, self.path, self.against, self.evidence = target, path, against, evidence
        self.bounds = against.bounds
        self.task_id = ""
        """The task last asked about: a fault is its."""
        self._answers: dict[tuple[str, str], Any] = {}

    def once(self, question: str, task: str, function: Callable[[], T]) -> T:
        """What was found when it was first asked for: an answer, or a fault."""
        self.task_id = task
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
        """The training tasks that are checked."""
        return self.once("tasks", "", lambda: self.target.tasks("training", self.bounds.seeds))

    def reference(self, task: Task) -> list[Message]:
        """The assistant messages of the reference solution."""
        ask = lambda: _checked_messages(self.target.environment.reference(task.model_dump()))  # noqa: E731
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
        ask = lambda: _checked_messages(breaks(task.model_dump()))  # noqa: E731
        return self.once("broken", task.id, lambda: self.target.call("broken", task.id, ask))

    def solved(self, task: Task) -> list[Message]:
        """All messages of the reference's play."""
        return self.once("solved", task.id, lambda: self.play(task, self.reference(task)))

    def score(self, task: Task, messages: Sequence[Message]) -> Score:
        """The score of recorded messages."""
        self.task_id = task.id
        return self.target.score(task, messages)

    def solution(self, task: Task) -> Score:
        """The score of the reference's play."""
        return self.once("solution", task.id, lambda: self.target.score(task, self.solved(task)))

    def idle(self, task: Task) -> Score:
        """The score of an agent that does nothing."""
        return self.once("idle", task.id, lambda: self.target.floor(task))

    def act(self, task: Task, agent: Agent, turns: int = TURNS) -> list[Message]:
        """All messages of an agent's play."""
        self.task_id = task.id
        call, episode = self.target.call, self.target.open(task)
        with closing_episodes([episode]):
            messages = list(call("open", task.id, lambda: _checked_messages(list(episode.messages))))
            for _ in range(turns):
                message = agent(messages)
                if message is None:
                    break
                replies, over = call("step", task.id, lambda action=message: _checked_answer(episode.step(action)))
                messages += [message, *replies]
                if over:
                    break
        return messages

    def play(self, task: Task, actions: Sequence[Message]) -> list[Message]:
        """All messages of a play of these assistant messages, or of as many as the episode takes."""
        pending = iter(actions)
        return self.act(task, lambda _: next(pending, None), STEPS)

    def reward_of(self, task: Task, actions: Sequence[Message]) -> float:
        """The reward of a play of these assistant messages."""
        return self.score(task, self.play(task, actions)).reward


def _checked_answer(raw: Any) -> tuple[list[Message], bool]:
    replies, over = raw
    return _checked_messages(list(replies)), bool(over)


def at_most(name: str, value: float, bound: float, detail: str = "", task: str = "") -> Check:
    """A check of an upper bound; detail and task are for the failure."""
    passed = value <= bound + 1e-9
    return Check(
        name=name,
        passed=passed,
        measured=round(value, 6),
        bound=f"at most {bound}",
        detail="" if passed else detail,
        task="" if passed else task,
    )


def at_least(name: str, value: float, bound: float, detail: str = "", task: str = "") -> Check:
    """A check of a lower bound; detail and task are for the failure."""
    passed = value >= bound - 1e-9
    return Check(
        name=name,
        passed=passed,
        measured=round(value, 6),
        bound=f"at least {bound}",
        detail="" if passed else detail,
        task="" if passed else task,
    )


def mean_at_most(name: str, rewards: dict[str, float], bound: float) -> Check:
    """A check of the mean reward over tasks; the task with the highest shows a failure."""
    most = max(rewards, key=lambda task: rewards[task])
    mean = sum(rewards.values()) / len(rewards)
    return at_most(name, mean, bound, f"most on this task: {rewards[most]:.3g}", most)
