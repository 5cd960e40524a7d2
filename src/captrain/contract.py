"""The contract between policies and environments, both benchmarks and synthesized ones.

Everything that crosses it is JSON, so an episode can run in another process or another venv. A score depends on the
task and the recorded messages alone, so anyone can recompute it without trusting the episode.

A synthesized environment is one self-contained Python file that uses only the standard library and defines a class
`Environment`. Such a file must not import captrain, so tasks and scores are plain dicts: tasks
{"id", "split", "data"}, scores {"reward", "success", "parts"}. `CheckedEnvironment` wraps any environment. It turns
answers into records, and faults into an `EnvironmentFault` that names the task.
"""

import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Protocol, TypeVar

from pydantic import ValidationError

from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import JsonObject, Message, Score, Split, Task, bytes_digest, digest, first_fault, read_bytes

T = TypeVar("T")
CALL_LIMIT = 1800.0
"""Seconds for one call of an environment. A user that a served model plays may take minutes."""


class Episode(Protocol):
    """A task being played.

    Optional members: `tools`, if they differ from the environment's, and `close()`, if it holds resources outside of
    this process.
    """

    messages: list[Message]
    """System and user messages that the agent sees before its first turn."""

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """Take an assistant message, and return its tool results and user replies, and whether the episode is over."""
        ...


class Environment(Protocol):
    """A benchmark or a synthesized environment.

    Optional members:
        about: JSON facts that decide its behaviour beyond its file (version, data hashes, simulated user).
        kinds: {tool: "read", "write" or "handover"}.
        idle(task): the messages of an episode in which the agent does nothing.
        open(task, key): instead of `open(task)`, if its side draws at random; equal keys give equal draws.
        size(split): number of tasks, if it is limited. Training then plays the tasks again, in other trials.
        absences: on the class, {member: consequence} for members that it lacks, such as `reference`. Plans read it
            before they build the environment.
    """

    name: str
    tools: list[JsonObject]
    """OpenAI function schemas of the tools the agent may call."""

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """List the first `count` tasks of a split: the same in every process."""
        ...

    def open(self, task: JsonObject) -> Episode:
        """Open a task as an episode."""
        ...

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """Score recorded messages: {"reward": [0, 1], "success": bool, "parts": {name: float}}."""
        ...

    def reference(self, task: JsonObject) -> list[Message]:
        """Return the assistant messages of a reference solution, which score 1.0; empty if none is known."""
        ...


IDLE: Message = {"role": "assistant", "content": ""}
"""Turn of an agent that does nothing."""


