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
    "records/files.py": "the one way in",
    "interop/logs/records.py": "logs of others, of which one bad row is listed and the rest is read",
    "interop/trajectories.py": "lines of either of two shapes",
    "models/answers.py": "an answer that is not whole is asked for again",
    "environments/sandbox/confinement/server.py": "where nothing of ours is",
    "benchmarks/workers/bfcl_worker.py": "where nothing of ours is",
    "benchmarks/workers/openenv_worker.py": "where nothing of ours is",
    "scripts/score_diagnosis.py": "lines of people's hands and of a diagnosis, of which one that is damaged ends it",
    "scripts/bench_growth.py": "the example that ships, and lines that it has written",
}
"""Files that parse by themselves, and why."""


WRITINGS = {"write_text", "write_bytes", "save_pretrained", "save_file", "copytree", "dump", "savefig"}
WRITERS = {
    "run/locks.py": "locks hold nothing",
    "comparison/points.py": "workspaces of points, made again from what git has before each run; their logs",
    "interop/logs/reading.py": "into a folder that is gone once it is read",
    "models/lora.py": "into the folder that its callers name, which is aside",
    "agents/servers.py": "logs of servers, and copies of adapters, of which they read only whole ones",
    "projects/hub.py": "copies into the folder that its callers name, which is aside",
    "agents/collection.py": "adds whole lines to a journal, of which one that is cut off is played again",
    "training/grpo.py": "into its workspace, from which training goes on",
    "training/processes.py": "orders and failures in a workspace, which are written anew",
}
"""Files that write but not aside first, and why they may."""


SKIPPING = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"}
"""Ways to leave a test out, of which the suite's own takes one."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree."""
    return [*ast.walk(ast.parse(path.read_text()))]


def test_imports_go_down_the_layers_and_in_no_circle() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_room_is_in_the_layers_and_says_in_one_sentence_what_it_holds() -> None:
    [layers, *_] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {name for layer in layers["layers"] for name in layer.replace(" ", "").split("|")}
    package = ROOT / "src/captrain"
    assert {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} == {
        *named, "__init__",
    }  # fmt: skip
    for init in package.rglob("*/__init__.py"):
        sentence = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert sentence.endswith(".") and "\n" not in sentence, init


def test_rooms_import_from_rooms_and_not_from_their_modules() -> None:
    """A name that a room does not export is its own affair; a stage of a row runs that row."""
    for path in (path for path in SOURCES if "workers" not in path.parts and "confinement" not in path.parts):
        room = path.relative_to(ROOT / "src/captrain").parts[0] if "captrain" in path.parts else ""
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("captrain."):
                _, place, *module = node.module.split(".")
                row = [alias.name for alias in node.names] == ["BASELINE"]
                whole = not module or (ROOT / "src" / node.module.replace(".", "/")).is_dir()
                assert place == room or whole or row, f"{path.relative_to(ROOT)}:{node.lineno} {node.module}"


def test_any_stands_where_a_library_gives_it_and_no_line_is_kept_from_the_formatter() -> None:
    names = [node for path in SOURCES for node in nodes(path) if isinstance(node, ast.Name)]
    assert sum(node.id == "Any" for node in names) < 120
    assert not [path for path in SOURCES if "# fmt: skip" in path.read_text()]


def test_whatever_is_read_is_read_in_one_place() -> None:
    """A function that opens a file and parses what it holds checks it by itself, or does not."""
    readers = set[str]()
    for path in SOURCES:
        for function in nodes(path):
            if isinstance(function, ast.FunctionDef | ast.Lambda):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                methods = {
                    call.attr
                    for call in calls
                    if isinstance(call, ast.Attribute) and ast.unparse(call.value) != "pickle"
                }
                methods |= {call.id for call in calls if isinstance(call, ast.Name) and call.id == "open"}
                if methods & PARSERS and methods & {"open", "read_text", "read_bytes"}:
                    readers.add(str(path.relative_to(ROOT)).removeprefix("src/captrain/"))
    assert readers == {*READERS}


def test_whatever_is_written_is_written_aside_first() -> None:
    """A file that a full disk cuts off is removed, and what lay there before stays."""
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


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 100), ("docs/decisions.md", 250), ("CHANGELOG.md", 120), ("dvc.yaml", 260)]
)
def test_what_a_newcomer_reads_first_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_the_version_is_the_same_wherever_it_stands() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version == __version__
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflows_call_what_ci_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    ci = (ROOT / ".ci/run").read_text()
    assert commands == {"make check", "make test", ".ci/run"} and "make check\nmake test-all" in ci


def test_a_stage_is_a_short_script() -> None:
    assert all(len(path.read_text().splitlines()) <= 30 for path in (ROOT / "stages").glob("*.py"))


def test_a_test_names_what_it_needs_by_one_marker_of_known_names() -> None:
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
