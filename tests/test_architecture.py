"""The structure of the code: layers, imports, types, where files are read and written, and lengths."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from support.needs import NEEDS

from captrain import __version__

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for top in ("src/captrain", "stages", "scripts") for path in (ROOT / top).rglob("*.py"))
PARSERS = {"loads", "load", "safe_load", "read_csv", "model_validate_json", "validate_json", "DictReader"}
READERS = {
    "records/files.py": "the one reader of files",
    "interop/logs/records.py": "logs of others: a bad row is reported and the rest is read",
    "interop/trajectories.py": "lines have one of two shapes",
    "training/processes.py": "work that was pickled just before by the process that started this one",
    "run/slurm.py": "a damaged result of a job is computed again",
    "environments/sandbox/confinement/server.py": "runs without captrain",
    "benchmarks/workers/bfcl_worker.py": "runs without captrain",
    "scripts/score_diagnosis.py": "hand-written labels; a damaged line ends the script",
    "scripts/site_notebooks.py": "notebooks of this repository",
    "scripts/site_reference.py": "files of this repository, for its own pages",
    "scripts/bench_growth.py": "the included example, and lines that it wrote itself",
}
"""Files that parse files by themselves, and why."""


WRITINGS = {"write_text", "write_bytes", "save_pretrained", "save_file", "copytree", "dump", "savefig"}
WRITERS = {
    "run/streams.py": "logs of child processes, and the null device in place of closed output",
    "run/outputs.py": "links files into a folder that is aside",
    "run/locks.py": "empty lock files",
    "comparison/points.py": "workspaces of points, made anew from git before each run, and their logs",
    "interop/logs/reading.py": "into a temporary folder",
    "interop/logs/packed.py": "into a temporary folder",
    "serving/folders.py": "into a temporary folder, too",
    "models/lora.py": "into its callers' folder, which is written aside",
    "models/gated.py": "into its callers' folder, which is in a workspace or aside",
    "agents/servers.py": "logs of servers, and copies of adapters, which are read only when complete",
    "projects/hub.py": "into its callers' folder, which is written aside, too",
    "agents/collection.py": "appends lines to a journal; a cut-off line is played again",
    "training/grpo.py": "into its workspace, from which training resumes",
    "training/processes.py": "orders and failures in a workspace, which are rewritten",
}
"""Files that write in place, and why they may."""


SKIPPING = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"}
"""Ways to skip a test; only conftest.py uses one."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """List the nodes of a file's syntax tree."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def test_imports_go_down_the_layers_without_cycles() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_package_is_in_the_layers_and_has_a_one_sentence_docstring() -> None:
    [layers, *_] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {name for layer in layers["layers"] for name in layer.replace(" ", "").split("|")}
    package = ROOT / "src/captrain"
    assert {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} == {
        *named, "__init__",
    }  # fmt: skip
    for init in package.rglob("*/__init__.py"):
        sentence = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert sentence.endswith(".") and "\n" not in sentence, init


def test_packages_import_only_exported_names_of_each_other() -> None:
    """A package's private names stay private; only the stage of a row imports that row's module."""
    for path in (path for path in SOURCES if "workers" not in path.parts and "confinement" not in path.parts):
        own = path.relative_to(ROOT / "src/captrain").parts[0] if "captrain" in path.parts else ""
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("captrain."):
                _, place, *module = node.module.split(".")
                row = [alias.name for alias in node.names] == ["BASELINE"]
                whole = not module or (ROOT / "src" / node.module.replace(".", "/")).is_dir()
                assert place == own or whole or row, f"{path.relative_to(ROOT)}:{node.lineno} {node.module}"


def test_any_is_rare_and_the_formatter_formats_every_line() -> None:
    names = [node for path in SOURCES for node in nodes(path) if isinstance(node, ast.Name)]
    assert sum(node.id == "Any" for node in names) < 120
    assert not [path for path in SOURCES if "# fmt: skip" in path.read_text()]


