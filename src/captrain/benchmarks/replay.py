"""Replays in the world of a logged rollout's task: calls played in it, their effects and their score.

No model is asked. The user's turns are not played, only the calls of user and agent, the agent's texts, and whether the
dialogue came to its proper end. So call sequences that no rollout contains can be judged, and what makes a rollout pass
proves what it lacked.

Environments of our contract, BFCL and AgentDojo are played in messages, and some of them judge what was done before the
user spoke again. So a replay of a rollout's own calls is the rollout's own messages (`Dialogue`), and edits take their
place in them: removed calls are missing, changed calls keep their place, and added calls are messages of their own, in
the turn in which the reference has them.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Literal, Protocol

from captrain.contract import calls_of
from captrain.records import JsonObject, Message, Rollout

ToolKind = Literal["read", "write", "handover", "think", "environment", "unknown"]
"""What a tool does. An `environment` is a shell, an interpreter, an editor, a browser or a search engine: the agent
writes its arguments itself. No cause rests on an `unknown` tool."""


@dataclass(frozen=True)
class ReplayCall:
    """One tool call to play. by: "assistant", or "user" for a user's own tools."""

    tool: str
    arguments: JsonObject
    by: str = "assistant"

    @cached_property
    def key(self) -> tuple[str, str]:
        """Tool and arguments, equal for equal calls."""
        return self.tool, SORTED.encode(self.arguments)


@dataclass(frozen=True)
class Replay:
    """What to play in a task's world.

    calls: in order. texts: the assistant's, for the information that the task owes. ended: the dialogue came to its
    proper end.
    """

    calls: tuple[ReplayCall, ...]
    texts: tuple[str, ...] = ()
    ended: bool = True


@dataclass(frozen=True)
class Replayed:
    """Outcome of a replay.

    results: (calls,) text of each result. failed: (calls,) refused by the tool. changed: (calls,) the call changed the
    state. parts: named score parts. passed: the task's check holds.
    """

    results: tuple[str, ...]
    failed: tuple[bool, ...]
    changed: tuple[bool, ...]
    parts: dict[str, float]
    passed: bool


