"""Registry of the rows of the main table: every `Baseline` that a module of this package declares.

A new row needs an entry in a module here, a stage, and a section in the configuration. Nothing else lists the rows.
Callers read only the declarations, so the code behind a row makes neither evaluation nor figures stale.
"""

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, Baseline


@cache
def row_modules() -> dict[Baseline, str]:
    """Map each row to the module that declares it.

    Raises:
        ValueError: two modules declare a row of the same name.
    """
    modules, names = dict[Baseline, str](), set[str]()
    package = importlib.import_module(str(__package__))
    for module in pkgutil.iter_modules(package.__path__, f"{__package__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Baseline) and not any(value is row for row in modules):
                if value.name in names:
                    raise ValueError(f"{module.name} declares row {value.name}, which another module declares, too")
                names.add(value.name)
                modules[value] = module.name
    return modules


def row_file(name: str) -> Path:
    """Return the file of the module that declares a row; its stage runs this code."""
    [module] = [module for row, module in row_modules().items() if row.name == name]
    return Path(__file__).with_name(f"{module.rpartition('.')[2]}.py")


@cache
def baselines() -> dict[str, Baseline]:
    """Return all rows by name, in table order."""
    return {row.name: row for row in sorted(row_modules(), key=lambda row: (row.order, row.name))}


def trained_baselines() -> list[str]:
    """List the rows that train an adapter by GRPO, in table order."""
    return [row.name for row in baselines().values() if row.trains_by_grpo]


def acting_stages() -> tuple[str, ...]:
    """List the stages that publish an index of arms."""
    return ("adapters", *baselines(), "merging", "controls")


def spending_stages() -> tuple[str, ...]:
    """List the stages before the evaluation that keep a ledger."""
    return (DIAGNOSIS, CALIBRATION, *acting_stages())