class Overdue(BaseException):
    """A call took too long. A BaseException, so that no `except Exception` of the called code catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Overdue` in the block after some seconds.

    This interrupts Python code in the main thread, unless a timer is set already. Elsewhere it does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class CheckedEnvironment:
    """An environment whose answers are checked, and whose faults name the method and the task.

    Args:
        environment: the environment. Its `tools` and `about` are read on demand, because reading them may start a
            process.
        source: its file or class path, for messages.
        code: identity of its code and parameters.
    """

    def __init__(self, environment: Environment, source: str, code: str) -> None:
        self.environment = environment
        self.source = source
        self.name = environment.name
        self.limit = CALL_LIMIT
        """Seconds for one call."""
        self._code = code
        self._keyed = "key" in inspect.signature(environment.open).parameters

    @property
    def tools(self) -> list[JsonObject]:
        """OpenAI function schemas of all tools."""
        return self.call("tools", "no task", lambda: self.environment.tools)

    @property
    def declared_tools(self) -> list[JsonObject]:
        """The schemas, annotated with the declared kinds of tools: for readers of rollouts, never for the agent."""
        kinds: dict[str, str] = self.call("kinds", "no task", lambda: getattr(self.environment, "kinds", {}))
        return [
            {**tool, "annotations": {**tool.get("annotations", {}), "kind": kinds[name]}} if name in kinds else tool
            for tool in self.tools
            for name in [tool["function"]["name"]]
        ]

    @property
    def about(self) -> JsonObject:
        """Facts that decide its behaviour beyond its code, such as versions; {} if there are none."""
        return self.call("about", "no task", lambda: getattr(self.environment, "about", {}))

    @property
    def fingerprint(self) -> str:
        """Identity of its behaviour: code, parameters and `about`."""
        return digest(self._code, self.about) if self.about else self._code

    def call(self, operation: str, task: str, function: Callable[[], T]) -> T:
        """Call the environment, and turn what it raises into an `EnvironmentFault`.

        Only this function may catch every exception, because it calls code that is not captrain's.
        """
        try:
            with time_limit(self.limit):
                return function()
        except (InfrastructureError, UserError):
            raise
        except Overdue as error:
            raise EnvironmentFault(
                f"environment {self.name} ({self.source}) did not return within {self.limit:g} s from {operation} on "
                f"{task}",
                "end every loop (`captrain check-benchmark` finds the line); finished rollouts are kept",
            ) from error
        except Exception as error:
            raise EnvironmentFault(
                f"environment {self.name} ({self.source}) raised {type(error).__name__}: {error} "
                f"in {operation} on {task}",
                "fix the environment; finished rollouts are kept, and a new run continues from them",
            ) from error

    def tasks(self, split: Split, count: int, *, fewer: bool = False) -> list[Task]:
        """List the first `count` tasks of a split; `fewer` allows an environment to have less.

        Raises:
            EnvironmentFault: there are not that many, an id is repeated, or a task is of another split.
        """
        raw = self.call("tasks", f"split {split}", lambda: self.environment.tasks(split, count))
        try:
            tasks = [Task.model_validate(task) for task in raw]
        except ValidationError as error:
            raise EnvironmentFault(
                f"environment {self.name} ({self.source}) returned something that is not a task ({first_fault(error)})",
                'return dicts {"id", "split", "data"}',
            ) from None
        expected = min(count, len(tasks)) if fewer else count
        if len(tasks) != expected or len({task.id for task in tasks}) != expected:
            raise EnvironmentFault(
                f"environment {self.name} gave {len(tasks)} tasks ({len({t.id for t in tasks})} distinct ids) of "
                f"split {split}; {count} were requested",
                "request fewer tasks of this split",
            )
        if wrong := next((task for task in tasks if task.split != split), None):
            raise EnvironmentFault(
                f"environment {self.name} gave task {wrong.id} of split {wrong.split} as {split}",
                "splits never mix: return tasks of the split that was asked for",
            )
        return tasks

    def size(self, split: Split) -> int | None:
        """Return the number of tasks of a split; None if there is no limit."""
        size: Callable[[Split], int] | None = getattr(self.environment, "size", None)
        return None if size is None else self.call("size", f"split {split}", lambda: size(split))

    def open(self, task: Task, key: str = "") -> "GuardedEpisode":
        """Open a task when its messages are first read; `key` seeds the environment's side."""
        return GuardedEpisode(self, task, key)

    def _open_episode(self, task: Task, key: str) -> Episode:
        opener: Callable[..., Episode] = self.environment.open
        options = {"key": key} if self._keyed else {}
        return self.call("open", task.id, lambda: opener(task.model_dump(), **options))

    def score(self, task: Task, messages: Sequence[Message]) -> Score:
        """Score recorded messages.

        Raises:
            EnvironmentFault: it raised, or the reward is not in [0, 1].
        """
        raw = self.call("score", task.id, lambda: self.environment.score(task.model_dump(), list(messages)))
        try:
            score = Score.model_validate(raw)
        except ValidationError as error:
            raise EnvironmentFault(
                f"environment {self.name} scored {task.id} with something that is not a score ({first_fault(error)})",
                'return {"reward": float, "success": bool, "parts": {name: float}}',
            ) from None
        if not 0.0 <= score.reward <= 1.0:
            raise EnvironmentFault(
                f"environment {self.name} scored {task.id} with reward {score.reward}", "keep rewards in [0, 1]"
            )
        return score

    def reference(self, task: Task) -> list[Message]:
        """Return the assistant messages of a reference solution."""
        return self.call("reference", task.id, lambda: self.environment.reference(task.model_dump()))

    def play(self, task: Task, actions: Sequence[Message]) -> list[Message]:
        """Play assistant messages until they run out or the episode ends, and return all messages."""
        episode = self.open(task)
        with closing_episodes([episode]):
            messages = list(episode.messages)
            for action in actions:
                replies, over = episode.step(action)
                messages += [action, *replies]
                if over:
                    break
        return messages

    def idle(self, task: Task, actions: Sequence[Message] = (IDLE,)) -> list[Message]:
        """Return the messages of an agent that does nothing: those of `idle` or, without it, of a play of `actions`."""
        idle: Callable[[JsonObject], list[Message]] | None = getattr(self.environment, "idle", None)
        if idle is None:
            return self.play(task, actions)
        return self.call("idle", task.id, lambda: idle(task.model_dump()))

    def floor(self, task: Task) -> Score:
        """Score an agent that does nothing."""
        return self.score(task, self.idle(task))


