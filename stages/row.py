"""Make one row of the table, by its entry in `captrain.comparison.baselines`: `python stages/row.py NAME`."""

import sys
from functools import partial
from importlib import import_module

from captrain.config import load_spec
from captrain.execution import entry_point

NAME = sys.argv[1]


@partial(entry_point, name=NAME)
def main() -> str:
    """Base, and what the row rests on -> artifacts/NAME, results/NAME."""
    return import_module(f"captrain.comparison.baselines.{NAME}").BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
