"""Compute one row of the table, declared in `captrain.comparison.baselines`: `python stages/row.py NAME`."""

import sys
from functools import partial
from importlib import import_module

from captrain.run import entry_point, load_spec

NAME = sys.argv[1]


@partial(entry_point, name=NAME)
def main() -> str:
    """Base and the row's inputs -> artifacts/NAME, results/NAME."""
    # The digest of a row's code begins at this script and at the row's own module (`captrain.projects.pipeline`).
    return import_module("captrain.comparison").baselines()[NAME].run(load_spec())


if __name__ == "__main__":
    main()
