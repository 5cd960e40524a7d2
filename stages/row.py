"""Make one row of the table, by its entry in `captrain.comparison.baselines`: `python stages/row.py NAME`."""

import sys
from functools import partial
from importlib import import_module

from captrain.run import entry_point, load_spec

NAME = sys.argv[1]


@partial(entry_point, name=NAME)
def main() -> str:
    """Base, and what the row rests on -> artifacts/NAME, results/NAME."""
    # The code that this runs is that of the row's module, and of no other row's (`captrain.projects.pipeline`).
    return import_module("captrain.comparison").baselines()[NAME].run(load_spec())


if __name__ == "__main__":
    main()
