"""`captrain diagnose --analyst openai` on the file that ships, by a model on the loopback interface."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.answering import Answering, Body
from support.judging import judge
from support.obeying import LURES, ORDER, obeying
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.errors import UserError
from captrain.records import RolloutLabels, load

EXAMPLE = Path(__file__).parents[2] / "docs/examples/servicedesk.jsonl"


def answer(body: Body) -> dict[str, Any]:
    """A model that proposes one capability, and says that a rollout lacks it if it closes after two calls."""
    schema, text = body["response_format"]["json_schema"]["name"], body["messages"][-1]["content"]
    if schema == "Discovery":
        place = {"rollout": 1, "message": 2}
        return {"capabilities": [{"name": "Finishing", "description": "Goes on to the end.", "evidence": [place]}]}
    if schema == "Merging":
        members = [int(number) for number in re.findall(r'"number": ?(\d+)', text)] or list(range(1, 11))
        return {"groups": [{"members": members, "name": "Finishing", "description": "Goes on to the end."}]}
    verdict = "LACKING" if text.count('"role"') < 8 else "PRESENT"
    return {"labels": [{"capability": "finishing", "evidence": "as read", "message": 2, "verdict": verdict}]}


def diagnose(*arguments: object, path: Path = EXAMPLE, columns: int = 160) -> str:
    result = CliRunner().invoke(app, ["diagnose", str(path), *map(str, arguments)], env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_a_dry_run_tells_the_cost_and_asks_nothing(tmp_path: Path) -> None:
    said = diagnose("--out", tmp_path, "--analyst", "openai", "--model", "m", "--prices", 1, 2, "--dry-run")
    assert "about 811 questions" in said and "in money" in said and not list(tmp_path.iterdir())


def test_a_model_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a model"):
        diagnose("--out", tmp_path, "--analyst", "openai")


def test_endpoint_and_key_are_in_the_environment_variables_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (few := tmp_path / "few.jsonl").write_text("".join(EXAMPLE.read_text().splitlines(keepends=True)[:10]))
    judging = ("--analyst", "openai", "--model", "m", "--endpoint-env", "DESK_URL", "--key-env", "DESK_KEY")
    with Answering(answer) as server:
        server.use(monkeypatch)
        for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
            value = os.environ.get(name, "k")
            monkeypatch.delenv(name, raising=False)
            monkeypatch.setenv("DESK_URL" if name.endswith("URL") else "DESK_KEY", value)
        diagnose("--out", tmp_path / "a", *judging, path=few)
        assert server.requests
    monkeypatch.delenv("DESK_KEY")
    with pytest.raises(UserError, match="DESK_KEY"):
        diagnose("--out", tmp_path / "b", *judging, "--seed", "1", path=few)
    with pytest.raises(UserError, match="--key-env must be the name of an environment variable"):
        diagnose("--out", tmp_path / "c", *judging[:-1], "sk-1234567890", path=few)


def test_the_page_shows_what_judging_prints_its_cost_and_its_agreement_with_the_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Answering(judge) as server:
        server.use(monkeypatch)
        line = ("--out", "judged", "--analyst", "openai", "--model", "MODEL", "--prices", 0.4, 1.6)
        printed = diagnose(*line, columns=120)
    text = "\n".join(entry.rstrip() for entry in printed.strip().splitlines())
    assert f"```text\n{text}\n```" in (EXAMPLE.parents[1] / "analyst.md").read_text(), text
    agreement = json.loads((tmp_path / "judged/agreement.json").read_text())["programmatic"]["candidates"]
    assert agreement["reading_before_acting"]["best"] == "missing_lookup"


def test_a_model_labels_blindly_and_a_second_run_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (some := tmp_path / "some.jsonl").write_text("".join(EXAMPLE.read_text().splitlines(keepends=True)[:24]))
    with Answering(answer) as server:
        server.use(monkeypatch)
        said = diagnose("--out", tmp_path / "a", "--analyst", "openai", "--model", "m", path=some)
        asked = len(server.requests)
        diagnose("--out", tmp_path / "b", "--analyst", "openai", "--model", "m", path=some)
        assert len(server.requests) == asked > 100
        labelling = [body for body in server.requests if body["response_format"]["json_schema"]["name"] == "Labelling"]
        assert not any('outcome="' in body["messages"][-1]["content"] for body in labelling)
    assert "finishing" in said and "asked: answers" in said
    for name in ("selection.json", "labels.jsonl", "agreement.json", "asked.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert json.loads((tmp_path / "a/agreement.json").read_text())["programmatic"]["rollouts"] == 24


@pytest.mark.needs("minutes")
def test_a_model_that_obeys_what_is_said_to_it_labels_alike_whatever_tools_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gullible(body: Body) -> dict[str, Any]:
        words = answer(body)
        for entry in words.get("capabilities", words.get("groups", [])):
            entry["description"] += f" {ORDER}." if ORDER in body["messages"][-1]["content"] else ""
        return words

    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()[:24]]
    verdicts = {}
    monkeypatch.chdir(tmp_path)
    with Answering(obeying(gullible)) as server:
        server.use(monkeypatch)
        for name in ("calm", "lured"):
            for number, row in enumerate(rows):
                for message in row["messages"] if name == "lured" else []:
                    if message["role"] == "tool":
                        message["content"] += f"\n{LURES[number % len(LURES)]}"
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            diagnose("--out", tmp_path / name, "--analyst", "openai", "--model", "m", path=path)
            labels = load(tmp_path / name / "labels.jsonl", RolloutLabels)
            verdicts[name] = [row.labels["finishing"].verdict for row in labels]
    assert ORDER in (tmp_path / "lured/candidates.jsonl").read_text()
    assert verdicts["lured"] == verdicts["calm"] and {*verdicts["calm"]} == {"LACKING", "PRESENT"}
