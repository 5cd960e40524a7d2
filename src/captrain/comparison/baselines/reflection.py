"""Proposers of lines of guidance: a language model, or a random walk over known lines.

Both see a parent's lines and its rollouts on a minibatch, and return all lines of a child. The walk needs no model. It
knows the lines that the embedded base read in training, but not their effect: it prefers lines that share words with
failed rollouts.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from captrain.capabilities import compact, fenced, line_of, rendered
from captrain.contract import calls_of
from captrain.models import Question, StructuredAnswers
from captrain.records import JsonObject, Message, Rollout
from captrain.run import ModelAccess

Lines = tuple[str, ...]

TEMPERATURE = 1.0
MAX_TOKENS = 4096
"""Most tokens in one answer of a reflecting model."""
CHARACTERS = 48000
"""Most characters of all rollouts in one question; longer texts are shortened."""
MOST = 12
"""Most lines that a model may write."""
LONGEST = 400
"""Most characters of such a line."""
QUOTED = 400
"""Most characters that feedback quotes from an error or a call."""


@dataclass(frozen=True)
class Reflection:
    """Input of a proposal.

    Args:
        lines: of the parent.
        rollouts: rollouts of the parent on a minibatch, without errors.
        pool: lines of validated candidates.
        step: of the search; seeds the randomness.
    """

    lines: Lines
    rollouts: Sequence[Rollout]
    pool: frozenset[Lines]
    step: int


class Walk:
    """A random walk over sets of known lines.

    A neighbour of the parent adds, drops or replaces one line. Known lines keep their order and follow all others. One
    neighbour outside the pool is drawn, with a weight of relevance(added) / relevance(dropped). The relevance of a line
    is 1 + the sum over its words of the excess of their frequency in failed rollouts over that in passed ones, at least
    0. A rollout holds a word if it occurs in the user's request or in the feedback.

    Args:
        vocabulary: the known lines.
        seed: seed of the run.
    """

    usage: Mapping[str, str | int] = {}

    def __init__(self, vocabulary: Sequence[str], seed: int) -> None:
        self.vocabulary, self.seed = vocabulary, seed

    def propose(self, reflection: Reflection) -> Lines | None:
        """Return all lines of a child, or None if no neighbour is left."""
        relevance = self._relevance(reflection.rollouts)
        present = [line for line in self.vocabulary if line in reflection.lines]
        foreign = [line for line in reflection.lines if line not in self.vocabulary]
        weights: dict[Lines, float] = {}
        for add in ["", *(line for line in self.vocabulary if line not in present)]:
            for drop in ["", *present]:
                remaining = (line for line in self.vocabulary if line != drop and (line in present or line == add))
                weights[(*foreign, *remaining)] = relevance.get(add, 1.0) / relevance.get(drop, 1.0)
        fresh = [lines for lines in weights if lines not in reflection.pool and lines != reflection.lines]
        rng = random.Random(f"{self.seed}/gepa/{reflection.step}")
        return rng.choices(fresh, [weights[lines] for lines in fresh])[0] if fresh else None

    def _relevance(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        # Words of the user's request and of the feedback, by whether the rollout failed.
        words: dict[bool, list[set[str]]] = {True: [], False: []}
        for rollout in rollouts:
            requests = (str(message["content"]) for message in rollout.messages if message["role"] == "user")
            words[rollout.outcome == "failed"].append(_words(f"{next(requests, '')} {feedback(rollout)}"))

        def share(word: str, failed: bool) -> float:
            return sum(word in texts for texts in words[failed]) / max(1, len(words[failed]))

        return {
            line: 1.0 + sum(max(0.0, share(word, True) - share(word, False)) for word in sorted(_words(line)))
            for line in self.vocabulary
        }


def _words(text: str) -> set[str]:
    """Return the words of three letters or more; get_order has two."""
    return set(re.findall("[a-z]{3,}", text.lower()))


class WrittenGuidance(BaseModel):
    """A model's answer."""

    # Stored answers are keyed by this title and docstring, so both must stay.
    model_config = ConfigDict(extra="forbid", title="Written")
    reasoning: Annotated[str, Field(description="The causes of the failures, and what each line does about them.")]
    lines: Annotated[list[str], Field(description="All lines of guidance, in order.")]


