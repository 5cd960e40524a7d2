"""A small pipeline under DVC and git.

`make` writes one output into DVC's cache and one into git. `read` reads both and writes a table of pass rates. The
environment variable KERNEL changes the number that `make` computes, as another processor would.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from support.warm import warm_commands

from captrain.records import publish_text

Captrain = Callable[..., tuple[int, str, str]]
"""Runs `captrain ARGUMENTS` in a folder; returns exit status, stdout and stderr."""
GIT = {
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "nobody"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "nobody@example.org"),
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
}
PIPELINE = """stages:
  make:
    cmd: {python} make.py
    deps: [make.py]
    params: [seed, section]
    outs:
      - artifacts/data
      - results/make: {{cache: false}}
  read:
    cmd: {python} read.py
    deps: [read.py, artifacts/data, results/make/table.csv]
    outs:
      - results/read.json: {{cache: false}}
      - results/evaluation: {{cache: false}}
"""
MAKE = """import os
from pathlib import Path
for folder in ("artifacts/data", "results/make"):
    Path(folder).mkdir(parents=True)
noise = float(os.environ.get("KERNEL", "0"))
Path("artifacts/data/rows.txt").write_text(f"rows {noise}")
Path("results/make/table.csv").write_text(f"method,rate\\nbase,{0.25 + noise}\\ntrace,0.5\\n")
"""
READ = """from pathlib import Path
Path("results/read.json").write_text('{"rate": 0.5, "note": "fine"}')
noise = float(Path("artifacts/data/rows.txt").read_text().split()[1])
Path("results/evaluation").mkdir()
columns = "method,label,pass_rate,low,high\\n"
rows = (("base", 0.25), ("trace", 0.5 + noise))
table = "".join(f"{method},{method},{rate:.4f},{rate - 0.05:.4f},{rate + 0.05:.4f}\\n" for method, rate in rows)
Path("results/evaluation/main.csv").write_text(columns + table)
Path("results/evaluation/main.png").write_bytes(b"\\x89PNG" + table.encode())
"""


def shell(folder: Path, *command: str) -> None:
    """Run a command in a folder and require success."""
    subprocess.run(command, cwd=folder, env={**os.environ, **GIT}, check=True, capture_output=True)


def initialise(folder: Path) -> None:
    """Write what `git init` and `dvc init` write, without the cost of starting DVC."""
    shell(folder, "git", "init", "--quiet")
    publish_text(folder / ".dvc/config", "[core]\n    analytics = false\n    check_update = false\n")
    publish_text(folder / ".dvc/.gitignore", "/config.local\n/tmp\n/cache\n")


def repro(folder: Path, *options: str) -> None:
    """Bring the pipeline in a folder up to date."""
    shell(folder, str(warm_commands() / "dvc"), "repro", "--quiet", *options)


def commit(folder: Path) -> None:
    """Commit everything in a folder."""
    shell(folder, "git", "add", "--all")
    shell(folder, "git", "commit", "--quiet", "--allow-empty", "--message", "state")


def finished_pipeline(folder: Path) -> Path:
    """Make the pipeline in a folder, run and committed, with its pinned library."""
    initialise(folder)
    publish_text(folder / "dvc.yaml", PIPELINE.format(python=sys.executable))
    publish_text(folder / "params.yaml", "seed: 0\nsection: {delta: 0.2, rest: 1}\n")
    publish_text(folder / "make.py", MAKE)
    publish_text(folder / "read.py", READ)
    publish_text(folder / "requirements.lock", f"# For Python 3.11.\nnumpy=={version('numpy')}\n")
    publish_text(folder / ".gitignore", "/artifacts/\n")
    repro(folder)
    commit(folder)
    return folder
