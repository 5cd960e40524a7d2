"""The light installation: what works without the extras, and messages for the rest."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from captrain.run.boundary import EXTRAS

ROOT = Path(__file__).parents[2]
MODULES = {
    "scikit-learn": "sklearn",
    "hydra-joblib-launcher": "hydra_plugins",
    "hydra-submitit-launcher": "hydra_plugins",
}
WITHOUT = "import sys; sys.modules |= dict.fromkeys({modules!r}); sys.argv = {words!r}\n"
WITHOUT += "from captrain.cli.app import main; main()"


def light(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `captrain WORDS` in a process without the packages of the extras."""
    code = WITHOUT.format(modules=sorted(EXTRAS), words=["captrain", *words])
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_the_table_of_extras_matches_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def modules(requirements: list[str]) -> set[str]:
        names = [re.match(r"[\w-]+", requirement) for requirement in requirements]
        return {MODULES.get(name[0], name[0].replace("-", "_")) for name in names if name}

    extras = project["optional-dependencies"]
    assert modules([*extras["train"], *extras["slurm"], *extras["awm"], *extras["inspect"]]) == set(EXTRAS)
    assert not modules(project["dependencies"]) & set(EXTRAS)


def test_logs_are_diagnosed_in_the_light_installation(tmp_path: Path) -> None:
    done = light(tmp_path, "diagnose", str(ROOT / "docs/examples/servicedesk.jsonl"), "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "missing_write" in done.stdout
    assert (tmp_path / "out/report.html").exists()


def test_the_light_installation_reads_results_and_names_missing_packages(tmp_path: Path, committed: Path) -> None:
    done = light(committed, "results")
    assert done.returncode == 0 and "pass rate" in done.stdout, done.stderr
    assert light(tmp_path, "init", "mine").returncode == 0
    assert light(tmp_path / "mine", "plan").returncode == 0
    done = light(tmp_path / "mine", "run")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1] == "  remedy: pip install 'captrain[train]'", done.stderr
