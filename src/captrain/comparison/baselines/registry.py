"""The rows of the main table: every baseline that a module of this room declares.

A new row is an entry in a module here, a stage, and its section in the configuration; nothing lists the rows beside
this. Who asks reads declarations alone, so that the code behind a row, which its own stage depends on, changes nothing
for evaluation or figures.
"""

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, Baseline


@cache
def row_modules() -> dict[Baseline, str]:
    """Collect all rows, each with the name of the module that declares it.

    Raises:
        ValueError: two modules declare a row of one name.
    """
    modules, names = dict[Baseline, str](), set[str]()
    room = importlib.import_module(str(__package__))
    for module in pkgutil.iter_modules(room.__path__, f"{__package__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Baseline) and not any(value is row for row in modules):
                if value.name in names:
                    raise ValueError(f"{module.name} declares row {value.name}, which is there already")
                names.add(value.name)
                modules[value] = module.name
    return modules


def row_file(name: str) -> Path:
    """Return the module that declares a row, which has the code that its stage runs."""
    [module] = [module for row, module in row_modules().items() if row.name == name]
    return Path(__file__).with_name(f"{module.rpartition('.')[2]}.py")


@cache
def baselines() -> dict[str, Baseline]:
    """Collect all rows by name, in the order of the table."""
    return {row.name: row for row in sorted(row_modules(), key=lambda row: (row.order, row.name))}


def trained_baselines() -> list[str]:
    """List the rows that train an adapter by GRPO, in the order of the table."""
    return [row.name for row in baselines().values() if row.trains_by_grpo]


def acting_stages() -> tuple[str, ...]:
    """List the stages that leave something to act with, by an index of their own."""
    return ("adapters", *baselines(), "merging", "controls")


def spending_stages() -> tuple[str, ...]:
    """List the stages that keep a ledger of what they spent before the evaluation."""
    return (DIAGNOSIS, CALIBRATION, *acting_stages())
