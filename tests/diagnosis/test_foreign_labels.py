"""`captrain diagnose --labels`: the rule of the selection on labels that somebody else made."""

import json
from pathlib import Path

import pytest
from support.diagnosing import diagnose
from support.published_labels import COUNTS, RUNS, published_labels

from captrain.errors import UserError


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def foreign_files(folder: Path) -> list[Path]:
    """A file for each run, with verdicts alone."""
    return [
        write(
            folder / f"run{run}.jsonl",
            *(
                {
                    "rollout": row.rollout,
                    "outcome": row.outcome,
                    "labels": {slug: label.verdict for slug, label in row.labels.items()},
                }
                for row in published_labels()
                if row.run == run
            ),
        )
        for run in range(RUNS)
    ]


def selected(out: Path) -> list[str]:
    account = json.loads((out / "selection.json").read_text())
    return [row["id"] for row in account["candidates"] if row["selected"]]


def test_labels_of_the_published_shape_are_put_to_the_published_rule(tmp_path: Path) -> None:
    options = [part for path in foreign_files(tmp_path) for part in ("--labels", path)]
    table = diagnose(*options, "--out", tmp_path / "a", "--count", 9)
    account = json.loads((tmp_path / "a/selection.json").read_text())
    retained = {row["id"]: row["runs_retained"] for row in account["candidates"]}
    assert retained == dict(zip(COUNTS, [10, 10, 10, 10, 9, 9, 7, 3, 0], strict=True))
    assert {*selected(tmp_path / "a")} == {*list(COUNTS)[:6]}
    assert "110 failed" in table and "0.79" in table
    assert len((tmp_path / "a/stability.csv").read_text().splitlines()) == 1 + 9 * RUNS
    for ranking, fourth in (("product", "policy"), ("mean_gap", "aggregation")):
        diagnose(*options, "--out", tmp_path / ranking, "--ranking", ranking)
        assert selected(tmp_path / ranking) == [*list(COUNTS)[:3], fourth]


def test_the_labels_that_the_pipeline_wrote_are_such_labels(tmp_path: Path) -> None:
    lines = [row.model_dump(exclude_defaults=True) for row in published_labels()]
    diagnose("--labels", write(tmp_path / "labels.jsonl", *lines), "--out", tmp_path / "out")
    assert selected(tmp_path / "out") == ["multi_step", "constraint", "numerical", "policy"]


def test_few_rollouts_are_said_to_conclude_nothing(tmp_path: Path) -> None:
    lines = [
        {"rollout": f"r{number}", "outcome": "failed" if number < 9 else "passed", "labels": {"a": verdict}}
        for number, verdict in enumerate(["LACKING"] * 9 + ["PRESENT"] * 20)
    ]
    path = write(tmp_path / "labels.jsonl", *lines)
    output = diagnose("--labels", path, "--out", tmp_path, "--agreement", 1)
    assert "nothing can be concluded: 20 passed and 9 failed rollouts" in output


LINE = {"rollout": "r", "outcome": "failed", "labels": {"a": "LACKING"}}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([{**LINE, "labels": {"a": "WRONG"}}], "line 1 is not a whole LabelLine record"),
        ([{**LINE, "reward": 1}], "line 1 is not a whole LabelLine record .*reward"),
        ([], "holds no labels"),
        ([LINE, LINE], "rollout r is labelled twice in run 0"),
        ([LINE, {**LINE, "run": 1, "outcome": "passed"}], "rollout r is passed .* and failed .* in another run"),
        ([LINE], "8 labelling runs must agree, and the labels are of 1"),
        ([{**LINE, "run": run} for run in range(8)], "0 passed and 1 failed rollouts: there is nothing to contrast"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path: Path, lines: list[object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        diagnose("--labels", write(tmp_path / "labels.jsonl", *lines), "--out", tmp_path / "out")


def test_logs_and_labels_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "labels.jsonl", LINE)
    for arguments in ((), (path, "--labels", path)):
        with pytest.raises(UserError, match="takes either logs or --labels"):
            diagnose(*arguments, "--out", tmp_path / "out")
    with pytest.raises(UserError, match="--agreement 11 of 10"):
        diagnose(path, "--agreement", 11, "--out", tmp_path / "out")