class GuardedEpisode:
    """An episode of a `CheckedEnvironment`, opened on first use."""

    def __init__(self, target: CheckedEnvironment, task: Task, key: str) -> None:
        self._target = target
        self._task = task
        self._key = key
        self._opening: Episode | None = None
        self._closed = False

    @property
    def _episode(self) -> Episode:
        # No cached_property: in Python 3.11 its lock would open the episodes of all threads one after another.
        if self._opening is None:
            self._opening = self._target._open_episode(self._task, self._key)
        return self._opening

    @property
    def messages(self) -> list[Message]:
        """See `Episode.messages`."""
        return self._episode.messages

    @property
    def tools(self) -> list[JsonObject]:
        """OpenAI function schemas of the tools of this episode."""
        return getattr(self._episode, "tools", None) or self._target.tools

    @property
    def is_open(self) -> bool:
        """True between opening and closing."""
        return self._opening is not None and not self._closed

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `Episode.step`.

        Raises:
            EnvironmentFault: the episode raised, or returned something else.
        """
        answer: object = self._target.call("step", self._task.id, lambda: self._episode.step(message))
        match answer:
            case (list() as replies, bool() as over) if all(_answers(reply) for reply in replies):
                return replies, over
        raise EnvironmentFault(
            f"environment {self._target.name} ({self._target.source}) returned {str(answer)[:80]!r} from step on "
            f"{self._task.id}",
            "return (messages, over): a list of tool results and user messages, and a bool",
        )

    def close(self) -> None:
        """Release what the episode holds outside of this process, if it is open."""
        if self.is_open:
            self._closed = True
            if (close := getattr(self._opening, "close", None)) is not None:
                self._target.call("close", self._task.id, close)

    def reference(self) -> list[Message]:
        """Return the reference solution of the task, for scripted policies."""
        return self._target.reference(self._task)


def _answers(message: object) -> bool:
    """Return whether a value is a tool result or a user message."""
    return isinstance(message, dict) and message.get("role") in ("tool", "user")


@contextmanager
def closing_episodes(episodes: Iterable[GuardedEpisode]) -> Iterator[None]:
    """Close all episodes when the block ends, also after an error.

    Raises:
        EnvironmentFault: an episode did not close. The others are closed first. If the block raised, its own error
            continues, and the fault becomes a note on it.
    """
    try:
        yield
    except BaseException as error:
        for fault in _close(episodes):
            error.add_note(f"while its episodes were closed: {fault}")
        raise
    if faults := _close(episodes):
        raise faults[0]


def _close(episodes: Iterable[GuardedEpisode]) -> list[Exception]:
    """Close all episodes, and return the faults."""
    faults: list[Exception] = []
    for episode in episodes:
        try:
            if episode.is_open:
                episode.close()
        except Exception as fault:
            faults.append(fault)
    return faults


def tool_call(name: str, arguments: JsonObject) -> Message:
    """Make an assistant message with one tool call, arguments as an object."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def calls_of(message: Message) -> list[tuple[str, JsonObject]]:
    """List the (name, arguments) pairs of an assistant message.

    Arguments that are JSON text are parsed. Text that is no JSON object becomes {"": text}, which fits no schema.
    """
    calls: list[tuple[str, JsonObject]] = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):  # the latter from thousands of brackets
                arguments = {"": arguments}
        calls.append((call["function"]["name"], arguments if isinstance(arguments, dict) else {"": arguments}))
    return calls


