"""Proposers of lines of guidance from rollouts: a language model, or a walk over lines that are known.

Both are shown a parent's lines and what the agent did with them on a minibatch, and answer with all lines of a child.
The walk needs no model. It knows texts that may stand in the prompt, those that the embedded base has read in its
training, but not what they are good for: it goes by the words that they share with failed rollouts alone.
"""

import random
import re
from collections.abc import Sequence
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
"""Tokens in one answer of a reflecting model."""
CHARACTERS = 48000
"""Characters of all rollouts in one question, beyond which long texts are shortened."""
MOST = 12
"""Lines that a model may write."""
LONGEST = 400
"""Characters of a line that a model writes."""
QUOTED = 400
"""Characters of an error or of a call that feedback repeats."""


@dataclass(frozen=True)
class Reflection:
    """Material of a proposal: the parent's lines, its rollouts (no errors among them), the lines that are in the pool
    already, and the step of the search, which names the randomness."""

    lines: Lines
    rollouts: Sequence[Rollout]
    pool: frozenset[Lines]
    step: int


class Walk:
    """A walk over sets of known lines, one line at a time.

    A neighbour of the parent has one line more, one fewer, or another one in its place; known lines stand in the order
    in which they are known, after any others. One neighbour that is not in the pool is drawn, with probability in
    proportion to relevance(line added) / relevance(line dropped), where relevance is 1 + the sum, over the words of the
    line, of by how much the word is more frequent among failed rollouts than among passed ones (share of rollouts that
    hold it in what the user asked for or in the feedback; nothing where it is less frequent).

    Args:
        vocabulary: the lines.
        seed: of the run.
    """

    usage: JsonObject = {}

    def __init__(self, vocabulary: Sequence[str], seed: int) -> None:
        self.vocabulary, self.seed = vocabulary, seed

    def propose(self, reflection: Reflection) -> Lines | None:
        """Propose all lines of a child; None where there is nothing to propose."""
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
        # Of failed rollouts and of the others, the words that the user's request or the feedback holds.
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
    """Split a text into words of three letters or more; names such as get_order are several."""
    return set(re.findall("[a-z]{3,}", text.lower()))


class WrittenGuidance(BaseModel):
    """A model's answer."""

    # The title is part of the key under which answers are stored: it stays what it was when they were asked for.
    model_config = ConfigDict(extra="forbid", title="Written")
    reasoning: Annotated[str, Field(description="The causes of the failures, and what each line does about them.")]
    lines: Annotated[list[str], Field(description="All lines of guidance, in order.")]


class Model:
    """Proposer that asks a language model.

    Args:
        access: how, and at what cost.
        name: of the model, name or name@revision.
        tools: schemas of the agent's tools.
    """

    def __init__(self, access: ModelAccess | None, name: str, tools: list[JsonObject]) -> None:
        self._answers = StructuredAnswers(access, name=name, temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
        schemas = fenced("tools", "\n".join(line_of(tool["function"]) for tool in tools))
        prompt = files("captrain").joinpath("comparison/baselines/prompts/reflection.md").read_text()
        self._system = Template(prompt).substitute(tools=schemas, most=MOST)

    @property
    def usage(self) -> JsonObject:
        """The model that was asked, and what its answers took, the same when a run is replayed."""
        totals = self._answers.usage
        counts = {name: getattr(totals, name) for name in ("answers", "prompt_tokens", "completion_tokens")}
        return {"model": self._answers.name, **counts}

    def propose(self, reflection: Reflection) -> Lines | None:
        """Propose all lines of a child; None where there is nothing to propose.

        Raises:
            UserError: a budget is reached, or the model's answers are not of the form.
            InfrastructureError: a fault of the server did not pass.
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
    """Say what is wrong with a model's lines; None when nothing is."""
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
    """Describe the outcome of a rollout: passed or failed, the named parts of its score, what tools called an error,
    and where it left the path of the reference solution, if there is one."""
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
    """Find the first call in which a rollout differs from the reference solution; what is said is not compared."""
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
