"""Worlds that are played in messages: environments of our contract, and benchmarks whose worker plays dialogues."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from captrain.benchmarks.pool import Pool
from captrain.benchmarks.replay import Dialogue, Kind, Replay, ReplayCall, Replayed, key_of
from captrain.contract import CheckedEnvironment, calls_of, closing_episodes
from captrain.records import JsonObject, Message, Task

PUNCTUATION = ".,;:!?()-"


@dataclass(frozen=True)
class Run:
    """Outcome of a dialogue: of each call that was played its result, whether it was refused, and whether it changed
    the world (None: nobody can look), and the score."""

    calls: list[tuple[str, bool, bool | None]]
    parts: dict[str, float]
    passed: bool


class SpokenWorld:
    """A world whose replays are played as dialogues.

    Args:
        logged: the rollout's messages.
        solution: assistant messages of the reference.
        kinds: what the benchmark declares of its tools.
    """

    def __init__(self, logged: Sequence[Message], solution: Sequence[Message], kinds: Mapping[str, Kind]) -> None:
        self.solution, self.kinds = solution, kinds
        self._dialogue = Dialogue(logged, solution)
        self.reference = tuple(ReplayCall(*call) for message in solution for call in calls_of(message))
        self._changes: dict[tuple[str, str], bool] = {}

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[Run]:
        """Play assistant messages, each dialogue in a fresh world."""
        raise NotImplementedError

    @property
    def owed(self) -> tuple[str, ...]:
        """See `captrain.benchmarks.World`."""
        return self._owed

    @cached_property
    def _owed(self) -> tuple[str, ...]:
        """The words of the reference's last text without which its calls alone do not pass, found by leaving out."""
        closing = self.solution[-1].get("content") if self.solution and not calls_of(self.solution[-1]) else ""
        words = str(closing or "").split()
        if not words or self._passes(()) or not self._passes((" ".join(words),)):
            return ()
        places, pending = list(range(len(words))), [list(range(len(words)))]
        while pending:
            part = pending.pop()
            fewer = [place for place in places if place not in part]
            if self._passes(_phrases(words, fewer)):
                places = fewer
            elif len(part) > 1:
                pending += [part[: len(part) // 2], part[len(part) // 2 :]]
        phrases = list(_phrases(words, places))
        bare = [phrase.strip(PUNCTUATION) or phrase for phrase in phrases]
        phrases = bare if self._passes(tuple(bare)) else phrases
        place = 0
        while place < len(phrases):  # the values of a list are owed one by one
            for cut in range(1, len(parts := phrases[place].split())):
                pieces = [" ".join(parts[:cut]).strip(PUNCTUATION), " ".join(parts[cut:]).strip(PUNCTUATION)]
                if self._passes((*phrases[:place], *pieces, *phrases[place + 1 :])):
                    phrases[place : place + 1] = pieces
                    break
            place += 1
        return tuple(phrases)

    def _passes(self, texts: tuple[str, ...]) -> bool:
        return self.run([self._dialogue.messages(Replay(self.reference, texts))])[0].passed

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """See `captrain.benchmarks.World.play`. Calls that nobody was there to take any more count as refused, and so
        do those of a user, who has no tools in these worlds."""
        replayed: list[Replayed] = []
        runs = self.run([self._dialogue.messages(replay) for replay in replays])
        for replay, run in zip(replays, runs, strict=True):
            outcomes, results, failed, changed = iter(run.calls), list[str](), list[bool](), list[bool]()
            for call in replay.calls:
                result, is_refused, change = "", True, False
                if call.by == "assistant":
                    result, is_refused, change = next(outcomes, ("", True, False))
                results.append(result)
                failed.append(is_refused)
                changed.append(not is_refused and (self._matters(call) if change is None else change))
            replayed.append(Replayed(tuple(results), tuple(failed), tuple(changed), run.parts, run.passed))
        return replayed

    def _matters(self, call: ReplayCall) -> bool:
        """Tell whether a call changes what the check looks at, in a world that nobody can look into: the reference no
        longer passes without it, or with it, where it is none of its own."""
        if self.kinds.get(call.tool) == "read" or not self.reference:
            return False
        key = key_of(call)
        if key not in self._changes:
            remainder = tuple(entry for entry in self.reference if key_of(entry) != key)
            calls = remainder if len(remainder) < len(self.reference) else (*self.reference, call)
            closing = (str(self.solution[-1].get("content") or ""),)
            runs = self.run([self._dialogue.messages(Replay(entry, closing)) for entry in (self.reference, calls)])
            self._changes[key] = runs[0].passed and not runs[1].passed
        return self._changes[key]


class ContractWorld(SpokenWorld):
    """The world of a task of an environment of our contract.

    Args:
        target: the environment.
        task: of it.
        logged: the rollout's messages.
        kinds: what is declared of its tools beyond their schemas.
    """

    def __init__(
        self, target: CheckedEnvironment, task: Task, logged: Sequence[Message], kinds: Mapping[str, Kind]
    ) -> None:
        super().__init__(logged, target.reference(task), {**annotated(target.declared_tools), **kinds})
        self._target, self._task = target, task

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[Run]:
        """See `SpokenWorld.run`."""
        runs: list[Run] = []
        for messages in dialogues:
            episode = self._target.open(self._task)
            calls: list[tuple[str, bool, bool | None]] = []
            with closing_episodes([episode]):
                record = list(episode.messages)
                for message in messages:
                    replies, over = episode.step(message)
                    results = [reply for reply in replies if reply["role"] == "tool"]
                    # What ends an episode need not be answered.
                    answers = [(str(result.get("content") or ""), is_refusal(result), None) for result in results]
                    calls += [*answers, *[("", False, None)] * (len(calls_of(message)) - len(answers))]
                    record += [message, *replies]
                    if over:
                        break
            score = self._target.score(self._task, record)
            runs.append(Run(calls, score.parts, score.success))
        return runs


class WorkerDialogues(SpokenWorld):
    """The world of a task whose benchmark's worker plays dialogues.

    Args:
        pool: its workers.
        location: of the task, for each request.
        logged: the rollout's messages.
        solution: assistant messages of the reference.
        kinds: what the benchmark declares of its tools.
    """

    def __init__(
        self,
        pool: Pool,
        location: JsonObject,
        logged: Sequence[Message],
        solution: Sequence[Message],
        kinds: Mapping[str, Kind] | None = None,
    ) -> None:
        super().__init__(logged, solution, kinds or {})
        self._pool, self._location = pool, location

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[Run]:
        """See `SpokenWorld.run`."""
        answer = self._pool.call("replay", **self._location, dialogues=dialogues)
        return [Run([tuple(call) for call in e["calls"]], e["parts"], e["passed"]) for e in answer["replayed"]]


class MilestoneWorld(WorkerDialogues):
    """The world of a task that is judged by milestones, each of which one message meets: each text is owed as it is."""

    @property
    def owed(self) -> tuple[str, ...]:
        """See `captrain.benchmarks.World`."""
        return tuple(str(message["content"]) for message in self.solution if not calls_of(message))

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[Run]:
        """See `SpokenWorld.run`: owed words that were put beside others are a message of their own."""
        divided: list[list[Message]] = []
        for messages in dialogues:
            divided.append([])
            for message in messages:
                text, parts = str(message.get("content") or ""), list[str]()
                for line in [text] if self._dialogue.has_said(text) else text.split("\n"):
                    if parts and line not in self.owed and parts[-1] not in self.owed:
                        parts[-1] += f"\n{line}"
                    else:
                        parts.append(line)
                divided[-1].append({**message, "content": parts[0]})
                divided[-1] += [{"role": "assistant", "content": part} for part in parts[1:]]
        return super().run(divided)

    def returns(self, messages: Sequence[Message]) -> bool:
        """Tell whether the calls of a dialogue return here what they have returned in it, but for what is made by
        chance, such as ids, which is another with each play."""
        actions = [message for message in messages if message["role"] == "assistant"]
        logged = [message["content"] for message in messages if message["role"] == "tool"]
        first, second = ([call[0] for call in run.calls] for run in self.run([actions, actions]))
        results = [result if result == again else None for result, again in zip(first, second, strict=True)]
        return len(logged) == len(results) and all(
            result in (None, entry) for result, entry in zip(results, logged, strict=True)
        )


def _phrases(words: Sequence[str], places: Sequence[int]) -> tuple[str, ...]:
    """The words at some places; those that stand beside each other stay together."""
    phrases: list[list[str]] = []
    for before, place in zip([None, *places], places, strict=False):
        if before is None or before + 1 != place:
            phrases.append([])
        phrases[-1].append(words[place])
    return tuple(" ".join(phrase) for phrase in phrases)


def is_refusal(result: Message) -> bool:
    """Tell whether a tool's answer is an error: it says so, or is an object that names one, or begins with the word."""
    content = str(result.get("content") or "")
    if result.get("error") is True or content[:5].lower() == "error":
        return True
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and bool(answer.get("error"))


def annotated(tools: Sequence[JsonObject]) -> dict[str, Kind]:
    """Kinds of tools by annotations of their schemas: `kind`, as a benchmark may say it, or MCP's `readOnlyHint`."""
    kinds: dict[str, Kind] = {}
    for tool in tools:
        hints = {**tool.get("annotations", {}), **tool["function"].get("annotations", {})}
        if hints.get("kind") in get_args(Kind) or isinstance(hints.get("readOnlyHint"), bool):
            kinds[tool["function"]["name"]] = hints.get("kind") or ("read" if hints["readOnlyHint"] else "write")
    return kinds
