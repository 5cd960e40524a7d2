"""Installations of packages that do not go together with ours: by `make installations`, or elsewhere."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache/installations"


def interpreter(name: str) -> str:
    """The interpreter that CAPTRAIN_<NAME>_PYTHON names, else that of `make installations`, else ""."""
    own = FOLDER / name
    made = str(own / "bin/python") if (own / ".made").exists() else ""
    return os.environ.get(f"CAPTRAIN_{name.upper()}_PYTHON", made)


def data_beside(python: str, package: str) -> str:
    """The data that a package holds, in the environment of an interpreter; "" where there are none."""
    folders = Path(python).parent.parent.glob(f"lib/python*/site-packages/{package}/data") if python else ()
    return next(map(str, folders), "")
