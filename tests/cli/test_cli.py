"""The command line through its entry point, on hand-made results and a small pipeline."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.finished import Captrain
from support.pages import run_command
from support.waiting import PATIENCE
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from captrain.cli.app import app
from captrain.records import publish_json, publish_text

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "docs/examples/servicedesk.jsonl"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project without results and pipeline state."""
    publish_text(tmp_path / "dvc.yaml", "stages: {}\n")
    return tmp_path


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from captrain.cli import app as cli\n"
        "sys.argv = ['captrain', '--help']\n"
        "try: cli.main()\n"
        "finally: print(sorted({'torch', 'transformers', 'pandas', 'dvc', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in ("results", "verify", "report"))


def helped(command: TyperCommand | TyperGroup) -> list[TyperCommand | TyperGroup]:
    """A command with all commands below it."""
    inner = command.commands.values() if isinstance(command, TyperGroup) else []
    return [command, *(one for each in inner if isinstance(each, TyperCommand | TyperGroup) for one in helped(each))]


def test_the_help_groups_every_command_and_consists_of_sentences() -> None:
    top = typer.main.get_command(app)
    assert isinstance(top, TyperGroup)
    commands = [one for one in top.commands.values() if isinstance(one, TyperCommand | TyperGroup)]
    assert len({one.rich_help_panel for one in commands}) > 3 and all(one.rich_help_panel for one in commands)
    options = [
        option for one in helped(top) for option in one.params if isinstance(option, TyperOption | TyperArgument)
    ]
    texts = [text for one in [*helped(top), *options] for text in (one.help or "").split("\n\n") if text]
    assert len(texts) > 100
    assert [text for text in texts if not text[0].isupper() or not text.endswith(".")] == []


def test_a_diagnosis_fits_80_columns_and_its_commands_stay_in_one_line(tmp_path: Path) -> None:
    done = run_command(f"captrain diagnose {LOGS} --out {tmp_path / 'out'}", ROOT, columns=80)
    out = done.stdout
    assert done.returncode == 0, done.stderr
    lines = out.splitlines()
    advice = lines[2 : lines.index("Why rollouts failed")]
    commands = [line for line in advice if "captrain synthesize" in line]
    assert len(commands) == 4 and all(line.endswith("--out environments") for line in commands)
    assert all(re.match(r"\d\. |   ", line) for line in advice), "a line continues below its text"
    assert [line for line in lines if len(line.rstrip()) > 80 and line not in commands] == []
    count = sum(line[0] != " " for line in advice)
    assert count == 5 == len(re.findall(r"^   cause: (\w+) \(.+\)$", out, re.MULTILINE))
    assert count == sum(line.startswith("   example: ") for line in advice)


def test_no_module_behind_the_commands_imports_torch() -> None:
    modules = "captrain.comparison.tables, captrain.reporting.verification, captrain.reporting.tables, dvc.repo"
    code = f"import sys, {modules}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "False"


def test_outside_a_project_the_message_says_where_to_run(tmp_path: Path, captrain: Captrain) -> None:
    status, out, err = captrain(tmp_path, "verify")
    assert (status, out) == (2, "")
    assert err.startswith("error: there is no dvc.yaml") and "Traceback" not in err


def test_without_jobs_a_message_is_printed(project: Path, captrain: Captrain) -> None:
    status, out, _ = captrain(project, "jobs")
    assert status == 0 and out.startswith("no jobs were submitted here")


