"""The one environment contract, for benchmarks and synthesized environments alike.

JSON in, JSON out, so that an episode can live in another process or another venv. The score is a function of the
task and the recorded messages alone, so that it can be computed again by someone who does not trust the episode.
A synthesized environment is one self-contained, pure-standard-library Python file that defines a class
`Environment` of this contract; because such a file must not import captrain, tasks and scores cross the boundary
as plain dicts: tasks {"id", "split", "data"}, scores {"reward", "success", "parts"}. `CheckedEnvironment` wraps either
kind and turns whatever the other side raises or returns into records or an `EnvironmentFault` that names the task.
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
"""Seconds for one call of an environment: more than the minutes that a user takes whom a served model plays."""


class Episode(Protocol):
    """One task being played. It may also have `tools`, where they are not those of the environment, and `close()`,
    where it holds something outside of this process."""

    messages: list[Message]
    """System and user messages that the agent sees before its first turn."""

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """Take an assistant message; return the tool results and user replies that answer it, and whether the
        episode is over (nobody then answers what is returned: a user's closing words, or nothing)."""
        ...


class Environment(Protocol):
    """Members that a benchmark or a synthesized environment offers.

    It may also have `about` (JSON: version, data hashes, simulated user, whatever else decides its behaviour beyond
    its own file), `kinds` ({tool: "read", "write" or "handover"}), and `idle(task)`: the messages of an episode in
    which the agent does nothing. One whose own side draws at random opens tasks with `open(task, key)`; equal keys give
    equal draws. One that has only so many tasks says so by `size(split)`; training then uses them again, in other
    trials. Its class may say by `absences` ({what: what follows}) what of this it does not have, such as `reference`;
    plans read that before it is built.
    """

    name: str
    tools: list[JsonObject]
    """OpenAI function schemas of the tools the agent may call."""

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """List the first `count` tasks of a split; the same call gives the same tasks in any process."""
        ...

    def open(self, task: JsonObject) -> Episode:
        """Open a task as an episode."""
        ...

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """Score recorded messages: {"reward": [0, 1], "success": bool, "parts": {name: float}}."""
        ...

    def reference(self, task: JsonObject) -> list[Message]:
        """Return the assistant messages of a reference solution; played in order they score 1.0.

        Empty where none is known.
        """
        ...


IDLE: Message = {"role": "assistant", "content": ""}
"""Turn of an agent that does nothing."""


class Overdue(BaseException):
    """A call that took too long; no `except Exception` of the code that is called holds it up."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Overdue` in the block after so many seconds. Python code is interrupted, in the main thread, where nothing
    else has set the timer; anywhere else nothing is."""
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
    """An environment behind its contract: records out, faults attributed.

    Args:
        environment: the object that fulfils the contract. Its `tools` and `about` are read when they are asked for:
            an environment that lives in another process starts it then.
        source: where it comes from, for messages (a file, or a class path).
        code: identity of its code and parameters.
    """

    def __init__(self, environment: Environment, source: str, code: str) -> None:
        self.environment = environment
        self.source = source
        self.name = environment.name
        self._code = code
        self._keyed = "key" in inspect.signature(environment.open).parameters

    @property
    def tools(self) -> list[JsonObject]:
        """OpenAI function schemas of all tools."""
        return self.call("tools", "no task", lambda: self.environment.tools)

    @property
    def declared_tools(self) -> list[JsonObject]:
        """The schemas, annotated with what the environment declares that its tools do: for whoever reads rollouts, and
        never for the agent."""
        kinds: dict[str, str] = self.call("kinds", "no task", lambda: getattr(self.environment, "kinds", {}))
        return [
            {**tool, "annotations": {**tool.get("annotations", {}), "kind": kinds[name]}} if name in kinds else tool
            for tool in self.tools
            for name in [tool["function"]["name"]]
        ]

    @property
    def about(self) -> JsonObject:
        """Facts that the environment gives of itself: versions, data hashes, simulated user; {} where it gives none."""
        return self.call("about", "no task", lambda: getattr(self.environment, "about", {}))

    @property
    def fingerprint(self) -> str:
        """Identity of its behaviour: changes when code, parameters, or what it says of itself change."""
        return digest(self._code, self.about) if self.about else self._code

    def call(self, operation: str, task: str, function: Callable[[], T]) -> T:
        """Attribute what the other side raises, once, here.

        Only this boundary may catch everything: the code beyond it is not ours.
        """
        try:
            with time_limit(CALL_LIMIT):
                return function()
        except (InfrastructureError, UserError):
            raise
        except Overdue as error:
            raise EnvironmentFault(
                f"environment {self.name} ({self.source}) did not return within {CALL_LIMIT:g} s from {operation} on "
                f"{task}",
                "mend what does not end (`captrain check-benchmark` finds the line); rollouts already whole are kept",
            ) from error
        except Exception as error:
            raise EnvironmentFault(
                f"environment {self.name} ({self.source}) raised {type(error).__name__}: {error} "
                f"in {operation} on {task}",
                "mend the environment file; rollouts already whole are kept and a new run goes on from them",
            ) from error

    def tasks(self, split: Split, count: int, *, fewer: bool = False) -> list[Task]:
        """List the first `count` tasks of a split; with `fewer` all that there are, where a small world has less.

        Raises:
            EnvironmentFault: not that many, a repeated id, or a task that claims another split.
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
                f"split {split} where {count} were asked for",
                "ask for fewer tasks of this split",
            )
        if wrong := next((task for task in tasks if task.split != split), None):
            raise EnvironmentFault(
                f"environment {self.name} gave task {wrong.id} of split {wrong.split} as {split}",
                "splits never mix: return tasks of the split that was asked for",
            )
        return tasks

    def size(self, split: Split) -> int | None:
        """Count the tasks of a split; None where there are as many as one asks for."""
        size: Callable[[Split], int] | None = getattr(self.environment, "size", None)
        return None if size is None else self.call("size", f"split {split}", lambda: size(split))

    def open(self, task: Task, key: str = "") -> "GuardedEpisode":
        """Open a task as an episode, when its messages are first asked for; `key` names the randomness of the
        environment's side."""
        return GuardedEpisode(self, task, key)

    def _open_episode(self, task: Task, key: str) -> Episode:
        opener: Callable[..., Episode] = self.environment.open
        options = {"key": key} if self._keyed else {}
        return self.call("open", task.id, lambda: opener(task.model_dump(), **options))

    def score(self, task: Task, messages: Sequence[Message]) -> Score:
        """Score recorded messages.

        Raises:
            EnvironmentFault: the environment raised, or its reward is not a number in [0, 1].
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
        """Play assistant messages in order until they run out or the episode ends; returns all messages."""
        episode = self.open(task)
        with closing_episodes([episode]):
            messages = list(episode.messages)
            for action in actions:
                replies, over = episode.step(action)
                messages += [action, *replies]
                if over:
                    break
        return messages

    def floor(self, task: Task) -> Score:
        """Score an agent that does nothing."""
        idle: Callable[[JsonObject], list[Message]] | None = getattr(self.environment, "idle", None)
        if idle is None:
            return self.score(task, self.play(task, [IDLE]))
        return self.score(task, self.call("idle", task.id, lambda: idle(task.model_dump())))


class GuardedEpisode:
    """An episode whose faults are attributed to its environment and task; opened when first asked for anything."""

    def __init__(self, target: CheckedEnvironment, task: Task, key: str) -> None:
        self._target = target
        self._task = task
        self._key = key
        self._opening: Episode | None = None
        self._closed = False

    @property
    def _episode(self) -> Episode:
        # No cached_property: in Python 3.11 that opens the episodes of all threads one after another.
        if self._opening is None:
            self._opening = self._target._open_episode(self._task, self._key)
        return self._opening

    @property
    def messages(self) -> list[Message]:
        """See `Episode.messages`."""
        return self._episode.messages

    @property
    def tools(self) -> list[JsonObject]:
        """OpenAI function schemas of the tools that the agent has in this episode."""
        return getattr(self._episode, "tools", None) or self._target.tools

    @property
    def is_open(self) -> bool:
        """True from its opening until it is closed."""
        return self._opening is not None and not self._closed

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `Episode.step`.

        Raises:
            EnvironmentFault: the episode raised, or its answer is not of the contract.
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
        """Let go of what the episode holds outside of this process, if it was opened and is not closed yet."""
        if self.is_open:
            self._closed = True
            if (close := getattr(self._opening, "close", None)) is not None:
                self._target.call("close", self._task.id, close)

    def reference(self) -> list[Message]:
        """Return the assistant messages of the task's reference solution, for scripted policies."""
        return self._target.reference(self._task)


def _answers(message: object) -> bool:
    """Return whether something is a message that can answer an agent's."""
    return isinstance(message, dict) and message.get("role") in ("tool", "user")


@contextmanager
def closing_episodes(episodes: Iterable[GuardedEpisode]) -> Iterator[None]:
    """Close episodes when the block ends, however it ends: no fault of one leaves another open.

    Raises:
        EnvironmentFault: an episode does not close. It is raised when all others are closed; where the block has
            raised, its own error goes on, with this one as a note.
    """
    try:
        yield
    except BaseException as error:
        for fault in _close(episodes):
            error.add_note(f"and when its episodes were closed: {fault}")
        raise
    if faults := _close(episodes):
        raise faults[0]


def _close(episodes: Iterable[GuardedEpisode]) -> list[Exception]:
    """Close all episodes, and return what closing raised."""
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
    """Return the (name, arguments) pairs of an assistant message; arguments given as JSON text are parsed, and text
    that is not a JSON object comes back as {"": text} so that it matches no schema."""
    calls: list[tuple[str, JsonObject]] = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):  # the latter of some thousand brackets
                arguments = {"": arguments}
        calls.append((call["function"]["name"], arguments if isinstance(arguments, dict) else {"": arguments}))
    return calls


