"""A diagnosis from Python: the notebook that ships runs, and frames agree with the files."""

import json
from pathlib import Path

import pytest

import captrain
from captrain.errors import UserError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/servicedesk.jsonl"


def test_every_cell_of_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
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
