"""Rejection fine-tuning on the target: equal totals, rewards only, and no task played twice."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.letters import Letters
from support.training import POLICY, ROOT, inside

from captrain.comparison.baselines import rejection_sft
from captrain.comparison.baselines.rejection_sft import Refined, refine
from captrain.comparison.baselines.sft import Lesson
from captrain.contract import CheckedEnvironment, load_file
from captrain.errors import UserError
from captrain.models.lora import adapter_digest
from captrain.records import Task
from captrain.run import Spec, compose_spec


def small(*overrides: str) -> Spec:
    settings = [f"policy.{key}={value}" for key, value in POLICY.items()]
    settings += ["trainer.rank=4", "trainer.alpha=8", "machine.workers=1", "machine.batch=1"]
    settings += ["baselines.rejection_sft.rows=20", "baselines.rejection_sft.learning_rate=1e-2", *overrides]
    return compose_spec("smoke", 0, settings, ROOT / "conf")


@pytest.fixture
def target(letters: Letters, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that replaces the benchmark."""
    path = letters()
    monkeypatch.setattr(rejection_sft, "load_benchmark", lambda component, machine: load_file(path))
    return path


def refined(folder: Path, tiny: Path, rollouts: int = 25) -> Refined:
    with inside(folder):
        return refine(Lesson("rejection_sft", small(), tiny, rollouts=rollouts))


def test_rounds_play_fresh_tasks_and_spend_exactly_the_total(
    target: Path, tiny: Path, tmp_path: Path, opened: list[Task]
) -> None:
    adapter = refined(tmp_path, tiny)
    assert [task.id for task in opened] == [f"letters/training/{number}" for number in range(25)]
    assert [row.rollouts for row in adapter.rounds] == [8, 16, 25]
    entry = adapter.ledger("rejection_sft", "rejection_sft")
    assert (entry.rollouts, entry.purpose, entry.method) == (25, "training", "rejection_sft")
    assert adapter.digest == adapter_digest(tmp_path / adapter.folder)
    # The demonstrations are the passed rollouts of all rounds, repeated to about the dose.
    passed = [round(row.success * count) for row, count in zip(adapter.rounds, (8, 8, 9), strict=True)]
    assert [row.demonstrations for row in adapter.rounds] == [sum(passed[: number + 1]) for number in range(3)]
    assert [row.epochs for row in adapter.rounds] == [max(1, round(20 / row.demonstrations)) for row in adapter.rounds]
    assert adapter.demonstrations == sum(passed) > 0


def test_training_uses_the_sampled_tokens(
    target: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, taught = list[Any](), list[Any]()
    collect, fine_tune = rejection_sft.collect, rejection_sft.fine_tune

    def remember(*args: Any, **kwargs: Any) -> Any:
        rollouts = collect(*args, **kwargs)
        sampled.extend((one.token_ids, one.mask) for one in rollouts if one.outcome == "passed")
        return rollouts

    def see(job: Any, policy: Any) -> Any:
        taught.append([(row.ids, row.mask) for row in job.demonstrations])
        return fine_tune(job, policy)

    monkeypatch.setattr(rejection_sft, "collect", remember)
    monkeypatch.setattr(rejection_sft, "fine_tune", see)
    refined(tmp_path, tiny)
    assert taught[-1] == sampled and taught[0] == sampled[: len(taught[0])]


def test_an_interrupted_row_resumes_to_the_identical_adapter_without_replaying(
    target: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[Task]
) -> None:
    whole = refined(tmp_path / "whole", tiny)
    fine_tune, calls = rejection_sft.fine_tune, list[int]()

    def pull_the_plug(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fine_tune(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rejection_sft, "fine_tune", pull_the_plug)
        refined(tmp_path / "cut", tiny)
    opened.clear()
    again = refined(tmp_path / "cut", tiny)
    assert (again.digest, again.rounds) == (whole.digest, whole.rounds)
    assert [task.id for task in opened] == [f"letters/training/{number}" for number in range(16, 25)]


def test_a_target_with_few_tasks_repeats_them_evenly(
    target: Path, tiny: Path, tmp_path: Path, opened: list[Task]
) -> None:
    known = "class Environment:\n    def size(self, split):\n        return 5\n"
    target.write_text(target.read_text(encoding="utf-8").replace("class Environment:", known), encoding="utf-8")
    refined(tmp_path, tiny)
    counts = Counter(task.id for task in opened)
    assert sum(counts.values()) == 25 and len(counts) == 5 and max(counts.values()) - min(counts.values()) <= 2


def test_no_passed_rollouts_give_nothing_to_train_on(target: Path, tiny: Path, tmp_path: Path) -> None:
    target.write_text(
        target.read_text(encoding="utf-8").replace('"success": reward > 0.5', '"success": False'), encoding="utf-8"
    )
    with pytest.raises(UserError, match="rejection_sft: none of 8 rollouts passed"):
        refined(tmp_path, tiny)


def test_only_training_tasks_are_played(target: Path, tiny: Path, tmp_path: Path, opened: list[Task]) -> None:
    refined(tmp_path, tiny, rollouts=6)
    assert {task.split for task in opened} == {"training"}
    assert isinstance(load_file(target), CheckedEnvironment)
