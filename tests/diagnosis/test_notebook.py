"""A diagnosis from Python: the notebook that ships runs, and frames agree with the files."""

import json
from pathlib import Path

import pandas as pd
import pytest

import captrain
from captrain.errors import UserError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/servicedesk.jsonl"


def test_every_cell_of_the_notebook_runs_in_the_folder_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "docs")
    cells = json.loads((ROOT / "docs/diagnose.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    again = names["again"]
    assert isinstance(again, captrain.NotebookDiagnosis)
    assert again.causes.loc["wrong_argument", "failures"] == 18


def test_frames_agree_with_each_other_and_with_the_files(tmp_path: Path) -> None:
    diagnosis = captrain.diagnose(str(EXAMPLE))
    failures = diagnosis.failures
    assert failures["cause"].value_counts().to_dict() == diagnosis.causes.query("failures > 0")["failures"].to_dict()
    assert set(diagnosis.ranking.query("selected").index) == {
        "wrong_argument", "missing_lookup", "missing_write", "wrong_record",
    }  # fmt: skip
    diagnosis.save(tmp_path)
    advice = json.loads((tmp_path / "advice.json").read_text())
    assert [entry["subject"] for entry in advice] == [*diagnosis.advice.index]
    assert len(failures.dropna(subset=["cause"])) == len(failures) and diagnosis.diagnosis.account.unexplained == 0


def test_nothing_to_diagnose_is_said() -> None:
    with pytest.raises(UserError, match="there is no rollout"):
        captrain.diagnose([])


def test_a_notebook_shows_a_diagnosis_as_its_table_of_causes(tmp_path: Path) -> None:
    diagnosis = captrain.diagnose(EXAMPLE)
    text, page = repr(diagnosis), diagnosis._repr_html_()
    assert text.startswith("80 rollouts, 49 failed, unexplained: 0 of 49") and len(text.splitlines()) == 8
    assert page.count("<tr") == 7 and "<th>wrong_argument</th>" in page and len(text + page) < 2500
    passed = tmp_path / "log.jsonl"
    passed.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}], "reward": 1}))
    nothing = captrain.diagnose(passed)
    assert repr(nothing).startswith("1 rollout, 0 failed") and "nothing can be concluded: " in repr(nothing)


def test_dicts_and_a_frame_are_diagnosed_as_the_file_that_they_were_in() -> None:
    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    causes = captrain.diagnose(EXAMPLE).causes
    assert captrain.diagnose(rows).causes.equals(causes)
    assert captrain.diagnose(pd.DataFrame(rows)).causes.equals(causes)
