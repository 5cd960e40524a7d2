"""captrain's own rollouts, a record a line. Their tools are in `tools.json` beside them, if there is one."""

from pathlib import Path

from pydantic import BaseModel

from captrain.interop.logs.chat import dialogue_of
from captrain.interop.logs.records import RowFormat
from captrain.interop.logs.source import Foreign, json_of, well_formed
from captrain.records import Rollout

TOOLS = "tools.json"


class _UserCall(BaseModel):
    name: str
    arguments: dict[str, object]


class _Data(BaseModel):
    """Fields in the data of a task that a diagnosis reads."""

    graded: list[str] = []
    user_calls: list[_UserCall] = []
    milestones: list[dict[str, object]] = []


def _recognizes(row: Foreign) -> bool:
    return {"task", "policy", "purpose", "outcome"} <= {*row} and isinstance(row.get("messages"), list)


def _rollout(row: Foreign, path: Path) -> Rollout | str:
    """Read the record without its tokens, which are most of it and which a diagnosis never reads."""
    rollout = Rollout.model_validate(well_formed({**row, "token_ids": [], "mask": [], "logprobs": []}))
    _Data.model_validate(rollout.task.data)
    if not rollout.messages:
        return "there are no messages"
    if rollout.outcome != "error" and rollout.score is None:
        return "there is no score"
    dialogue, reference = dialogue_of(rollout.messages), dialogue_of(rollout.reference)
    return rollout.model_copy(update={"messages": dialogue, "reference": reference})


def tools_beside(path: Path) -> object:
    """Read the schemas in `tools.json` beside a file of rollouts; None if it is missing or damaged."""
    try:
        return json_of(path.with_name(TOOLS))
    except (ValueError, RecursionError):
        return None


ROLLOUTS = RowFormat("captrain's rollouts", _recognizes, _rollout)