def file_fingerprint(name: str, source: bytes) -> str:
    """Hash the name (without suffix) and bytes of an environment file that has no `about`."""
    return digest(name, bytes_digest(source))


def load_file(path: Path, source: bytes | None = None, world: Environment | None = None) -> CheckedEnvironment:
    """Load a self-contained environment file, which defines `Environment` without constructor arguments.

    Args:
        path: the file.
        source: its bytes, if they were read and checked before. Exactly these bytes run, even if the file has changed.
        world: the benchmark in workers that a file of our own narrows: its constructor argument. None for other files.

    Raises:
        UserError: the file is missing.
        EnvironmentFault: the file does not import, or defines no valid `Environment`.
    """
    source = read_bytes(path, "run `dvc repro environments` to write it again") if source is None else source
    fingerprint = file_fingerprint(path.stem, source)
    module = ModuleType(f"captrain_environment_{path.stem}_{fingerprint}")
    module.__file__ = str(path)
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        environment = module.Environment() if world is None else module.Environment(world)
        missing = [
            name for name in ("name", "tools", "tasks", "open", "score", "reference") if not hasattr(environment, name)
        ]
    except Exception as error:
        raise EnvironmentFault(
            f"environment file {path} does not load: {type(error).__name__}: {error}",
            "fix the file, or delete it and run `dvc repro environments`",
        ) from error
    if missing:
        raise EnvironmentFault(f"environment file {path} lacks {', '.join(missing)}", "fulfil captrain.contract")
    return CheckedEnvironment(environment, str(path), fingerprint)


class Playable(Protocol):
    """What a policy plays: a `GuardedEpisode`, or one turn of a simulated user."""

    @property
    def messages(self) -> Sequence[Message]:
        """Messages that the policy sees before its first turn."""
        ...

    @property
    def tools(self) -> list[JsonObject]:
        """OpenAI function schemas."""
        ...

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `Episode.step`."""
        ...


class RunningEpisode:
    """An episode in progress, as a policy sees it.

    Args:
        key: seed of this rollout: equal keys give equal draws, whatever else is played.
        episode: opened by `start`.
        adapter: folder of the adapter to act with; "" for the base.
        hint: text that a model in training reads at the end of its system prompt. Only policies that GRPO samples
            through give hints. `messages`, `token_ids` and `mask` never contain it; `logprobs` are those of the model
            that read it, and `prompt_tokens` counts it.

    `rerendered` counts the turns at which rendering the dialogue again would have given other tokens than those that
    were read and written.

    `truncated` says why a dialogue was cut off because it outgrew the model: the agent's failure, not an infrastructure
    error. "" otherwise.
    """

    def __init__(self, key: str, episode: Playable, adapter: str = "", hint: str = "") -> None:
        self.key = key
        self.episode = episode
        self.adapter = adapter
        self.hint = hint
        self.tools: list[JsonObject] = []
        self.messages: list[Message] = []
        self.turns = 0
        self.token_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_tokens = self.completion_tokens = 0
        self.error: str | None = None
        self.rerendered = 0
        self.truncated = ""

    def start(self) -> bool:
        """Open the episode. Returns False after an infrastructure fault, which is then in `error`.

        A policy calls this right before it plays, so that only episodes in progress are open.
        """
        try:
            self.messages, self.tools = list(self.episode.messages), self.episode.tools
        except InfrastructureError as fault:
            self.error = str(fault)
        return self.error is None

    def advance(self, message: Message) -> list[Message]:
        """Take the policy's message, and return the replies; [] if the episode is over.

        An infrastructure fault ends the episode and is stored in `error`; the caller may retry.
        """
        self.turns += 1
        try:
            replies, over = self.episode.step(message)
        except InfrastructureError as fault:
            self.error = str(fault)
            return []
        self.messages += [message, *replies]
        return [] if over else replies


class Policy(Protocol):
    """Plays episodes. Results depend on each episode's key, never on batch size or order."""

    digest: str
    """Identity of everything that decides its behaviour, except adapters."""

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        """Play all episodes, and yield each when it is over, in any order."""
        ...
