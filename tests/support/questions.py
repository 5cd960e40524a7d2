"""Questions about numbers, and the answers of the test server."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field
from support.waiting import PATIENCE

from captrain.models.answers import Question, StructuredAnswers
from captrain.run.machine import ModelAccess


class Where(BaseModel):
    message: int
    why: str | None


class Verdict(BaseModel):
    """A form with a choice, a list, a nested form, and a number with bounds."""

    verdict: Literal["PRESENT", "LACKING"]
    number: int = Field(ge=0, description="Of the question.")
    where: list[Where]


def verdict(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as the server does, from the number in the question."""
    number = int(body["messages"][-1]["content"].split()[1])
    named = {"verdict": "LACKING" if number % 3 else "PRESENT", "number": number}
    return {**named, "where": [{"message": number, "why": None}]}


def question(number: int, **more: Any) -> Question[Verdict]:
    return Question("Judge.", f"Question {number} please", Verdict, **more)


def asker(folder: Path, access: ModelAccess | None = None, **settings: Any) -> StructuredAnswers:
    given: dict[str, Any] = {"name": "some/model", "temperature": 0.7, "max_tokens": 64}
    return StructuredAnswers(access or ModelAccess(timeout=PATIENCE), folder=folder, **given | settings)