def test_the_sweep_command_has_help(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['captrain-sweep', '--help']; from captrain.comparison.sweep import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "captrain-sweep -m" in done.stdout


@pytest.mark.parametrize(
    ("option", "content", "problem"),
    [
        ("--tools-as", "no_such_tool: read\n", "given names no_such_tool, which no rollout has"),
        ("--scores", "trace_id,reward\nt,1\n", "no score of given matches a rollout"),
        ("--dry-run", "", "--dry-run prints what a language model would cost"),
    ],
)
def test_a_diagnosis_option_without_effect_is_refused(
    option: str, content: str, problem: str, tmp_path: Path, captrain: Captrain
) -> None:
    publish_text(tmp_path / "given", content)
    status, _, err = captrain(tmp_path, "diagnose", str(LOGS), "--out", "out", option, *["given"][: bool(content)])
    assert status == 2 and err.startswith("error: ") and problem in err, err
    assert not (tmp_path / "out").exists()


def test_the_most_common_reason_of_unread_entries_is_printed_with_its_count(tmp_path: Path, captrain: Captrain) -> None:
    rows = [json.loads(line) for line in LOGS.read_text().splitlines()]
    bent = [{**row, "reward": "much"} if number < 18 else row for number, row in enumerate(rows)]
    text = "".join(json.dumps(row) + "\n" for row in [*bent, {**rows[0], "messages": []}])
    publish_text(tmp_path / "log.jsonl", text)
    status, out, err = captrain(tmp_path, "diagnose", "log.jsonl")
    assert (tmp_path / "diagnosis/report.html").is_file()
    assert status == 0 and "unreadable entries: " in out and "(18)" in out, out + err


@pytest.mark.parametrize("name", ["me", "/me", "me/", "a/b/c"])
def test_a_repository_without_an_owner_is_refused_before_anything_is_written(
    name: str, project: Path, captrain: Captrain
) -> None:
    status, _, err = captrain(project, "push", "adapters", name, "--dry-run", "sent")
    assert status == 2 and f"{name} is not a repository" in err and "OWNER/NAME" in err
    assert not (project / "sent").exists()


def test_a_file_without_an_environment_is_refused(committed: Path, tmp_path: Path, captrain: Captrain) -> None:
    publish_text(tmp_path / "e.py", "x = 1\n")
    status, out, err = captrain(committed, "validate", str(tmp_path / "e.py"), "--out", str(tmp_path / "out"))
    assert status == 1 and "lacks the class Environment" in " ".join(out.split()) and "KeyError" not in out + err


def test_the_page_shows_the_output_of_a_synthesis(committed: Path, tmp_path: Path, captrain: Captrain) -> None:
    diagnosis = str(tmp_path / "diagnosis")
    assert captrain(committed, "diagnose", str(LOGS), "--out", diagnosis)[0] == 0
    order = ("synthesize", "missing_lookup", "--diagnosis", diagnosis, "--out", str(tmp_path / "environments"))
    status, out, err = captrain(committed, *order)
    assert status == 0, err
    shown = re.search(r"passport: \d+ checks passed", (ROOT / "docs/synthesize.md").read_text())
    assert shown and shown[0] in out


def test_synthesize_without_a_diagnosis_outside_of_a_project_names_the_option(
    tmp_path: Path, captrain: Captrain
) -> None:
    status, _, error = captrain(tmp_path, "synthesize", "missing_lookup", "--out", "made")
    assert status == 2 and "--diagnosis is missing" in error and "add --diagnosis DIR" in error


def test_missing_results_name_the_remedy(project: Path, captrain: Captrain) -> None:
    assert "no stage has run here\n  remedy: run `captrain run`" in captrain(project, "results")[2]
    (project / "results").mkdir()
    assert "dvc repro comparison" in captrain(project, "results")[2]


def test_results_show_floor_and_versions_of_a_benchmark_before_the_evaluation(
    project: Path, captrain: Captrain
) -> None:
    floor = {"pass_rate": 0.25, "mean_reward": 0.3}
    row = {"pass_rate": 0.5, "mean_reward": 0.625, "floor": floor}
    about = {
        "benchmark": "desks",
        "version": "7",
        "user": {"name": "m", "temperature": 0.0},
        "not_runnable": {"a": "b"},
    }
    summary = {"outcomes": {"passed": 2, "failed": 2, "error": 1}, **row, "kinds": {"oak": {"rollouts": 5, **row}}}
    publish_json(project / "results/rollouts/summary.json", {**summary, "benchmark": about})
    status, out, _ = captrain(project, "results")
    assert status == 0 and "`dvc repro comparison`" in out
    assert re.search(r"oak +│ 5 +│ 0.500 +│ 0.625 +│ 0.250 +│ 0.300", out)
    assert 'version: "7"' in out and '"temperature": 0.0' in out
    assert "1 rollout ended in errors of infrastructure; 1 task not runnable here" in out


def test_a_broken_pipeline_file_is_one_message(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "dvc.yaml", "stages: [\n")
    status, _, err = captrain(pipeline, "verify")
    assert status == 2 and "DVC cannot read the pipeline" in err and "Traceback" not in err


def test_a_width_of_zero_prints_as_a_width_that_is_unknown(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "captrain.cli.app", "--help"]
    unknown = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    said = [
        subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True).stdout
        for environment in (unknown, {**unknown, "COLUMNS": "0"})
    ]
    assert said[0] == said[1] and b"diagnose" in said[0]
