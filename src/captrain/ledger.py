"""The ledger of rollouts spent, by stage, purpose and method, and the split that each purpose may use.

Methods are compared at equal totals, so every rollout counts once, whatever its outcome.
"""

from collections.abc import Sequence

from captrain.errors import UserError
from captrain.records import Purpose, Record, Rollout, Split, Task

SPLIT_OF: dict[Purpose, Split] = {
    "diagnosis": "discovery",
    "calibration": "training",
    "training": "training",
    "validation": "training",
    "evaluation": "test",
}
"""The one split whose tasks a purpose may use."""


class LedgerEntry(Record):
    """Rollouts spent by one stage for one purpose and one method.

    `rollouts` counts every rollout, `discarded` those in groups of constant reward (no gradient), and `errors` those
    that ended in an infrastructure error.
    """

    stage: str
    purpose: Purpose
    method: str
    item: str = ""
    rollouts: int
    discarded: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def ledger_entry(
    rollouts: Sequence[Rollout], *, stage: str, method: str, item: str = "", discarded: int = 0
) -> LedgerEntry:
    """Make the entry of rollouts of one purpose. Every attempt counts."""
    return LedgerEntry(
        stage=stage,
        purpose=rollouts[0].purpose,
        method=method,
        item=item,
        rollouts=sum(1 + rollout.retries for rollout in rollouts),
        discarded=discarded,
        errors=sum(rollout.retries + (rollout.outcome == "error") for rollout in rollouts),
        prompt_tokens=sum(rollout.usage.prompt_tokens for rollout in rollouts),
        completion_tokens=sum(rollout.usage.completion_tokens for rollout in rollouts),
    )


def budget(entries: Sequence[LedgerEntry]) -> int:
    """Sum all rollouts that TRACE spent, including diagnosis, calibration and errors."""
    return sum(entry.rollouts for entry in entries if entry.method == "trace")


def guard_split(tasks: Sequence[Task], purpose: Purpose) -> None:
    """Check that all tasks are of the purpose's split.

    Raises:
        UserError: a task is of another split. A test task in discovery or training would make later numbers worthless.
    """
    allowed = SPLIT_OF[purpose]
    for task in tasks:
        if task.split != allowed:
            raise UserError(
                f"task {task.id} is of the {task.split} split but was given to {purpose}, which uses {allowed}",
                "give each purpose only tasks of its own split",
            )
