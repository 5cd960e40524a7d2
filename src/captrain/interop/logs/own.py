"""Rollouts of captrain's own, a record a line; their tools are in `tools.json` where that lies beside them."""

from pathlib import Path

from pydantic import BaseModel

from captrain.interop.logs.chat import dialogue_of
from captrain.interop.logs.records import RowFormat
from captrain.interop.logs.source import json_of, well_formed
from captrain.records import JsonObject, Rollout

TOOLS = "tools.json"


class _Step(BaseModel):
    name: str
    arguments: JsonObject


class _Data(BaseModel):
    """Fields in the data of a task that a diagnosis looks at."""

    graded: list[str] = []
    user_calls: list[_Step] = []
    milestones: list[JsonObject] = []


def _recognizes(row: JsonObject) -> bool:
    return {"task", "policy", "purpose", "outcome"} <= {*row} and isinstance(row.get("messages"), list)


def _rollout(row: JsonObject, path: Path) -> Rollout | str:
    """Read the record without its tokens, which take most of its room and say nothing of why it failed."""
    rollout = Rollout.model_validate(well_formed({**row, "token_ids": [], "mask": [], "logprobs": []}))
    _Data.model_validate(rollout.task.data)
    if not rollout.messages:
        return "there are no messages"
    if rollout.outcome != "error" and rollout.score is None:
        return "there is no score"
    dialogue, reference = dialogue_of(rollout.messages), dialogue_of(rollout.reference)
    return rollout.model_copy(update={"messages": dialogue, "reference": reference})


def tools_beside(path: Path) -> object:
    """Read the schemas in `tools.json` beside a file of rollouts, none where it is missing or does not read."""
    try:
        return json_of(path.with_name(TOOLS))
    except (ValueError, RecursionError):
        return None


ROLLOUTS = RowFormat("captrain's rollouts", _recognizes, _rollout)