def test_files_are_read_and_checked_in_one_place() -> None:
    """`records/files.py` reads and checks files; a function that opens and parses a file itself must be listed
    above."""
    readers = set[str]()
    for path in SOURCES:
        for function in nodes(path):
            if isinstance(function, ast.FunctionDef | ast.Lambda):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                methods = {call.attr for call in calls if isinstance(call, ast.Attribute)}
                methods |= {call.id for call in calls if isinstance(call, ast.Name) and call.id == "open"}
                if methods & PARSERS and methods & {"open", "read_text", "read_bytes"}:
                    readers.add(str(path.relative_to(ROOT)).removeprefix("src/captrain/"))
    assert readers == {*READERS}


def test_files_are_written_aside_and_renamed() -> None:
    """With a full disk the half-written copy is removed and the old file stays."""
    writers = set[str]()
    for path in SOURCES:
        name = str(path.relative_to(ROOT)).removeprefix("src/captrain/")
        if {"scripts", "workers", "confinement"} & {*path.parts}:
            continue
        for function in nodes(path):
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
            values = [node for call in calls for argument in call.args for node in ast.walk(argument)]
            modes = {node.value for node in values if isinstance(node, ast.Constant)}
            opens = "open" in names and bool(modes & {"w", "wb", "a", "ab", "ab+", "x"})
            if (opens or names & WRITINGS) and "place_aside" not in names:
                writers.add(name)
    assert writers == {*WRITERS}


def test_text_is_read_and_written_as_utf8_whatever_the_locale() -> None:
    """ruff's PLW1514 sees only paths whose type it can infer, and no processes."""
    places = list[str]()
    for path in SOURCES:
        for call in nodes(path):
            if isinstance(call, ast.Call) and "encoding" not in {keyword.arg for keyword in call.keywords}:
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                values = [*call.args, *(keyword.value for keyword in call.keywords)]
                modes = {value.value for value in values if isinstance(value, ast.Constant)}
                reads = isinstance(call.func, ast.Attribute) and name == "read_text" and not call.args
                opens = name in ("open", "fdopen") and modes & {"r", "w", "a", "x", "r+", "w+", "a+"}
                pipes = any(
                    keyword.arg == "text" and keyword.value.value is True
                    for keyword in call.keywords
                    if isinstance(keyword.value, ast.Constant)
                )
                if name == "write_text" or reads or opens or pipes:
                    places.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not places


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 100), ("docs/decisions.md", 250), ("CHANGELOG.md", 120), ("dvc.yaml", 180)]
)
def test_the_first_pages_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version == __version__
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflows_call_what_ci_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    ci = (ROOT / ".ci/run").read_text()
    assert commands == {"make check", "make test", ".ci/run"}
    made = [line for line in ci.splitlines() if line.startswith("make ")]
    assert made == ["make venv", "make check", "make test-all"]


def test_function_bodies_have_at_most_60_lines() -> None:
    long = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first, *_ = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                if (node.end_lineno or 0) - first.lineno >= 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_loops_state_their_conditions_in_statements() -> None:
    """`for x in xs if condition else ()` hides a branch."""
    hidden = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.For)
        and isinstance(node.iter, ast.IfExp)
        and {ast.unparse(node.iter.body), ast.unparse(node.iter.orelse)} & {"()", "[]", "{}", "''"}
    ]
    assert not hidden


def test_a_stage_is_a_short_script() -> None:
    assert all(len(path.read_text().splitlines()) <= 30 for path in (ROOT / "stages").glob("*.py"))


def test_tests_declare_their_needs_with_known_names() -> None:
    named, skipping = set[str](), set[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.needs":
                named |= {word.value for word in node.args if isinstance(word, ast.Constant)}
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in SKIPPING:
                skipping.add(path.name)
    assert named <= NEEDS.keys() and skipping == {"conftest.py"}


def test_no_test_imports_another() -> None:
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        for node in nodes(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not tests & {part for name in names for part in name.split(".")}, path
