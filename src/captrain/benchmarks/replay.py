"""The world of a logged rollout's task, opened again: calls played in it, their effect and their score.

Nothing here asks a model: a user's turns are not played, only the calls of user and agent, the agent's texts, and
whether the dialogue came to its end. So a sequence that nobody has ever played can be judged, and what a rollout lacked
is proven by what makes it pass.

Environments of our contract, BFCL and AgentDojo are played in messages, and some of them judge what was done before the
user spoke again. So a replay of a rollout's own calls is the rollout's own messages (`Dialogue`), and edits stand where
they belong in them: calls that were left out are missing, changed ones keep their place, and what was put in is a
message of its own, in the turn that the reference has it in.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal, Protocol

from captrain.contract import calls_of
from captrain.records import JsonObject, Message, Rollout

Kind = Literal["read", "write", "handover", "think"]


@dataclass(frozen=True)
class ReplayCall:
    """One tool call to play. `by`: "assistant" or "user" (a user's own tools)."""

    tool: str
    arguments: JsonObject
    by: str = "assistant"


@dataclass(frozen=True)
class Replay:
    """Something to play in a task's world: calls in order, the assistant's texts (for what had to be told), and
    `ended`: the dialogue came to its proper end."""

    calls: tuple[ReplayCall, ...]
    texts: tuple[str, ...] = ()
    ended: bool = True


@dataclass(frozen=True)
class Replayed:
    """Outcome of a replay.

    results: (calls,) text of each result. failed: (calls,) refused by the tool. changed: (calls,) the state differs
    before and after. parts: named score parts. passed: the check of the task holds.
    """

    results: tuple[str, ...]
    failed: tuple[bool, ...]
    changed: tuple[bool, ...]
    parts: dict[str, float]
    passed: bool


class World(Protocol):
    """The world of one task.

    reference: the gold calls in order, () where there are none. owed: words that the assistant owes the user. kinds:
    what the benchmark declares of its tools; those it declares nothing of are absent.
    """

    @property
    def reference(self) -> tuple[ReplayCall, ...]: ...  # noqa: D102
    @property
    def owed(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def kinds(self) -> Mapping[str, Kind]: ...  # noqa: D102

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """Play each replay in a fresh world of the task; a search sends tens at once.

        Raises:
            InfrastructureError: the benchmark's worker failed.
        """
        ...


PROPER = ("", "user_stop", "agent_stop")
"""Endings by which somebody has closed a dialogue, or none is known."""


def logged_replay(rollout: Rollout) -> Replay:
    """A rollout as it was played: its calls of user and assistant, the assistant's texts, and whether it ended as a
    dialogue should (its score says it, or why it ended)."""
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


def key_of(call: ReplayCall) -> tuple[str, str]:
    """Equal for equal calls."""
    return call.tool, json.dumps(call.arguments, sort_keys=True)


@dataclass(frozen=True)
class _Placed:
    """A call at its place: the turn of the user's that it answers, the message that it stands in (None: its own)."""

    call: ReplayCall
    turn: int
    message: int | None = None


class _Course:
    """The assistant's messages of one dialogue: calls at their places, and the texts that close its turns."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.calls: list[_Placed] = []
        self.contents: dict[int, str] = {}
        self.closings: list[str] = []
        self.closed = False
        """Tell whether its last message closes a turn."""
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
        self.keys = [key_of(placed.call) for placed in self.calls]

    @property
    def texts(self) -> list[str]:
        """Everything that was said."""
        return [text for text in (*self.contents.values(), *self.closings) if text.strip()]


class Dialogue:
    """Course of replays of one rollout's task.

    Args:
        logged: the rollout's messages.
        reference: assistant messages of the reference; empty where there is none.
    """

    def __init__(self, logged: Sequence[Message], reference: Sequence[Message]) -> None:
        self._logged, self._reference = _Course(logged), _Course(reference)

    def has_said(self, text: str) -> bool:
        """Tell whether the rollout has a text as it is."""
        return text in self._logged.texts

    def messages(self, replay: Replay) -> list[Message]:
        """The assistant messages to play."""
        calls = [call for call in replay.calls if call.by == "assistant"]
        logged, reference = self._logged, self._reference
        is_reference = [key_of(call) for call in calls] == reference.keys
        if is_reference and Counter(replay.texts) != Counter(logged.texts):
            entries = [replace(placed, call=call) for placed, call in zip(reference.calls, calls, strict=True)]
            return _written(reference, entries, replay, reference.closings)
        # A dialogue that was cut off in the middle of its calls is brought to its end, where that is asked for.
        is_cut = bool(logged.calls) and not logged.closed and replay.ended
        return _written(logged, self._places(calls), replay, reference.closings, len(reference.closings) * is_cut)

    def _places(self, calls: Sequence[ReplayCall]) -> list[_Placed]:
        """The calls at the rollout's own places; new ones in the reference's turn, as far as order allows."""
        sources = self._sources(calls)
        logged_turns = [None if source is None else self._logged.calls[source].turn for source in sources]
        turns: dict[tuple[str, str], list[int]] = {}
        for placed, key in zip(self._reference.calls, self._reference.keys, strict=True):
            turns.setdefault(key, []).append(placed.turn)
        # After the words that closed the dialogue nobody takes calls any more.
        last = len(self._logged.closings) - 1
        if not self._logged.closed:
            last = max([last, 0, *(placed.turn for placed in self._reference.calls)])
        result: list[_Placed] = []
        earliest = 0
        for index, (call, source) in enumerate(zip(calls, sources, strict=True)):
            due = turns.get(key_of(call), [])
            expected = due.pop(0) if due else earliest
            if source is not None:
                result.append(replace(self._logged.calls[source], call=call))
            else:
                latest = next((turn for turn in logged_turns[index:] if turn is not None), max(last, earliest))
                result.append(_Placed(call, min(max(expected, earliest), latest)))
            earliest = result[-1].turn
        return result

    def _sources(self, calls: Sequence[ReplayCall]) -> list[int | None]:
        """For each call the logged one that it is, or that it takes the place of."""
        sources: list[int | None] = [None] * len(calls)
        matcher = SequenceMatcher(None, self._logged.keys, [key_of(call) for call in calls], autojunk=False)
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
    course: _Course, placed: Sequence[_Placed], replay: Replay, closings: Sequence[str], least: int = 0
) -> list[Message]:
    """The messages of placed calls in at least so many turns, with the texts of a course that the replay has, and what
    it has beyond them. A turn that the course does not have is closed as others do."""
    further = list((Counter(replay.texts) - Counter(course.texts)).elements())
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
