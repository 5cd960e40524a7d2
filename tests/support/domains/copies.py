"""Domains as files of their own: an environment is derived from one file, which imports nothing of its neighbours.

    python -m support.domains.copies FOLDER

writes all of them into a folder, such as a project's `components/`.
"""

import sys
from pathlib import Path

NAMES = ("harbour", "telescope", "toll", "cellar")
IMPORT = "from .domain import "


def copy_domain(name: str, folder: Path) -> Path:
    """Write a domain with what it imports of `domain.py` in the place of that line."""
    here = Path(__file__).parent
    before, imports = (here / f"{name}.py").read_text().split(IMPORT)
    shared = (here / "domain.py").read_text().partition("\nimport ")
    path = folder / f"{name}.py"
    path.write_text(before + "".join(shared[1:]).lstrip() + imports.partition("\n")[2])
    return path


if __name__ == "__main__":
    for name in NAMES:
        copy_domain(name, Path(sys.argv[1]))
