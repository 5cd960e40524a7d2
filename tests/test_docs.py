"""The pages of docs/ and the README: every command works, and their lists match the code.

A command in a shell fence either runs here in a scratch copy of the commit, or is listed below with the test that
covers it, or a comment before the fence says why it is not run. A new command that is none of these fails.
"""

import ast
import csv
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from support.browser import Browser
from support.finished import GIT, Captrain
from support.needs import further
from support.pages import PAGES, ROOT, PageCommand, commands_of, run_command
from typer.core import TyperGroup

from captrain.cli.app import app
from captrain.comparison import baselines
from captrain.run import compose_spec

RUN = (
    ".venv/bin/captrain diagnose",
    "captrain diagnose",
    "captrain export",
    "captrain plan",
    "captrain power",
    "captrain published",
    "captrain report",
    "captrain results",
    "dvc dag",
    "dvc exp show",
    "dvc plots diff",
    "dvc status",
    "lint-imports",
)
"""Beginnings of the commands that run here."""
COVERED = {
    "captrain jobs": "tests/run/test_slurm.py::test_jobs_are_shown_with_state_last_line_and_reason",
    "captrain serve": "tests/serving/test_server.py::"
    "test_the_command_takes_vllms_arguments_says_when_it_is_ready_and_ends_after_what_it_has_begun",
    "captrain synthesize": "tests/diagnosis/test_synthesis.py::"
    "test_the_command_of_an_advice_makes_an_environment_with_a_passport",
    "captrain check-benchmark": "tests/projects/test_check_benchmark.py::test_the_command_says_so_and_exits_with_one",
    "captrain init": "tests/projects/test_projects.py::test_init_replaces_nothing_and_begins_no_project_within_another",
    "captrain validate": "tests/environments/test_passport.py::"
    "test_validate_prints_the_sandbox_and_every_check_and_writes_passport_and_page",
    "captrain verify": "tests/reporting/test_verification.py::test_verify_holds_for_what_was_run_and_committed",
    "captrain-sweep -m +study=": "tests/comparison/test_sweep.py::"
    "test_a_study_names_its_table_shares_points_and_can_be_overridden",
    "captrain-sweep -m selection": "tests/comparison/test_sweep.py::"
    "test_points_share_stages_and_fail_and_rerun_independently",
    "dvc exp run -S selection": "tests/run/test_spec.py::"
    "test_an_experiment_of_dvc_sets_a_setting_and_an_unknown_one_is_refused",
    "make figures WIDTH=3.3 OUT=paper": "tests/reporting/test_figures.py::"
    "test_texts_stay_apart_and_inside_and_are_large_enough_at_every_width",
    "make figures": "tests/reporting/test_studies.py::test_all_figures_redraw_to_the_same_bytes_without_torch",
    "make replicate": "tests/comparison/test_replicate.py::test_points_share_the_base_resume_and_survive_a_failure",
    "make repro": "tests/test_pipeline.py::test_every_stage_leaves_its_results_and_the_table_prints",
    "make studies": "tests/comparison/test_sweep.py::test_every_study_composes_and_varies_the_settings_of_its_figure",
    "make test": "tests/test_docs.py::test_every_command_is_run_or_covered_or_said_not_to_be",
    "pytest tests/": "tests/test_docs.py::test_every_command_is_run_or_covered_or_said_not_to_be",
}
"""Beginnings of other commands, each with the test that covers it."""
COMMANDS = {command.line: command for page in PAGES for command in commands_of(page)}
SELECTIONS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, text in enumerate(re.findall(r"^```yaml\n(# params\.yaml\n.*?)^```", page.read_text(), re.M | re.S))
]
FIELD = "document.querySelector('.md-search__input')"
CUT = """(() => {
  const edge = document.querySelector('.md-content').getBoundingClientRect().right + 1;
  const cut = [...document.querySelectorAll('.md-content table, .md-content pre')]
    .filter(table => table.getBoundingClientRect().right > edge);
  return cut.map(table => table.textContent.slice(0, 50));
})()"""
"""JavaScript that lists tables and code blocks wider than the text column."""
INLINE = re.compile(r"`([^`\n]+)`")


def is_run(command: PageCommand) -> bool:
    return not command.reason and command.line.startswith(RUN)


