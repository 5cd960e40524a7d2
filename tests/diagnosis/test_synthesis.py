"""`captrain synthesize` through the command line: by a program in a project, by a language model on the loopback."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.answering import Answering, Body
from support.needs import further
from typer.testing import CliRunner

from captrain.benchmarks.servicedesk import TOOLS
from captrain.cli.app import app
from captrain.contract import load_file
from captrain.errors import UserError
from captrain.records import Passport, read_json
from captrain.run import compose_spec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/servicedesk.jsonl"
WRITTEN = ROOT / "tests/answers/environments"
FEW = ["environments.seeds=10", "environments.seconds=600"]
"""Tasks of an examination, and the seconds that it may take on a machine that is busy."""


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def make_project(folder: Path) -> None:
    """A project of the embedded benchmark; its environments are examined on a few tasks."""
    (folder / "dvc.yaml").touch()
    choice = yaml.safe_load((ROOT / "params.yaml").read_text())
    (folder / "params.yaml").write_text(yaml.safe_dump({**choice, "overrides": FEW}))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, as the current folder."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No project, and logs that hold the schemas of their tools."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({**row, "tools": TOOLS}) + "\n" for row in rows))
    return tmp_path


def configured(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Without a project, too, environments are examined on a few tasks."""
    spec = compose_spec("default", 0, [*FEW, *overrides], ROOT / "conf")
    monkeypatch.setattr("captrain.diagnosis.synthesis._configuration", lambda project: spec)


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that `captrain diagnose EXAMPLE --out found` leaves in a project: to copy."""
    folder = tmp_path_factory.mktemp("diagnosed")
    make_project(folder)
    with contextlib.chdir(folder):
        run("diagnose", EXAMPLE, "--out", "found")
    return folder / "found"


def advice(folder: Path) -> dict[str, str]:
    """What a diagnosis advises against each cause that it would train: the actions, and then the command."""
    entries = json.loads((folder / "advice.json").read_text())
    texts = [" ".join([*entry["actions"], entry["command"]]) for entry in entries]
    return {match.group(1): text for text in texts for match in re.finditer(r"train (\w+) \(", text)}


def command_in(text: str) -> list[str]:
    """The command that an advice names."""
    return text[text.rindex("captrain ") :].removeprefix("captrain ").split()


@pytest.mark.parametrize(
    ("cause", "family"),
    further([(name, name) for name in ("wrong_argument", "missing_lookup", "missing_write", "wrong_record")]),
)
def test_the_command_of_an_advice_makes_an_environment_with_a_passport(
    project: Path, diagnosed: Path, cause: str, family: str
) -> None:
    shutil.copytree(diagnosed, project / "found")
    report = (project / "found/report.md").read_text()
    command = command_in(advice(project / "found")[cause])
    assert command == ["synthesize", cause, "--diagnosis", "found", "--out", "environments"]
    assert f"`captrain {' '.join(command)}`" in report
    status, printed = run(*command)
    assert status == 0 and f"environment for {family}, derived by a program" in printed
    passport = read_json(project / f"environments/{family}.passport.json", Passport)
    assert passport.passed and passport.trusted and passport.checks
    target = load_file(project / f"environments/{family}.py")
    assert target.tools == TOOLS and target.tasks("training", 3)


def test_a_language_model_writes_it_from_logs_alone_and_its_cost_comes_first(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(monkeypatch)
    run("diagnose", "log.jsonl", "--out", "found")
    command = command_in(advice(elsewhere / "found")["missing_lookup"])
    assert command[-2:] == ["--model", "MODEL"]
    name = "missing_lookup"
    asked: list[Body] = []

    def answer(body: Body) -> dict[str, Any]:
        asked.append(body)
        return {
            "reasoning": "As recorded.",
            "code": (WRITTEN / f"{name}.py").read_text().replace(name, "missing_lookup"),
        }

    with Answering(answer) as server:
        server.use(monkeypatch)
        status, printed = run(*command, "--dry-run", "--prices", 1, 2, "--sandbox", "basic")
        assert status == 0 and not asked and "at most 3 questions" in printed and "in money" in printed
        assert not (elsewhere / "environments").exists()
        status, printed = run(*command, "--prices", 1, 2, "--sandbox", "basic")
    assert status == 0, printed
    assert len(asked) == 1 and printed.index("at most 3 questions") < printed.index("The model gave 1 answer: ")
    assert "cost " in printed
    passport = read_json(elsewhere / "environments/missing_lookup.passport.json", Passport)
    assert passport.passed and not passport.trusted
    # What was logged is held out: its words are in the account of the checks, and its ids are no task's.
    assert {"ids of test tasks", "share of a test task's words"} <= {check.name for check in passport.checks}
    # The answer is kept: again, without an endpoint.
    monkeypatch.delenv("OPENAI_BASE_URL")
    assert run(*command, "--sandbox", "basic")[0] == 0


def test_an_environment_that_repeats_a_logged_task_earns_no_passport(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(monkeypatch, "environments.rounds=1")
    run("diagnose", "log.jsonl", "--out", "found")
    rows = [json.loads(line) for line in (elsewhere / "log.jsonl").read_text().splitlines()]
    longest = max((row["messages"][1]["content"] for row in rows), key=len)
    code = (WRITTEN / "missing_lookup.py").read_text() + f"\n\nREPEATED = {longest!r}\n"
    with Answering(lambda body: {"reasoning": "Recorded.", "code": code}) as server:
        server.use(monkeypatch)
        status, printed = run(*command_in(advice(elsewhere / "found")["missing_lookup"]), "--sandbox", "basic")
    assert status == 1 and "no attempt earned its passport" in printed and "share of a test task's words" in printed
    assert (elsewhere / "environments/rejected/missing_lookup.py").exists()
    assert not (elsewhere / "environments/missing_lookup.py").exists()


def test_what_cannot_be_made_is_one_message_with_the_remedy(elsewhere: Path) -> None:
    run("diagnose", EXAMPLE, "--out", "bare")
    needed = advice(elsewhere / "bare")["wrong_argument"]
    assert "FILE: a JSON list of your tools' schemas, which the logs lack" in needed
    assert needed.rstrip().endswith("--tools FILE --model MODEL")
    order = ("synthesize", "wrong_argument", "--out", "environments", "--diagnosis")
    with pytest.raises(UserError, match=r"the schemas of \d+ tools? are missing, such as \w+(.|\n)*--tools"):
        run(*order, "bare", "--model", "m")
    (elsewhere / "tools.json").write_text(json.dumps(TOOLS))
    status, printed = run(*order, "bare", "--model", "m", "--tools", "tools.json", "--dry-run")
    assert status == 0 and "m is asked: at most" in printed
    with pytest.raises(UserError, match=r"not a project of the logs' benchmark(.|\n)*--model"):
        run(*order, "bare", "--tools", "tools.json")
    with pytest.raises(UserError, match="has no capability wrong_argumnt(.|\n)*did you mean wrong_argument"):
        run("synthesize", "wrong_argumnt", "--out", "environments", "--diagnosis", "bare")
    (elsewhere / "tools.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"tools\.json"):
        run(*order, "bare", "--tools", "tools.json")
    with pytest.raises(UserError, match="holds no diagnosis"):
        run(*order, ".")
    with pytest.raises(UserError, match=r"there is no diagnosis to read(.|\n)*--diagnosis"):
        run(*order[:-1])
    assert not (elsewhere / "environments").exists()


def test_a_cause_that_no_step_of_a_solution_stands_for_needs_a_model(project: Path) -> None:
    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    for row in rows:
        row.pop("reference")
        if row["reward"] < 1:
            row["messages"][-1:] = [row["messages"][2], row["messages"][3]] * 8
    Path("log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run("diagnose", "log.jsonl", "--out", "found")
    assert "--model MODEL" in advice(project / "found")["loop"]
    with pytest.raises(UserError, match=r"no template trains the capability loop(.|\n)*--model"):
        run("synthesize", "loop", "--diagnosis", "found", "--out", "environments")


def test_a_projects_own_capabilities_are_synthesized_without_a_diagnosis_of_logs(project: Path) -> None:
    with pytest.raises(UserError, match="no capabilities yet"):
        run("synthesize", "wrong_record", "--out", "environments")
    for name in ("results/capabilities/capabilities.jsonl", "artifacts/rollouts/discovery.jsonl"):
        (project / name).parent.mkdir(parents=True)
    capability = {"id": "wrong_record", "name": "Record selection", "description": "Picks it.", "examples": []}
    (project / "results/capabilities/capabilities.jsonl").write_text(json.dumps(capability) + "\n")
    (project / "artifacts/rollouts/discovery.jsonl").write_text("")
    with pytest.raises(UserError, match="belongs to the pipeline"):
        run("synthesize", "wrong_record", "--out", "results/environments")
    with pytest.raises(UserError, match="no base to play"):
        run("synthesize", "wrong_record", "--out", "environments", "--calibrate")
    assert run("synthesize", "wrong_record", "--out", "environments")[0] == 0
    assert read_json(project / "environments/wrong_record.passport.json", Passport).passed
