"""The ledger: what was spent on rollouts, by stage, purpose and method, and which split a purpose may draw from.

Methods are compared at equal totals, so every rollout is counted here once, whatever came of it.
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
"""The only split that a purpose may draw tasks from."""


class LedgerEntry(Record):
    """Rollouts spent by one stage for one purpose on one side of the comparison.

    `rollouts` counts every rollout spent, `discarded` those of them in constant-reward groups (spent, without
    gradient), `errors` those that ended in an infrastructure error.
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
    """Make the ledger entry of a set of rollouts of one purpose: every attempt counts."""
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
    """Sum up the rollouts that TRACE has spent in all: diagnosis and calibration count as much as training, and errors
    too."""
    return sum(entry.rollouts for entry in entries if entry.method == "trace")


def guard_split(tasks: Sequence[Task], purpose: Purpose) -> None:
    """Fail when a task of another split than the purpose's own is among the tasks.

    Raises:
        UserError: naming the first offending task. Splits never mix: a test task in discovery or training would
            make every later number worthless.
    """
    allowed = SPLIT_OF[purpose]
    for task in tasks:
        if task.split != allowed:
            raise UserError(
                f"task {task.id} is of the {task.split} split but was given to {purpose}, which draws on {allowed}",
                "give each purpose tasks of its own split only",
            )
