"""Worlds that are replayed as dialogues: environments of our contract, and benchmarks whose worker plays dialogues."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from captrain.benchmarks.pool import Pool
from captrain.benchmarks.replay import Dialogue, ParsedDialogue, Replay, ReplayCall, Replayed, ToolKind
from captrain.contract import CheckedEnvironment, calls_of, closing_episodes
from captrain.records import JsonObject, Message, Task

PUNCTUATION = ".,;:!?()-"
NOT_TAKEN = ("", True, False)
"""Outcome of a call that nobody took."""


@dataclass(frozen=True)
class PlayedDialogue:
    """Outcome of a dialogue.

    calls: of each call that was played its result, whether it was refused, and whether it changed the world (None: the
    world cannot be inspected).
    """

    calls: list[tuple[str, bool, bool | None]]
    parts: dict[str, float]
    passed: bool


class DialogueWorld:
    """A world whose replays are played as dialogues.

    Args:
        logged: the rollout's messages.
        solution: assistant messages of the reference.
        kinds: the tool kinds that the benchmark declares.
        reference_world: the world of the same task whose rollout is the reference. It finds out once, for all trials of
            the task, what calls change, which words are owed and how the reference ends. None: this world does.
    """

    def __init__(
        self,
        logged: Sequence[Message],
        solution: Sequence[Message],
        kinds: Mapping[str, ToolKind],
        reference_world: "DialogueWorld | None" = None,
    ) -> None:
        self.solution, self.kinds = solution, kinds
        self._reference_world = reference_world or self
        self._course: ParsedDialogue = reference_world._course if reference_world else ParsedDialogue(solution)
        self._dialogue = Dialogue(ParsedDialogue(logged), self._course)
        self.reference = tuple(placed.call for placed in self._course.calls)
        self._changes: dict[tuple[str, str], bool] = {}
        self._known: dict[tuple[object, ...], PlayedDialogue] = {}
        """Outcomes by replay: a search for a repair asks for many of them again."""
        self.played: dict[str, PlayedDialogue] = {}
        """Outcomes by the messages as JSON. Worlds of one task may share them."""

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[PlayedDialogue]:
        """Play assistant messages, each dialogue in a fresh world."""
        raise NotImplementedError

    def _outcomes(self, replays: Sequence[Replay]) -> list[PlayedDialogue]:
        """Play replays, equal dialogues once."""
        keys = [_key_of_replay(replay) for replay in replays]
        new = {key: replay for key, replay in zip(keys, replays, strict=True) if key not in self._known}
        if self._reference_world is not self:
            shared = {key: replay for key, replay in new.items() if self._dialogue.follows_reference(replay)}
            self._known |= zip(shared, self._reference_world._outcomes([*shared.values()]), strict=True)
            new = {key: replay for key, replay in new.items() if key not in shared}
        if new:
            dialogues = [self._dialogue.messages(replay) for replay in new.values()]
            texts = [json.dumps(messages) for messages in dialogues]
            fresh = {text: messages for text, messages in zip(texts, dialogues, strict=True) if text not in self.played}
            if fresh:
                self.played.update(zip(fresh, self.run([*fresh.values()]), strict=True))
            self._known |= {key: self.played[text] for key, text in zip(new, texts, strict=True)}
        return [self._known[key] for key in keys]

    @property
    def owed(self) -> tuple[str, ...]:
        """See `captrain.benchmarks.World`."""
        return self._reference_world._owed

    @cached_property
    def _owed(self) -> tuple[str, ...]:
        """The words of the reference's last text that its calls need to pass, found by leaving words out."""
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
        while place < len(phrases):  # split lists: each value is owed by itself
            parts = phrases[place].split()
            for cut in range(1, len(parts)):
                pieces = [" ".join(parts[:cut]).strip(PUNCTUATION), " ".join(parts[cut:]).strip(PUNCTUATION)]
                if self._passes((*phrases[:place], *pieces, *phrases[place + 1 :])):
                    phrases[place : place + 1] = pieces
                    break
            place += 1
        return tuple(phrases)

    def _passes(self, texts: tuple[str, ...]) -> bool:
        return self.passes(Replay(self.reference, texts))

    def passes(self, replay: Replay) -> bool:
        """See `captrain.benchmarks.World.passes`."""
        return self._outcomes([replay])[0].passed

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """See `captrain.benchmarks.World.play`. Calls after the episode's end count as refused. So do calls of the
        user, who has no tools in these worlds."""
        replayed: list[Replayed] = []
        runs = self._outcomes(replays)
        for replay, run in zip(replays, runs, strict=True):
            played = iter(run.calls)
            outcomes = [next(played, NOT_TAKEN) if call.by == "assistant" else NOT_TAKEN for call in replay.calls]
            changed = [
                not is_refused and (self._reference_world._matters(call) if change is None else change)
                for call, (_, is_refused, change) in zip(replay.calls, outcomes, strict=True)
            ]
            results, failed = [result for result, _, _ in outcomes], [is_refused for _, is_refused, _ in outcomes]
            replayed.append(Replayed(tuple(results), tuple(failed), tuple(changed), run.parts, run.passed))
        return replayed

    def _matters(self, call: ReplayCall) -> bool:
        """Return whether a call changes what the check looks at, in a world that cannot be inspected.

        It does if the reference no longer passes without the call, or with it if the reference lacks it.
        """
        if self.kinds.get(call.tool) == "read" or not self.reference:
            return False
        if call.key not in self._changes:
            remainder = tuple(entry for entry in self.reference if entry.key != call.key)
            calls = remainder if len(remainder) < len(self.reference) else (*self.reference, call)
            closing = (str(self.solution[-1].get("content") or ""),)
            runs = self._outcomes([Replay(entry, closing) for entry in (self.reference, calls)])
            self._changes[call.key] = runs[0].passed and not runs[1].passed
        return self._changes[call.key]