def file_fingerprint(name: str, source: bytes) -> str:
    """Identify an environment file that says nothing of itself by its name without the suffix, and its bytes."""
    return digest(name, bytes_digest(source))


def load_file(path: Path, source: bytes | None = None, world: Environment | None = None) -> CheckedEnvironment:
    """Load a self-contained environment file (it must define `Environment`, constructed without arguments).

    Args:
        path: of the file.
        source: its bytes, where somebody has read and checked them; None: they are read now. What runs are these bytes,
            never what else may lie there by then, a compiled file beside it included.
        world: what a file of ours is constructed with that narrows a benchmark in workers; None for all others.

    Raises:
        UserError: the file is missing.
        EnvironmentFault: the file does not import, or defines no Environment of the contract.
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
            "mend the file, or delete it and run `dvc repro environments`",
        ) from error
    if missing:
        raise EnvironmentFault(f"environment file {path} lacks {', '.join(missing)}", "fulfil captrain.contract")
    return CheckedEnvironment(environment, str(path), fingerprint)


class Playable(Protocol):
    """Members of an episode that a play needs: `GuardedEpisode`, or one turn of a simulated user."""

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
    """One episode in progress, as a policy sees it.

    Args:
        key: names the randomness of this play: equal keys give equal draws, whatever is played beside it.
        episode: not necessarily open yet.
        adapter: folder of the adapter to act with, "" for the base.
        hint: what a model that is being trained reads at the end of its system prompt, beyond the episode's messages.
            Only policies that GRPO samples through give hints. `messages`, `token_ids` and `mask` never hold it;
            `logprobs` are those of the model that read it, and `prompt_tokens` counts it.

    `rerendered` counts the turns before which the dialogue, had it been rendered anew, would have been other tokens
    than those that were read and written; a served model that is sent token ids never reads these others.

    `truncated` says why a dialogue ended before its time: it has outgrown the model. That is the agent's failure and no
    error of the infrastructure. "" for all others.
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
        """Open the episode; False when an infrastructure fault kept it shut, which is then in `error`.

        A policy calls this right before it plays, so that no more episodes are open than are being played.
        """
        try:
            self.messages, self.tools = list(self.episode.messages), self.episode.tools
        except InfrastructureError as fault:
            self.error = str(fault)
        return self.error is None

    def advance(self, message: Message) -> list[Message]:
        """Take the policy's message; return what answers it, or [] when the episode is over.

        An infrastructure fault ends the play and is kept in `error`: it is the caller's to retry.
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
    """Player of episodes. Results depend on each play's key alone, never on batch size or order."""

    digest: str
    """Identity of everything that decides what the policy does, adapters apart."""

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        """Play all to their ends, yielding each when it is over, in any order."""
        ...