@cache
def functions_of(path: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def commands_offered() -> set[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return set(group.commands)


def table_of(page: str, head: str) -> list[list[str]]:
    """Return the rows of a page's first table with this header."""
    text = (ROOT / "docs" / page).read_text()
    table = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, committed: Path) -> Path:
    """This checkout's code and pages, the committed results, and the example chats as discovery rollouts."""
    root = tmp_path_factory.mktemp("project")
    for name in ("conf", "docs", "scripts", "src", "stages"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(committed / "results", root / "results")
    for name in ("params.yaml", "dvc.yaml", "pyproject.toml", "mkdocs.yml", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, root)
    for page in ROOT.glob("*.md"):
        shutil.copy(page, root)
    shutil.copy(committed / "dvc.lock", root)
    shutil.copytree(ROOT / ".dvc/plots", root / ".dvc/plots")
    shutil.copy(ROOT / ".dvc/config", root / ".dvc")
    shutil.copy(ROOT / ".gitignore", root)
    for words in ("init -q", "add -A", "commit -qm all"):
        subprocess.run(["git", *words.split()], cwd=root, check=True, env=os.environ | GIT)
    diagnosed = run_command("captrain diagnose docs/examples/servicedesk.jsonl --out out", root)
    assert diagnosed.returncode == 0, diagnosed.stderr
    (root / "artifacts/rollouts").mkdir(parents=True)
    shutil.copy(root / "out/rollouts.jsonl", root / "artifacts/rollouts/discovery.jsonl")
    return root


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_is_run_or_covered_or_said_not_to_be(command: PageCommand) -> None:
    tests = [test for prefix, test in COVERED.items() if command.line.startswith(prefix)]
    kinds = [bool(command.reason), is_run(command), bool(tests)]
    assert any(kinds), f"{command.page}: run it here, name its test, or say on the page why it is not run"
    for path, _, name in (test.partition("::") for test in tests):
        assert name in functions_of(path), f"{path} has no {name}"
    if command.line.startswith("pytest "):
        assert [path for path in command.line.split()[1:] if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("line", further([line for line, command in COMMANDS.items() if is_run(command)], 12))
def test_a_command_on_a_page_does_what_it_says(line: str, project: Path, captrain: Captrain) -> None:
    program, *arguments = shlex.split(line.removeprefix(".venv/bin/"))
    if program == "captrain":
        status, out, err = captrain(project, *arguments)
    else:
        done = run_command(line, project)
        status, out, err = done.returncode, done.stdout, done.stderr
    assert status == 0, f"{out}\n{err}"
    assert out.strip()


def test_the_results_of_one_setting_have_few_columns_no_warning_and_leave_no_file_for_git(project: Path) -> None:
    metrics = project / "results/evaluation/metrics.json"
    before = metrics.read_text()
    metrics.write_text(re.sub(r"(\d)(,?)$", r"\g<1>7\2", before, flags=re.MULTILINE))
    try:
        [show] = [line for line in COMMANDS if line.startswith("dvc exp show")]
        head, *_ = run_command(f"{show} --md", project).stdout.splitlines()
        [plots] = [line for line in COMMANDS if line.startswith("dvc plots diff")]
        drawn = run_command(plots, project)
    finally:
        metrics.write_text(before)
    columns = [column.strip() for column in head.strip("|").split("|")]
    assert {"pass_rate.base", "pass_rate.trace"} <= {*columns} and len(columns) <= 12
    assert "dvc_plots/index.html" in drawn.stdout and "WARNING" not in drawn.stdout + drawn.stderr
    ignored = subprocess.run(["git", "check-ignore", "dvc_plots/index.html"], cwd=project, check=False)
    assert ignored.returncode == 0


@pytest.mark.parametrize("text", SELECTIONS)
def test_a_selection_on_a_page_composes(text: str) -> None:
    chosen = yaml.safe_load(text)
    compose_spec(chosen.get("experiment", "default"), chosen.get("seed", 0), chosen["overrides"], ROOT / "conf")


def test_commands_and_targets_that_are_named_in_a_line_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [words for page in PAGES for text in INLINE.findall(page.read_text()) if len(words := text.split()) > 1]
    assert {words[1] for words in named if words[0] == "captrain"} <= commands_offered()
    assert {words[1] for words in named if words[0] == "make"} <= targets


def test_choices_that_are_named_in_a_line_are_files_of_conf() -> None:
    groups = {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()}
    named = {text for page in PAGES for text in INLINE.findall(page.read_text())}
    choices = {match.groups() for text in named for match in re.finditer(r"(?<![\w.])([a-z]+)[=:] ?([a-z]\w+)", text)}
    lacking = [
        pair for pair in choices if pair[0] in groups and not (ROOT / "conf" / f"{pair[0]}/{pair[1]}.yaml").exists()
    ]
    assert lacking == []


def test_paths_and_modules_that_are_named_in_a_line_exist() -> None:
    named = {text for page in [*PAGES, ROOT / "CONTRIBUTING.md"] for text in INLINE.findall(page.read_text())}
    own = re.compile(r"(?:src|conf|stages|scripts|tests|docs)/[\w./-]*|[\w/]+/\w+\.py")
    paths = {text for text in named if own.fullmatch(text)} | {
        f"{text.removeprefix('captrain.').replace('.', '/')}.py"
        for text in named
        if re.fullmatch(r"captrain(\.(?!yaml)\w+)+", text)
    }
    assert [path for path in paths if not ((ROOT / path).exists() or (ROOT / "src/captrain" / path).exists())] == []


def test_the_stages_on_the_page_are_those_of_the_pipeline() -> None:
    listed = [name for cells in table_of("stages.md", "| stage |") for name in INLINE.findall(cells[0])]
    assert sorted(listed) == sorted(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])


def test_every_row_of_the_registry_is_on_the_page_of_methods_by_its_label() -> None:
    text = (ROOT / "docs/methods.md").read_text()
    assert [
        row.label for row in baselines().values() if not re.search(rf"^\| {row.label} \|", text, re.MULTILINE)
    ] == []


def test_the_architecture_page_lists_the_layers_of_the_import_check() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    expected = [(len(layers) - index, name.strip()) for index, layer in enumerate(layers) for name in layer.split("|")]
    rows = table_of("architecture.md", "| layer |")
    listed = [(int(layer), re.sub(r"[`/]|\.py", "", package)) for layer, package, _ in rows]
    assert listed == expected


def test_the_pages_build_without_a_warning_and_a_reader_fetches_nothing(project: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = run_command(f"mkdocs build --strict --site-dir {site}", project)
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text() for page in site.glob("*.html")}
    assert {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")} <= set(pages)
    for text in pages.values():
        assert re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=.?https?:", text) == []
    assert (site / "results/figures/main.png").read_bytes() == (project / "results/figures/main.png").read_bytes()
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for name in commands_offered() if f">captrain {name}" not in pages["commands.html"]] == []
    assert [name for name in targets if f"<code>make {name}</code>" not in pages["commands.html"]] == []
    assert "--analyst" in pages["commands.html"] and "captrain.diagnose" in pages["python.html"]
    assert "<code>selection.delta</code>" in pages["settings.html"]
    assert "results/evaluation/main.csv" in pages["result-files.html"]
    assert (
        "wrong_argument" in pages["diagnose-notebook.html"]
        and "(troubleshooting.html)" in (site / "llms.txt").read_text()
    )


def test_a_broken_link_ends_the_build_of_the_pages(project: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(project, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    page = copy / "docs/index.md"
    page.write_text(page.read_text() + "\n[A page](missing.md)\n")
    done = run_command(f"mkdocs build --strict --site-dir {tmp_path / 'site'}", copy)
    assert done.returncode != 0 and "missing.md" in done.stderr


@pytest.mark.needs("browser")
def test_search_works_from_a_disk_and_no_page_has_a_cut_table_or_a_serious_barrier_to_a_reader(
    browser: Browser, project: Path, tmp_path: Path
) -> None:
    assert run_command(f"mkdocs build --strict --site-dir {tmp_path}", project).returncode == 0
    browser.screen(1280, 1000)
    for page in sorted(tmp_path.glob("[!4]*.html")):  # 404.html only works on a server
        browser.open(page.as_uri())
        assert browser.run(CUT) == [], page.name
        assert browser.barriers() == [], page.name
    browser.open((tmp_path / "index.html").as_uri())
    browser.run(f"document.querySelector('[data-md-toggle=search]').click(); {FIELD}.focus()")
    browser.wait("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')")
    browser.run(f"{FIELD}.value = 'passport'; {FIELD}.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}))")
    browser.wait("document.querySelector('.md-search-result__link[href*=environments]') !== null")
    assert browser.faults() == []


@pytest.mark.parametrize("page", ["README.md", "docs/paper.md", "docs/results.md", "docs/results-earlier.md"])
def test_numbers_with_intervals_are_those_of_the_tables(page: str, committed: Path) -> None:
    tables = {
        "replicates/differences": "difference",
        "replicates/domains/differences": "difference",
        "replicates/domains/summary": "pass_rate",
        "replicates/headline/differences": "difference",
        "replicates/headline/summary": "pass_rate",
        "evaluation/differences": "difference",
        "evaluation/main": "pass_rate",
        "sweeps/mixes": "pass_rate",
        "sweeps/warm_starts": "pass_rate",
        "sweeps/faults": "pass_rate",
    }
    rows: list[list[float]] = []
    for table, column in tables.items():
        with (committed / f"results/{table}.csv").open(newline="") as file:
            rows += [[float(row[name] or "nan") for name in (column, "low", "high")] for row in csv.DictReader(file)]
    recorded = {tuple(f"{value:.3f}" for value in row) for row in rows}
    recorded |= {tuple(f"{-value:.3f}" for value in (difference, high, low)) for difference, low, high in rows}
    text = " ".join((ROOT / page).read_text().split())
    stated = re.findall(r"(\.\d{3})(?: \(|, )(\.\d{3}) to (\.\d{3})", text)
    assert stated
    assert [triple for triple in stated if tuple(f"0{value}" for value in triple) not in recorded] == []
