"""Divergence of a rollout's tool calls from those of its reference, for readers: nothing is scored by it."""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from captrain.contract import calls_of
from captrain.records import JsonObject, Message


class CallMark(NamedTuple):
    """Verdict of the comparison on one tool call: `same`, `differs` (from `expected`) or `extra`."""

    verdict: str
    expected: str = ""


@dataclass(frozen=True)
class Divergence:
    """Divergence of a rollout's tool calls from those of its reference.

    marks: one for each call of the rollout. missing: reference calls the rollout lacks, by the index of the rollout's
    call they belong before (its number of calls: at the end). first: index of the first call that is not the
    reference's or before which one is missing; None when there is no divergence.
    """

    marks: list[CallMark]
    missing: dict[int, list[str]]
    first: int | None


READABLE = json.JSONEncoder(ensure_ascii=False)


def call_text(name: str, arguments: JsonObject) -> str:
    """Format a tool call as one line; equal calls give equal lines."""
    inner = ", ".join(f"{key}={READABLE.encode(arguments[key])}" for key in sorted(arguments))
    return f"{name}({inner})"


def calls(messages: Iterable[Message]) -> list[str]:
    """List all tool calls of the assistant messages, in order, one line each."""
    turns = [message for message in messages if message["role"] == "assistant"]
    return [call_text(name, arguments) for message in turns for name, arguments in calls_of(message)]


def divergence(messages: Sequence[Message], reference: Sequence[Message]) -> Divergence:
    """Align the tool calls (name and arguments) of a rollout with its reference's, by longest matching blocks."""
    actual, expected = calls(messages), calls(reference)
    marks: list[CallMark] = []
    missing: dict[int, list[str]] = {}
    first: int | None = None
    for operation, i, i_end, j, j_end in difflib.SequenceMatcher(None, expected, actual, autojunk=False).get_opcodes():
        if operation == "equal":
            marks += [CallMark("same")] * (j_end - j)
            continue
        first = j if first is None else first
        pairs = min(i_end - i, j_end - j)
        marks += [CallMark("differs", expected[i + offset]) for offset in range(pairs)]
        marks += [CallMark("extra")] * (j_end - j - pairs)
        if i_end - i > pairs:
            missing[j_end] = expected[i + pairs : i_end]
    return Divergence(marks, missing, first)
