"""Environments of packages that conflict with ours, made by `make installations` or elsewhere."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache/installations"


def interpreter(name: str) -> str:
    """Return the interpreter from CAPTRAIN_<NAME>_PYTHON or `make installations`, or ""."""
    own = FOLDER / name
    made = str(own / "bin/python") if (own / ".made").exists() else ""
    return os.environ.get(f"CAPTRAIN_{name.upper()}_PYTHON", made)


def data_beside(python: str, package: str) -> str:
    """Return the data folder of a package in an interpreter's environment, or ""."""
    folders = Path(python).parent.parent.glob(f"lib/python*/site-packages/{package}/data") if python else ()
    return next(map(str, folders), "")
