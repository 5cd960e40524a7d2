"""The rows of the main table: every baseline that a module of this room declares.

A new row is a module here with its entry, a stage, and its section in the configuration; nothing lists the rows beside
this. Who asks reads declarations alone, so that the code behind a row, which its own stage depends on, changes nothing
for evaluation or figures.
"""

import importlib
import pkgutil
from functools import cache

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, Baseline


@cache
def baselines() -> dict[str, Baseline]:
    """Collect all rows by name, in the order of the table.

    Raises:
        ValueError: two modules declare a row of one name.
    """
    rows: dict[str, Baseline] = {}
    room = importlib.import_module(str(__package__))
    for module in pkgutil.iter_modules(room.__path__, f"{__package__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Baseline) and rows.setdefault(value.name, value) is not value:
                raise ValueError(f"{module.name} declares row {value.name}, which is there already")
    return {row.name: row for row in sorted(rows.values(), key=lambda row: (row.order, row.name))}


def trained_baselines() -> list[str]:
    """List the rows that train an adapter by GRPO, in the order of the table."""
    return [row.name for row in baselines().values() if row.trains_by_grpo]


def acting_stages() -> tuple[str, ...]:
    """List the stages that leave something to act with, by an index of their own."""
    return ("adapters", *baselines(), "merging", "controls")


def spending_stages() -> tuple[str, ...]:
    """List the stages that keep a ledger of what they spent before the evaluation."""
    return (DIAGNOSIS, CALIBRATION, *acting_stages())