class Model:
    """Proposer that asks a language model.

    Args:
        access: endpoint and budget.
        name: name of the model, name or name@revision.
        tools: schemas of the agent's tools.
    """

    def __init__(self, access: ModelAccess | None, name: str, tools: list[JsonObject]) -> None:
        self._answers = StructuredAnswers(access, name=name, temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
        schemas = fenced("tools", "\n".join(line_of(tool["function"]) for tool in tools))
        prompt = files("captrain").joinpath("comparison/baselines/prompts/reflection.md").read_text(encoding="utf-8")
        self._system = Template(prompt).substitute(tools=schemas, most=MOST)

    @property
    def usage(self) -> Mapping[str, str | int]:
        """The model, and the number and tokens of its answers. Cached answers count, too."""
        totals = self._answers.usage
        counts = {name: getattr(totals, name) for name in ("answers", "prompt_tokens", "completion_tokens")}
        return {"model": self._answers.name, **counts}

    def propose(self, reflection: Reflection) -> Lines | None:
        """Return all lines of a child, or None without rollouts.

        Raises:
            UserError: a budget is used up, or the model's answers are malformed.
            InfrastructureError: the server kept failing.
        """
        if not reflection.rollouts:
            return None
        share = CHARACTERS // len(reflection.rollouts)
        texts = [
            fenced(
                "rollout",
                f"{rendered(compact(rollout.messages, share))}\n{line_of({'feedback': feedback(rollout)})}",
                number=number,
                outcome=rollout.outcome,
            )
            for number, rollout in enumerate(reflection.rollouts, start=1)
        ]
        now = fenced("guidance", "\n".join(reflection.lines)) if reflection.lines else "There are none yet."
        question = Question(
            self._system,
            "\n\n".join([f"The lines of guidance as they are now:\n{now}", *texts]),
            WrittenGuidance,
            draw=reflection.step,
            check=lambda answer: complaint(answer.lines, reflection.lines),
        )
        [answer] = self._answers.ask([question], f"reflection {reflection.step}")
        return _bare(answer.lines)


def _bare(lines: Sequence[str]) -> Lines:
    return tuple(line.strip().removeprefix("- ").strip() for line in lines)


def complaint(lines: Sequence[str], now: Lines) -> str | None:
    """Return what is wrong with the lines that a model wrote, or None."""
    bare = _bare(lines)
    if len(bare) > MOST:
        return f"lines holds {len(bare)} lines, at most {MOST} are allowed"
    for number, line in enumerate(bare, start=1):
        if not line or "\n" in line or "\r" in line:
            return f"line {number} is empty, or has a line break in it"
        if len(line) > LONGEST:
            return f"line {number} has {len(line)} characters, at most {LONGEST} are allowed"
    if len(set(bare)) < len(bare):
        return "a line stands there twice"
    if bare == now:
        return "the lines are those of now"
    return None


def feedback(rollout: Rollout) -> str:
    """Describe a rollout: its outcome, the parts of its score, tool errors, and the first difference from the reference
    solution if there is one."""
    score = rollout.score
    remarks = [rollout.outcome + (f" with reward {score.reward:g}" if score else "")]
    if score and score.parts:
        remarks.append("score: " + ", ".join(f"{name} {value:g}" for name, value in score.parts.items()))
    for message in rollout.messages:
        text = str(message.get("content") or "")[:QUOTED]
        if message["role"] == "tool" and (message.get("error") or "error" in text.lower()):
            remarks.append(f"tool {message.get('name', '')} said: {text}")
    if rollout.outcome == "failed" and rollout.reference:
        remarks.append(divergence(rollout.messages, rollout.reference))
    return "; ".join(remarks)


def divergence(messages: Sequence[Message], reference: Sequence[Message]) -> str:
    """Describe the first call that differs from the reference solution. Messages are not compared."""
    calls, expected = (
        [call for message in dialogue if message["role"] == "assistant" for call in calls_of(message)]
        for dialogue in (messages, reference)
    )
    texts, solution = ([f"{name} {line_of(arguments)}"[:QUOTED] for name, arguments in c] for c in (calls, expected))
    for number, pair in enumerate(zip(calls, expected, strict=False)):
        if pair[0] != pair[1]:
            return f"call {number + 1} was {texts[number]}, where a right solution makes {solution[number]}"
    if len(calls) < len(expected):
        return f"it ended where a right solution makes {solution[len(calls)]}"
    if len(calls) > len(expected):
        return f"it made all calls of a right solution, and then {texts[len(expected)]}"
    return "its calls are those of a right solution; what it said, or left unsaid, is not"
