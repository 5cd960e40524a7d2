"""Common ground of the workers of benchmarks with a scripted user: open episodes, and calls as agents write them.

An agent writes anything. A call is tried if its name and arguments are of the form of a call and of bounded size; all
else is answered with an error, and so is a call that takes too long.
"""

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from worker_loop import BadRequest

Message = dict[str, Any]
DEEPEST, LARGEST, LONGEST_TEXT = 20, 10**15, 100_000
"""Bounds of arguments, beyond which a call is refused: levels of nesting, numbers, characters."""
PATIENCE = 2.0
"""Seconds of CPU for one call. By the clock a busy machine would decide a score."""


def calls_of(message: Message) -> "list[tuple[str, Any, Any]]":
    """(id, tool, arguments) of each call; arguments that are no JSON object stay what they are."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments or "{}")
        calls.append((call.get("id") if isinstance(call.get("id"), str) else "", function.get("name"), arguments))
    return calls


def objection(arguments: object) -> str:
    """Explain why arguments are not tried, "" where they are."""
    if not isinstance(arguments, dict):
        return "arguments are no JSON object"
    pending: list[tuple[object, int]] = [(arguments, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > DEEPEST:
            return "arguments are nested too deeply"
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
            return "a number is too large"
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            return "a text is too long"
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending += [(element, depth + 1) for element in inner]
    return ""


@contextmanager
def patience() -> Iterator[None]:
    """Interrupt what takes too long with a TimeoutError."""

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {PATIENCE:g} s")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class ScriptedEpisode(ABC):
    """One task being played."""

    system = ""
    """The system prompt; "" for none."""
    termination: "str | None" = None
    """Reason of its end; None while it goes on."""
    replay: "list[tuple[str, bool, bool]] | None" = None
    """Result of each call so far, whether it was refused, and whether it changed the world; None where nobody asks
    for it."""

    @abstractmethod
    def opening(self) -> "list[Message]":
        """Return what the user says first."""

    @abstractmethod
    def tools(self) -> "list[dict[str, Any]]":
        """The schemas of the tools that are offered at the beginning."""

    @abstractmethod
    def result(self, tool: object, arguments: object) -> str:
        """Make a call, of whatever form the agent gave it, and return its result as text."""

    @abstractmethod
    def take(self, message: Message) -> "list[Message]":
        """Answer an assistant message, by results of its calls or words of the user."""

    @abstractmethod
    def state(self) -> object:
        """The world as something that can be compared; equal worlds give equal states."""

    @abstractmethod
    def refuses(self, result: str) -> bool:
        """Tell whether a result is a refusal."""

    @abstractmethod
    def score(self, messages: "list[Message]") -> "dict[str, Any]":
        """The score of this episode, in which the agent has said these messages."""

    def results(self, message: Message) -> "list[Message]":
        """The tool messages that answer the calls of a message, in order."""
        replies = []
        for identity, tool, arguments in calls_of(message):
            before = self.state() if self.replay is not None else None
            content = self.result(tool, arguments)
            if self.replay is not None:
                self.replay.append((content, self.refuses(content), self.state() != before))
            replies.append({"role": "tool", "tool_call_id": identity, "name": str(tool), "content": content})
        return replies

    def seen(self, messages: "list[Message]") -> "dict[str, Any]":
        """Report messages that have come: with them, whose turn it is, and if and why the episode is over."""
        is_over = self.termination is not None
        return {
            "turn": None if is_over else "agent",
            "done": is_over,
            "termination": self.termination,
            "messages": messages,
        }


class Episodes:
    """The open episodes of a worker, and the operations on them.

    Args:
        make: an episode of a task, by the task's id and, where a log tells more of its world, by that; raises
            BadRequest where there is no such task.
    """

    def __init__(self, make: "Callable[..., ScriptedEpisode]") -> None:
        self.make = make
        self.open: dict[str, ScriptedEpisode] = {}

    def operations(self) -> "dict[str, Callable[..., object]]":
        """By name, for `serve`."""
        operations = (self.reset, self.step, self.idle, self.replay, self.close)
        return {operation.__name__: operation for operation in operations}

    def reset(self, task_id: str, user: str = "scripted") -> "dict[str, Any]":
        """Open a task."""
        episode = self.make(task_id)
        name = str(len(self.open) and max(map(int, self.open)) + 1)
        self.open[name] = episode
        opening = episode.opening()
        return {"episode": name, "system": episode.system, "tools": episode.tools(), **episode.seen(opening)}

    def step(self, episode: str, role: str, message: Message) -> "dict[str, Any]":
        """The agent speaks."""
        if episode not in self.open:
            raise BadRequest(f"there is no episode {episode!r}")
        if self.open[episode].termination is not None:
            raise BadRequest("the episode is over")
        return self.open[episode].seen(self.open[episode].take(message))

    def idle(self, task_id: str) -> "dict[str, Any]":
        """The record of an agent that says nothing to whatever the user asks."""
        episode = self.make(task_id)
        messages = episode.opening()
        while episode.termination is None:
            silence = {"role": "assistant", "content": ""}
            messages = [*messages, silence, *episode.take(silence)]
        return {"messages": messages}

    def replay(self, task_id: str, dialogues: "list[list[Message]]", **world: object) -> "dict[str, Any]":
        """Assistant messages, played in fresh worlds: what each call led to, and the score."""
        replayed = []
        for messages in dialogues:
            episode = self.make(task_id, **world)
            episode.opening()
            episode.replay = []
            for message in messages:
                if episode.termination is None:
                    episode.take(message)
            score = episode.score(messages)
            replayed.append({"calls": episode.replay, "parts": score["parts"], "passed": score["success"]})
        return {"replayed": replayed}

    def close(self, episode: str) -> "dict[str, Any]":
        """Drop an episode."""
        self.open.pop(episode, None)
        return {}


def batches(calls: "Sequence[tuple[str, dict[str, Any]]]", rounds: int) -> "list[Message]":
    """Calls, as tool and arguments, in assistant messages: one each but where there are more calls than rounds."""
    size = -(-len(calls) // rounds) or 1
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return [
        {"role": "assistant", "content": "", "tool_calls": functions[start : start + size]}
        for start in range(0, len(functions), size)
    ]