class World(Protocol):
    """The world of one task.

    reference: the gold calls in order, () for none. owed: words that the assistant owes the user. kinds: the kinds of
    tools that the benchmark declares.
    """

    @property
    def reference(self) -> tuple[ReplayCall, ...]: ...  # noqa: D102
    @property
    def owed(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def kinds(self) -> Mapping[str, ToolKind]: ...  # noqa: D102

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """Play each replay in a fresh world of the task.

        Raises:
            InfrastructureError: the benchmark's worker failed.
        """
        ...

    def passes(self, replay: Replay) -> bool:
        """Return whether a replay passes, without asking what its calls change, which may take further plays.

        Raises:
            InfrastructureError: the benchmark's worker failed.
        """
        ...


SORTED = json.JSONEncoder(sort_keys=True)
"""`json.dumps` would make an encoder for each call."""
PROPER = ("", "user_stop", "agent_stop")
"""Endings of a properly closed dialogue; "" if the ending is unknown."""


def logged_replay(rollout: Rollout) -> Replay:
    """A rollout as it was played. Its score or its ending tells whether it ended properly."""
    calls = [
        ReplayCall(tool, arguments, message["role"])
        for message in rollout.messages
        if message["role"] in ("assistant", "user")
        for tool, arguments in calls_of(message)
    ]
    spoken = [message.get("content") for message in rollout.messages if message["role"] == "assistant"]
    parts = rollout.score.parts if rollout.score else {}
    ended = parts["ended"] == 1.0 if "ended" in parts else rollout.task.facts.ending in PROPER
    return Replay(
        tuple(calls),
        tuple(text for text in spoken if isinstance(text, str) and text.strip()),
        ended and not rollout.truncated,
    )


@dataclass(frozen=True)
class _Placed:
    """A call with its place: the user's turn that it answers, and its message (None: one of its own)."""

    call: ReplayCall
    turn: int
    message: int | None = None

    def with_call(self, call: ReplayCall) -> "_Placed":
        """Another call at the same place."""
        return _Placed(call, self.turn, self.message)


class ParsedDialogue:
    """The assistant's messages of one dialogue: calls with their places, and the texts that close turns."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.calls: list[_Placed] = []
        self.contents: dict[int, str] = {}
        self.closings: list[str] = []
        self.closed = False
        """Whether the last message closes a turn."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            content = message.get("content")
            text = content if isinstance(content, str) else ""
            calls = calls_of(message)
            self.closed = not calls
            if calls:
                self.contents[number] = text
                self.calls += [_Placed(ReplayCall(*call), len(self.closings), number) for call in calls]
            else:
                self.closings.append(text)
        self.keys = [placed.call.key for placed in self.calls]
        self.texts = tuple(text for text in (*self.contents.values(), *self.closings) if text.strip())
        """All texts that are not blank."""


class Dialogue:
    """Turns replays of one rollout's task into assistant messages.

    Args:
        logged: the course of the rollout.
        reference: the course of the reference; an empty one for none.
    """

    def __init__(self, logged: ParsedDialogue, reference: ParsedDialogue) -> None:
        self._logged, self._reference = logged, reference

    def has_said(self, text: str) -> bool:
        """Return whether the rollout contains exactly this text."""
        return text in self._logged.texts

    def follows_reference(self, replay: Replay) -> bool:
        """Return whether a replay makes the reference's calls and says something else than the rollout.

        Its messages are then the reference's.
        """
        keys = [call.key for call in replay.calls if call.by == "assistant"]
        return keys == self._reference.keys and sorted(replay.texts) != sorted(self._logged.texts)

    def messages(self, replay: Replay) -> list[Message]:
        """The assistant messages to play."""
        calls = [call for call in replay.calls if call.by == "assistant"]
        keys = [call.key for call in calls]
        logged, reference = self._logged, self._reference
        if self.follows_reference(replay):
            entries = [placed.with_call(call) for placed, call in zip(reference.calls, calls, strict=True)]
            return _written(reference, entries, replay, reference.closings)
        # If a dialogue was cut off in the middle of its calls and the replay ends, add the reference's remaining turns.
        is_cut = bool(logged.calls) and not logged.closed and replay.ended
        return _written(logged, self._places(calls, keys), replay, reference.closings, len(reference.closings) * is_cut)

    def _places(self, calls: Sequence[ReplayCall], keys: Sequence[tuple[str, str]]) -> list[_Placed]:
        """Give calls the rollout's own places, and new calls the reference's turn, as far as the order allows."""
        sources = self._sources(calls, keys)
        logged_turns = [None if source is None else self._logged.calls[source].turn for source in sources]
        turns: dict[tuple[str, str], list[int]] = {}
        for placed, key in zip(self._reference.calls, self._reference.keys, strict=True):
            turns.setdefault(key, []).append(placed.turn)
        # After the closing words of the dialogue nobody takes calls.
        last = len(self._logged.closings) - 1
        if not self._logged.closed:
            last = max([last, 0, *(placed.turn for placed in self._reference.calls)])
        result: list[_Placed] = []
        earliest = 0
        for index, (call, source) in enumerate(zip(calls, sources, strict=True)):
            due = turns.get(keys[index], [])
            expected = due.pop(0) if due else earliest
            if source is not None:
                result.append(self._logged.calls[source].with_call(call))
            else:
                latest = next((turn for turn in logged_turns[index:] if turn is not None), max(last, earliest))
                result.append(_Placed(call, min(max(expected, earliest), latest)))
            earliest = result[-1].turn
        return result

    def _sources(self, calls: Sequence[ReplayCall], keys: Sequence[tuple[str, str]]) -> list[int | None]:
        """For each call the index of the logged call that it equals or replaces, or None."""
        sources: list[int | None] = [None] * len(calls)
        if keys == self._logged.keys:
            return [*range(len(calls))]
        matcher = SequenceMatcher(None, self._logged.keys, keys, autojunk=False)
        for tag, first, end, start, stop in matcher.get_opcodes():
            if tag == "equal":
                sources[start:stop] = range(first, end)
            elif tag == "replace":
                place = first
                for index in range(start, stop):
                    tools = [self._logged.calls[number].call.tool for number in range(place, end)]
                    if calls[index].tool in tools:
                        place += tools.index(calls[index].tool) + 1
                        sources[index] = place - 1
        return sources


def _written(
    course: ParsedDialogue, placed: Sequence[_Placed], replay: Replay, closings: Sequence[str], least: int = 0
) -> list[Message]:
    """Write placed calls as messages.

    Args:
        course: its texts are used if the replay has them.
        placed: the calls.
        replay: texts of it that the course lacks are added to the last message.
        closings: texts that close turns beyond the course's.
        least: minimum number of turns.
    """
    is_told = replay.texts == course.texts  # as in most replays; counting takes long
    further = [] if is_told else list((Counter(replay.texts) - Counter(course.texts)).elements())
    turns = max([least, len(course.closings), *(entry.turn + 1 for entry in placed)])
    closings = [*course.closings, *closings[len(course.closings) :], *[""] * turns]
    messages: list[Message] = []
    for turn in range(turns):
        entries = [entry for entry in placed if entry.turn == turn]
        for index, entry in enumerate(entries):
            call: JsonObject = {
                "id": f"call_{len(messages)}_{index}",
                "type": "function",
                "function": {"name": entry.call.tool, "arguments": entry.call.arguments},
            }
            if index and entry.message is not None and entry.message == entries[index - 1].message:
                messages[-1]["tool_calls"].append(call)
            else:
                content = course.contents.get(entry.message, "") if entry.message is not None else ""
                messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        is_last = turn == turns - 1
        text = closings[turn]
        if is_last:
            text = "\n".join([*([text] if text in replay.texts else []), *further])
        if turn < len(course.closings) or not is_last or replay.ended or further:
            messages.append({"role": "assistant", "content": text})
    if not messages and replay.ended:
        messages.append({"role": "assistant", "content": "\n".join(further)})
    return messages