class ContractTask:
    """A task of an environment of our contract, as all its trials share it.

    Args:
        target: the environment.
        task: of the environment.
        kinds: tool kinds beyond those that the schemas declare.
    """

    def __init__(self, target: CheckedEnvironment, task: Task, kinds: Mapping[str, ToolKind]) -> None:
        self.target, self.task = target, task
        self.solution = target.reference(task)
        self.kinds: dict[str, ToolKind] = {**annotated(target.declared_tools), **kinds}
        self.played: dict[str, PlayedDialogue] = {}
        """See `DialogueWorld.played`."""
        self.reference_world = ContractWorld(self, self.solution)
        """The world whose rollout is the reference."""


class ContractWorld(DialogueWorld):
    """The world of a task of an environment of our contract.

    Args:
        shared: the task.
        logged: the rollout's messages.
    """

    def __init__(
        self, shared: ContractTask, logged: Sequence[Message], reference_world: "ContractWorld | None" = None
    ) -> None:
        super().__init__(logged, shared.solution, shared.kinds, reference_world)
        self._target, self._task, self.played = shared.target, shared.task, shared.played

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[PlayedDialogue]:
        """See `DialogueWorld.run`."""
        runs: list[PlayedDialogue] = []
        for messages in dialogues:
            episode = self._target.open(self._task)
            calls: list[tuple[str, bool, bool | None]] = []
            with closing_episodes([episode]):
                record = list(episode.messages)
                for message in messages:
                    replies, over = episode.step(message)
                    results = [reply for reply in replies if reply["role"] == "tool"]
                    # A call that ends the episode may stay unanswered.
                    answers = [(str(result.get("content") or ""), is_refusal(result), None) for result in results]
                    calls += [*answers, *[("", False, None)] * (len(calls_of(message)) - len(answers))]
                    record += [message, *replies]
                    if over:
                        break
            score = self._target.score(self._task, record)
            runs.append(PlayedDialogue(calls, score.parts, score.success))
        return runs


class WorkerDialogueWorld(DialogueWorld):
    """The world of a task whose benchmark's worker plays dialogues.

    Args:
        pool: the benchmark's workers.
        location: names the task in each request.
        logged: the rollout's messages.
        solution: assistant messages of the reference.
        kinds: the tool kinds that the benchmark declares.
    """

    def __init__(
        self,
        pool: Pool,
        location: Mapping[str, object],
        logged: Sequence[Message],
        solution: Sequence[Message],
        kinds: Mapping[str, ToolKind] | None = None,
    ) -> None:
        super().__init__(logged, solution, kinds or {})
        self._pool, self._location = pool, location

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[PlayedDialogue]:
        """See `DialogueWorld.run`."""
        runs = self._pool.call("replay", **self._location, dialogues=dialogues)["replayed"]
        return [PlayedDialogue([tuple(call) for call in run["calls"]], run["parts"], run["passed"]) for run in runs]


class MilestoneWorld(WorkerDialogueWorld):
    """The world of a task with milestones. One message meets a milestone, so each text is owed as it is."""

    @property
    def owed(self) -> tuple[str, ...]:
        """See `captrain.benchmarks.World`."""
        return tuple(str(message["content"]) for message in self.solution if not calls_of(message))

    def run(self, dialogues: Sequence[Sequence[Message]]) -> list[PlayedDialogue]:
        """See `DialogueWorld.run`. Owed words that a replay joined to other text become messages of their own."""
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
        """Return whether a dialogue's calls return here what they returned in it. Results that differ between two plays
        here, such as random ids, match everything."""
        actions = [message for message in messages if message["role"] == "assistant"]
        logged = [message["content"] for message in messages if message["role"] == "tool"]
        first, second = ([call[0] for call in run.calls] for run in self.run([actions, actions]))
        results = [result if result == again else None for result, again in zip(first, second, strict=True)]
        return len(logged) == len(results) and all(
            result in (None, entry) for result, entry in zip(results, logged, strict=True)
        )


def _key_of_replay(replay: Replay) -> tuple[object, ...]:
    """A key that is equal for replays that are played alike: the user's calls are not played."""
    calls = tuple(call.key for call in replay.calls if call.by == "assistant")
    return calls, replay.texts, replay.ended


def _phrases(words: Sequence[str], places: Sequence[int]) -> tuple[str, ...]:
    """The words at some places; neighbours stay together."""
    phrases: list[list[str]] = []
    for before, place in zip([None, *places], places, strict=False):
        if before is None or before + 1 != place:
            phrases.append([])
        phrases[-1].append(words[place])
    return tuple(" ".join(phrase) for phrase in phrases)


def is_refusal(result: Message) -> bool:
    """Return whether a tool result is an error: it is marked as one, starts with "error", or is an object with one."""
    content = str(result.get("content") or "")
    if result.get("error") is True or content[:5].lower() == "error":
        return True
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and bool(answer.get("error"))


def annotated(tools: Sequence[JsonObject]) -> dict[str, ToolKind]:
    """Kinds of tools by their schemas' annotations: a benchmark's `kind`, or MCP's `readOnlyHint`."""
    kinds: dict[str, ToolKind] = {}
    for tool in tools:
        hints = {**tool.get("annotations", {}), **tool["function"].get("annotations", {})}
        if hints.get("kind") in get_args(ToolKind) or isinstance(hints.get("readOnlyHint"), bool):
            kinds[tool["function"]["name"]] = hints.get("kind") or ("read" if hints["readOnlyHint"] else "write")
    return kinds
