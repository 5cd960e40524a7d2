"""Which stages a change makes stale: the params that DVC compares, before and after a file of a copy really changes."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import captrain.comparison
from captrain.projects import code_digests
from captrain.run import compose_spec, load_choice, publish_spec, read_stages, row_of, shipped

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/stages.md").read_text(encoding="utf-8")
SOURCES = "src/captrain"
CASES = {
    "a comment, a docstring or a blank line in `models/lora.py`": (
        f"{SOURCES}/models/lora.py",
        r'^(def \w+\(.*\n    """)',
        r"\n# A comment.\n\1Another word. ",
    ),
    "a docstring of a class of `nn.Module` in `models/gated.py`": (
        f"{SOURCES}/models/gated.py",
        r'^(class \w+\(nn.Module\):\n    """)',
        r"\1Another word. ",
    ),
    "`benchmarks/tau2.py`, in a run of the service desk": (
        f"{SOURCES}/benchmarks/tau2.py",
        r"\Z",
        "\nNEW = print(1)\n",
    ),
    "a prompt of the analyst with a language model, in a run without one": (
        f"{SOURCES}/capabilities/prompts/labelling.md",
        r"\Z",
        "\nMore.\n",
    ),
    "`fisher` in `statistics.py`": (
        f"{SOURCES}/statistics.py",
        r"(def fisher\([^\"]*\"\"\"[^\"]*\"\"\"\n)",
        r"\1    print(1)\n",
    ),
    "`sign_test` in `statistics.py`": (
        f"{SOURCES}/statistics.py",
        r"(def sign_test\([^\"]*\"\"\"[^\"]*\"\"\"\n)",
        r"\1    print(1)\n",
    ),
    "`budget` in `ledger.py`": (
        f"{SOURCES}/ledger.py",
        r"(def budget\([^\"]*\"\"\"[^\"]*\"\"\"\n)",
        r"\1    print(1)\n",
    ),
    "`refine` in `comparison/baselines/rejection_sft.py`": (
        f"{SOURCES}/comparison/baselines/rejection_sft.py",
        r"(def refine\(.*\n)",
        r'\1    """Refine."""\n    print(1)\n',
    ),
    "`reporting/style.py`": (f"{SOURCES}/reporting/style.py", r"\Z", "\nprint(1)\n"),
    "`stages/routes.py`": ("stages/routes.py", r"\Z", "\nprint(1)\n"),
    "`selection.delta` in `conf/`": ("conf/experiment/smoke.yaml", r"^selection:\n", "selection:\n  delta: 0.31\n"),
    "`evaluation.trials` in `params.yaml`": ("params.yaml", r"trials: null", "trials: 3"),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code, the stages and the configuration."""
    folder = tmp_path_factory.mktemp("reruns")
    for name in (SOURCES, "stages", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, folder / name)
    text = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(text.replace("experiment: default", "experiment: smoke"))
    return folder


@pytest.fixture
def project(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = checkout / SOURCES
    baselines = package / "comparison/baselines"
    row_file = captrain.comparison.row_file
    monkeypatch.setattr(sys.modules["captrain.run.fingerprint"], "PACKAGE", package)
    monkeypatch.setattr(sys.modules["captrain.run.shipped"], "PACKAGE", package)
    monkeypatch.setattr(captrain.comparison, "row_file", lambda name: baselines / row_file(name).name)
    assert shipped("stages") == checkout / "stages"
    return checkout


def params(project: Path) -> dict[str, list[object]]:
    """Compose, and return what DVC compares of each stage: the values of its params."""
    choice = load_choice(project / "params.yaml")
    spec = compose_spec(choice.experiment, choice.seed, choice.overrides, project / "conf")
    publish_spec(spec, project / "results/spec.yaml", code_digests(spec))
    stages, values = read_stages(project / "dvc.yaml", ""), dict[str, list[object]]()
    for name in [name for name in stages if name != "compose"]:
        for file, keys in (pair for entry in stages[name]["params"] for pair in entry.items()):
            content = yaml.safe_load((project / file).read_text())
            for key in keys:
                value = content
                for part in key.split("."):
                    value = value[part]
                values.setdefault(row_of(name), []).append(value)
    return values


@pytest.fixture(scope="module")
def before() -> dict[str, list[object]]:
    return {}


@pytest.mark.parametrize("case", CASES)
def test_the_stages_that_a_change_makes_stale_are_those_of_the_table(
    project: Path, before: dict[str, list[object]], case: str
) -> None:
    before.update(before or params(project))
    name, pattern, replacement = CASES[case]
    path = project / name
    text = path.read_text()
    changed, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(changed)
    try:
        after = params(project)
    finally:
        path.write_text(text)
    stale = [stage for stage in before if before[stage] != after[stage]]
    rows = [stage for stage in stale if stage.startswith("evaluation@")]
    if rows:
        assert rows == [stage for stage in before if stage.startswith("evaluation@")]
        stale = [*dict.fromkeys(stage.partition("@")[0] for stage in stale)]
    [row] = [line for line in TABLE.splitlines() if line.startswith(f"| {case} |")] or [""]
    assert re.findall(r"`(\w+)`", row.removeprefix(f"| {case} |")) == stale, stale


def test_the_table_has_no_other_cases() -> None:
    section = TABLE.partition("| change | stages that rerun, beside `compose` |")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()[2:]] == [*CASES]
