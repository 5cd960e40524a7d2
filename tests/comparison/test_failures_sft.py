"""The row `failures_sft`: trained on the target's own solutions of failed discovery tasks."""

import json
from pathlib import Path

import pytest
from support.stages import stage
from support.training import ROOT, inside

from captrain.benchmarks import load_benchmark
from captrain.comparison.baselines.sft import FAILURES_SFT
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import Rollout, Score, Split, load, publish
from captrain.run import Spec, compose_spec, publish_spec
from captrain.training.sft import FineTuned

SMALL = [
    "policy.precision=float32", "trainer.rank=4", "trainer.alpha=8", "baselines.failures_sft.run=true",
    "baselines.failures_sft.demonstrations=10", "baselines.failures_sft.epochs=2", "machine.workers=1",
]  # fmt: skip


def chosen(*overrides: str) -> Spec:
    return compose_spec("smoke", 0, [*SMALL, *overrides], ROOT / "conf")


def diagnosed(folder: Path, base: Path, failed: int, split: Split = "discovery") -> Path:
    """A project whose first tasks failed and whose last one passed."""
    (folder / "artifacts/rollouts").mkdir(parents=True)
    (folder / "artifacts/base").symlink_to(base)
    spec = chosen()
    tasks = load_benchmark(spec.benchmark, spec.machine).tasks(split, failed + 1)
    rollouts = [
        Rollout(
            id=f"r{number}",
            environment="servicedesk",
            task=task,
            trial=0,
            purpose="diagnosis",
            policy="p",
            messages=[],
            score=Score(reward=0.0, success=number == failed),
            outcome="passed" if number == failed else "failed",
        )
        for number, task in enumerate(tasks)
    ]
    publish(folder / "artifacts/rollouts/discovery.jsonl", rollouts)
    publish_spec(spec, folder / "results/spec.yaml")
    return folder


def taught(folder: Path) -> FineTuned:
    with inside(folder):
        [lesson] = FAILURES_SFT.lessons(chosen(), Path())
        return FAILURES_SFT.teach(lesson)


def test_only_failed_tasks_are_repeated_up_to_the_dose(tiny: Path, tmp_path: Path) -> None:
    one = taught(diagnosed(tmp_path, tiny, failed=4))
    assert (one.demonstrations, one.left_out) == (10, {}) and one.losses[-1] < one.losses[0]
    assert "| 4 |" in (tmp_path / one.folder / "README.md").read_text()


def test_no_failures_give_nothing_to_train_on(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rollout failed"):
        taught(diagnosed(tmp_path, tiny, failed=0))


def test_test_tasks_are_rejected(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is of the test split but was given to diagnosis"):
        taught(diagnosed(tmp_path, tiny, failed=2, split="test"))


def test_the_stage_writes_an_adapter_that_cost_no_rollouts(tiny: Path, tmp_path: Path) -> None:
    folder = diagnosed(tmp_path, tiny, failed=3)
    (folder / "stages").symlink_to(ROOT / "stages")
    assert stage(folder, "failures_sft") == 0
    row = json.loads((folder / "results/failures_sft/index.json").read_text())["failures_sft"]
    assert (row["rollouts"], row["demonstrations"]) == (0, 10)
    assert load(folder / "results/failures_sft/ledger.jsonl", LedgerEntry) == []
