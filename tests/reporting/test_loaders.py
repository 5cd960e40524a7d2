"""Loaders of results: their docstring examples, missing files, and a cheap import."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
from support.results import account, publish_played

import captrain
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import (
    Capability,
    Label,
    Passport,
    Rollout,
    RolloutLabels,
    Score,
    Task,
    publish,
    publish_json,
    publish_text,
)
from captrain.reporting import loaders
from captrain.run import Spec, compose_spec, publish_spec

ROOT = Path(__file__).parents[2]
TABLES = {
    "adapters/history.csv": "adapter,step,rollouts,reward,success,informative\n"
    "wrong_record,1,40,0.4,0.3,1\nrecord_selection,2,80,0.6,0.5,1\n",
    "gepa/history.csv": "\n",
    "routes/routes.csv": "task,kind,retrieval,chosen\nt0,pick,wrong_record,wrong_record\n",
    "evaluation/main.csv": "method,pass_rate\nbase,0.25\ntrace,0.5\n",
    "evaluation/differences.csv": "first,second,difference,p\ntrace,base,0.25,\n",
    "evaluation/kinds.csv": "kind,method,pass_rate\npick,base,0.25\n",
}


def played(name: str, adapter: str | None, passed: bool, purpose: str) -> Rollout:
    split = {"diagnosis": "discovery", "evaluation": "test"}[purpose]
    return Rollout(
        id=name,
        environment="desk",
        task=Task(id="t0", split=split, data={"kind": "pick"}),  # type: ignore[arg-type]
        trial=0,
        purpose=purpose,  # type: ignore[arg-type]
        policy="p0",
        adapter=adapter,
        messages=[{"role": role, "content": ""} for role in ("system", "user", "assistant")],
        score=Score(reward=float(passed), success=passed),
        outcome="passed" if passed else "failed",
    )


@pytest.fixture(scope="module")
def spec() -> Spec:
    return compose_spec("default", 0, [], ROOT / "conf")


@pytest.fixture
def project(tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> Path:
    results, artifacts = tmp_path / "results", tmp_path / "artifacts"
    publish_spec(spec, results / "spec.yaml")
    for name, text in TABLES.items():
        publish_text(results / name, text)
    publish(artifacts / "rollouts/discovery.jsonl", [played("d0", None, False, "diagnosis")])
    before, after = played("e0", None, False, "evaluation"), played("e1", "feed", True, "evaluation")
    publish_played(tmp_path, {"base": [before], "wrong_record": [after]})
    labels = {"wrong_record": Label(verdict="LACKING", message=2), "reply_wording": Label(verdict="NA")}
    publish(
        artifacts / "labels/labels.jsonl",
        [RolloutLabels(run=0, rollout="d0", outcome="failed", count=1, labels=labels)],
    )
    publish(
        results / "capabilities/capabilities.jsonl",
        [Capability(id="wrong_record", name="Record selection", description="Picks the right one.")],
    )
    publish_json(
        results / "capabilities/selection.json",
        account([{"id": "wrong_record", "gap": 0.5}]),
    )
    passport = Passport(
        capability="wrong_record",
        environment="e",
        attempt=0,
        passed=True,
        trusted=True,
        calibration_tasks=1,
        checks=[],
    )
    publish_json(results / "environments/wrong_record.passport.json", passport)
    publish_json(
        results / "adapters/index.json",
        {"wrong_record": {"digest": "feed", "path": "artifacts/adapters/feed", "rollouts": 80, "discarded": 0}},
    )
    for stage, purpose, count in (("rollouts", "diagnosis", 240), ("adapters", "training", 80)):
        entry = LedgerEntry(stage=stage, purpose=purpose, method="trace", rollouts=count)  # type: ignore[arg-type]
        publish(results / stage / "ledger.jsonl", [entry])
    monkeypatch.chdir(tmp_path)
    return tmp_path


LOADERS = [name for name in captrain.__all__ if name.startswith("load_")]


@pytest.mark.parametrize("name", LOADERS)
def test_the_example_of_each_loader_runs(name: str, project: Path) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(captrain, name), name, globs={"captrain": captrain})
    assert example.examples
    heard: list[str] = []
    assert doctest.DocTestRunner().run(example, out=heard.append).failed == 0, "".join(heard)


def test_every_loader_is_offered_by_the_package() -> None:
    own = {name for name in vars(loaders) if name.startswith("load_")}
    assert own == set(LOADERS) and own <= set(dir(captrain))


@pytest.mark.parametrize("name", sorted(set(LOADERS) - {"load_published"}))
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dvc repro"):
        getattr(captrain, name)(tmp_path)


def test_outcomes_name_the_arm_that_played(project: Path) -> None:
    one, two = (played(name, "feed", True, "evaluation") for name in ("e1", "e2"))
    publish_played(project, {"base": [played("e0", None, False, "evaluation")], "a": [one], "0.5*a+0.5*b": [two]})
    assert captrain.load_outcomes(project)["arm"].tolist() == ["base", "a", "0.5*a+0.5*b"]
    assert [rollout.id for rollout in captrain.load_rollouts(project, "evaluation")] == ["e0", "e1", "e2"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="load_nothing"):
        captrain.load_nothing  # noqa: B018  # type: ignore[attr-defined]


def test_importing_the_package_does_not_import_pandas_or_torch() -> None:
    said = "import sys, captrain; print([m for m in ('pandas', 'numpy', 'torch', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout == "[]\n"
