"""GRPO: exact budgets, identical adapters after any interruption, and plain PEFT adapters."""

import json
import random
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from support.letters import LETTERS, Letters
from support.stages import stage
from support.training import (
    GRPO,
    ROOT,
    fine_tuned,
    groups,
    inside,
    interrupted,
    job,
    kill,
    moved,
    passport,
    project,
    published,
    synthesized,
    trainer_of,
    weights,
)
from transformers import AutoModelForCausalLM

from captrain.agents.local import LocalPolicy
from captrain.comparison.baselines.grpo import GRPO_TARGET
from captrain.contract import CheckedEnvironment, GuardedEpisode, load_file
from captrain.errors import EnvironmentFault, UserError
from captrain.ledger import LedgerEntry
from captrain.models.lora import Adapter, adapter_digest
from captrain.records import Task, load
from captrain.run import compose_spec, load_spec
from captrain.run.machine import Accelerate, Machine
from captrain.training.checkpoints import MARK, last_checkpoint
from captrain.training.jobs import EnvironmentFile, Trained, TrainingEnvironment
from captrain.training.recipe import capability_jobs
from captrain.training.runs import train
from captrain.training.workspace import publish_adapters

pytestmark = pytest.mark.usefixtures("vouched")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def environment(home: Path) -> Path:
    path = home / "letters.py"
    path.write_text(LETTERS.format(name="letters", flat=0))
    return path


@pytest.fixture(scope="module")
def trained(tiny: Path, home: Path, environment: Path) -> Trained:
    """An uninterrupted training of three steps, in a workspace below `home`."""
    with inside(home):
        one = train(job(tiny, environment))
    return replace(one, folder=home / one.folder)


def test_training_spends_its_exact_budget_in_groups_of_one_task(
    tiny: Path, environment: Path, tmp_path: Path, opened: list[Task]
) -> None:
    with inside(tmp_path):
        one = train(job(tiny, environment, skip=5, rollouts=16))
    assert (one.rollouts, len(opened)) == (16, 16)
    assert [task.id for task in opened] == [f"letters/training/{i}" for i in range(5, 9) for _ in range(4)]
    assert [(row.step, row.rollouts) for row in one.history] == [(1, 8), (2, 16)]
    entry = one.ledger("adapters", "trace")
    assert (entry.rollouts, entry.discarded, entry.purpose, entry.item) == (16, one.discarded, "training", "letters")
    assert entry.completion_tokens == one.completion_tokens > 0 and entry.prompt_tokens == one.prompt_tokens > 0


def test_equal_seeds_give_the_same_adapter_and_other_seeds_another(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path
) -> None:
    with inside(tmp_path):
        again = train(job(tiny, environment, trainer={"checkpoint_every": 3}, policy={"batch": 3}))
        other = train(job(tiny, environment, seed=1))
    assert (again.digest, again.history) == (trained.digest, trained.history) and moved(trained.folder) > 1e-3
    assert other.digest != trained.digest
    for name in ("adapter_model.safetensors", "adapter_config.json", "README.md"):
        assert (tmp_path / again.folder / name).read_bytes() == (trained.folder / name).read_bytes()


def test_a_finished_training_is_read_from_its_workspace(
    tiny: Path, environment: Path, trained: Trained, home: Path, opened: list[Task]
) -> None:
    with inside(home):
        # Neither the frequency of checkpoints nor the batch size is part of its identity.
        for change in ({}, {"trainer": {"checkpoint_every": 7}}, {"policy": {"batch": 5}}):
            again = train(job(tiny, environment, **change))
            assert (again.digest, again.history, opened) == (trained.digest, trained.history, [])
        assert len(list(Path(".cache/adapters").iterdir())) == 1


def test_another_precision_is_another_training(tiny: Path, environment: Path, tmp_path: Path) -> None:
    one = job(tiny, environment, rollouts=8)
    coarse = one.on(one.machine.model_copy(update={"accelerate": Accelerate(precision="float32")}))
    with inside(tmp_path):
        assert train(one).folder != train(coarse).folder
        assert fine_tuned(tiny, tmp_path, one.machine).folder != fine_tuned(tiny, tmp_path, coarse.machine).folder


def test_an_interrupted_training_resumes_from_its_last_whole_checkpoint(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path, opened: list[Task]
) -> None:
    with inside(tmp_path):
        checkpoints = interrupted(job(tiny, environment), 2)
        whole = last_checkpoint(checkpoints)
        assert whole is not None and whole.name == "checkpoint-4"
        # A later checkpoint that was cut off while it was written has no mark.
        torn = checkpoints / "checkpoint-6"
        shutil.copytree(whole, torn)
        (torn / "history.json").unlink()
        for path in torn.glob("*.pt"):
            path.write_bytes(path.read_bytes()[:100])
        opened.clear()
        resumed = train(job(tiny, environment))
        assert (resumed.digest, resumed.history) == (trained.digest, trained.history)
        # Only the third step was played: the whole checkpoint was used.
        assert len(opened) == 8
        assert not checkpoints.exists()


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path: Path, rng: random.Random) -> None:
    """Write zeros over a page, as a disk that has lost it."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def test_a_damaged_checkpoint_is_named_and_training_goes_on_from_the_one_before(
    tiny: Path,
    environment: Path,
    trained: Trained,
    tmp_path: Path,
    opened: list[Task],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(0)
    with inside(tmp_path):
        checkpoints = interrupted(job(tiny, environment), 2)
        last, whole = checkpoints / "checkpoint-4", tmp_path / "whole"
        last.rename(whole)
        names = sorted(path.name for path in whole.iterdir())
        assert {"adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth", MARK} <= {*names}
        for name in names:
            for damage in (flip, flip, zero, cut, remove):
                shutil.rmtree(last, ignore_errors=True)
                shutil.copytree(whole, last)
                assert last_checkpoint(checkpoints) == last
                damage(last / name, rng)
                if (last / name).exists() and (last / name).read_bytes() == (whole / name).read_bytes():
                    continue  # the zeros were zeros before
                capsys.readouterr()
                assert last_checkpoint(checkpoints) == checkpoints / "checkpoint-2", (name, damage)
                if (name, damage) != (MARK, remove):  # it may have been cut off while it was written
                    said = f"{last} was altered ({name}): training goes on from the checkpoint before\n"
                    assert capsys.readouterr().err == said
        opened.clear()
        resumed = train(job(tiny, environment))
        assert (resumed.digest, resumed.history) == (trained.digest, trained.history)
        assert len(opened) == 16  # the second step and the third


def test_checkpoints_that_change_places_or_come_from_elsewhere_are_not_used(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path, opened: list[Task]
) -> None:
    with inside(tmp_path / "one"):
        other = interrupted(job(tiny, environment, seed=1), 2).resolve()
    with inside(tmp_path / "two"):
        checkpoints = interrupted(job(tiny, environment), 2)
        first, second, aside = (checkpoints / f"checkpoint-{number}" for number in (2, 4, 9))
        for before, after in ((first, aside), (second, first), (aside, second)):
            before.rename(after)
        shutil.copytree(other / "checkpoint-4", checkpoints / "checkpoint-6")
        opened.clear()
        resumed = train(job(tiny, environment))
        assert (resumed.digest, resumed.history) == (trained.digest, trained.history) and len(opened) == 24


def test_a_result_whose_history_was_altered_is_not_used(tiny: Path, environment: Path, tmp_path: Path) -> None:
    with inside(tmp_path):
        folder = train(job(tiny, environment)).folder.parent
        result = folder / "result.json"
        result.write_bytes(result.read_bytes().replace(b'"errors":0', b'"errors":1', 1))
        with pytest.raises(UserError, match=r"altered after training \(.*result.json differs from its digest"):
            train(job(tiny, environment))
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_checkpoints_equal_trainings_of_a_smaller_budget(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path
) -> None:
    with inside(tmp_path):
        whole, half = train(job(tiny, environment, points=3)), train(job(tiny, environment, rollouts=8))
        assert whole.digest == trained.digest and [*whole.checkpoints] == ["8", "16"]
        assert whole.checkpoints["8"] == half.digest != whole.checkpoints["16"] != whole.digest
        publish_adapters([whole], "adapters", "trace")
        row = json.loads(Path("results/adapters/index.json").read_text(encoding="utf-8"))["letters"]
        assert row["checkpoints"] == whole.checkpoints
        for rollouts, digest in whole.checkpoints.items():
            assert adapter_digest(Path(row["path"], "checkpoints", rollouts)) == digest
        assert train(job(tiny, environment, points=3)).checkpoints == whole.checkpoints
    assert not trained.checkpoints and "checkpoints" not in trained.summary()


@pytest.mark.needs("minutes")
def test_a_resumed_training_keeps_earlier_checkpoints(tiny: Path, environment: Path, tmp_path: Path) -> None:
    with inside(tmp_path / "cut"):
        interrupted(job(tiny, environment, points=3), 2)
        resumed = train(job(tiny, environment, points=3))
    with inside(tmp_path / "whole"):
        assert train(job(tiny, environment, points=3)).checkpoints == resumed.checkpoints


@pytest.mark.needs("minutes")
def test_a_resumed_training_continues_its_learning_rate_schedule(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from captrain.training.grpo import PolicyTrainer

    falling = job(tiny, environment, trainer={"schedule": "linear", "clip_high": 0.28})
    rates: list[float] = []
    update = PolicyTrainer.training_step

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        rates.append(self.optimizer.param_groups[0]["lr"])
        return update(self, *args, **kwargs)

    monkeypatch.setattr(PolicyTrainer, "training_step", noted)
    with inside(tmp_path / "whole"):
        whole = train(falling)
        card = (whole.folder / "README.md").read_text()
    assert rates == pytest.approx([0.01 * (6 - update) / 6 for update in range(6)])
    assert "| learning rate, clip | 0.01 linear, 0.2 below, 0.28 above |" in card
    assert whole.digest != trained.digest and whole.history[0] == trained.history[0]
    with inside(tmp_path / "cut"):
        interrupted(falling, 2)
        rates.clear()
        resumed = train(falling)
    assert rates == pytest.approx([0.01 * 2 / 6, 0.01 / 6])
    assert (resumed.digest, resumed.history) == (whole.digest, whole.history)


def test_clip_high_sets_the_upper_clipping_range(tiny: Path, letters: Letters) -> None:
    def gradient(clip_high: float | None, shift: float) -> float:
        trainer = trainer_of(job(tiny, letters(), trainer={"clip_high": clip_high}, skip=0))
        batch = trainer._generate_and_score_completions(groups(2))
        trainer.current_gradient_accumulation_steps = 1  # TRL sets it when training begins.
        batch["old_per_token_logps"] = batch["old_per_token_logps"] - shift  # the ratio is exp(shift) everywhere
        batch["advantages"] = torch.ones_like(batch["advantages"])
        trainer.compute_loss(trainer.model, batch).backward()
        return max(float(p.grad.abs().max()) for p in trainer.model.parameters() if p.grad is not None)

    assert gradient(None, 0.22) == 0.0 < gradient(0.28, 0.22)
    assert gradient(0.28, 0.3) == 0.0


def test_an_adapter_can_be_trained_further(tiny: Path, environment: Path, trained: Trained, tmp_path: Path) -> None:
    start = Adapter(str(trained.folder), trained.digest)
    begun = trainer_of(job(tiny, environment, start=start)).model.state_dict()
    before = {name.replace(".default.", "."): tensor for name, tensor in begun.items() if ".lora_" in name}
    kept = weights(trained.folder)
    assert before.keys() == kept.keys() and all((before[name] == kept[name]).all() for name in kept)
    with inside(tmp_path):
        further = train(job(tiny, environment, skip=9, rollouts=16, start=start))
        config = json.loads((further.folder / "adapter_config.json").read_text())
        card = (further.folder / "README.md").read_text()
    assert further.digest != trained.digest and config["r"] == 4
    assert f"| trained on from the adapter | {trained.digest} |" in card


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"trainer": {"rank": 2}}, "has r = 4, and the trainer 2"),
        ({"start": Adapter("", "0123")}, "is .*, but 0123 was trained"),
    ],
)
def test_an_altered_or_differently_shaped_start_adapter_is_refused(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    digest = change.pop("start").digest if "start" in change else trained.digest
    with inside(tmp_path), pytest.raises(UserError, match=problem):
        train(job(tiny, environment, start=Adapter(str(trained.folder), digest), **change))


def test_a_training_interrupted_before_its_result_plays_nothing_again(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[Task]
) -> None:
    from captrain.training import workspace

    def pull_the_plug(path: Path, value: object) -> None:
        raise KeyboardInterrupt

    with inside(tmp_path):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(workspace, "publish_bytes", pull_the_plug)
            train(job(tiny, environment))
        opened.clear()
        resumed = train(job(tiny, environment))
        assert (resumed.digest, resumed.history, opened) == (trained.digest, trained.history, [])
        assert sorted(path.name for path in resumed.folder.parent.iterdir()) == ["adapter", "lock", "result.json"]


def test_checkpoints_are_removed_even_after_an_interruption(
    tiny: Path, environment: Path, trained: Trained, home: Path, tmp_path: Path
) -> None:
    with inside(shutil.copytree(home, tmp_path / "home")) as here:
        checkpoints = here / trained.folder.relative_to(home).parent / "checkpoints"
        (checkpoints / "checkpoint-6").mkdir(parents=True)
        assert train(job(tiny, environment)).digest == trained.digest and not checkpoints.exists()


def test_a_killed_stage_resumes_to_the_identical_adapter(tiny: Path, tmp_path: Path, warm: Path) -> None:
    killed = project(tmp_path / "killed", tiny, "letters")
    kill(killed, "adapters", warm)
    assert stage(killed, "adapters") == 0
    undisturbed = project(tmp_path / "undisturbed", tiny, "letters")
    assert stage(undisturbed, "adapters") == 0
    assert published(killed) == published(undisturbed)
    index = json.loads((killed / "results/adapters/index.json").read_text())
    assert adapter_digest(killed / index["letters"]["path"]) == index["letters"]["digest"]
    assert Path(index["letters"]["path"]).name == index["letters"]["digest"]


def test_an_added_capability_does_not_retrain_the_others(tiny: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "project", tiny, "second", rollouts=8)
    assert stage(folder, "adapters") == 0

    def marks() -> dict[Path, tuple[int, int]]:
        files = [path for path in folder.glob(".cache/adapters/*/*") if path.name != "lock"]
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    before, first = marks(), json.loads((folder / "results/adapters/index.json").read_text())
    assert [path.name for path in before].count("result.json") == 1
    # Its name sorts first, to show a training that depends on its position.
    synthesized(folder, "first")
    chosen = load_spec(folder / "results/spec.yaml")
    jobs = capability_jobs(chosen, folder / "artifacts/base", folder / "results/environments")
    assert [(one.name, one.environments[0].skip, one.rollouts) for one in jobs] == [("first", 3, 8), ("second", 3, 8)]
    assert stage(folder, "adapters") == 0
    index = json.loads((folder / "results/adapters/index.json").read_text())
    assert list(index) == ["first", "second"] and index["second"] == first["second"]
    after = marks()
    assert len(after) == 2 * len(before) and {path: after[path] for path in before} == before
    ledger = load(folder / "results/adapters/ledger.jsonl", LedgerEntry)
    assert [(one.item, one.rollouts, one.method) for one in ledger] == [("first", 8, "trace"), ("second", 8, "trace")]


def test_constant_groups_are_discarded_and_change_no_weight(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    flat_job = job(tiny, letters("flat", flat=1))
    begun = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(trainer_of(flat_job).model).items()}
    with inside(tmp_path):
        flat = train(flat_job)
    assert (flat.rollouts, flat.discarded) == (24, 24)
    assert {row.informative for row in flat.history} == {0.0} and {row.reward for row in flat.history} == {0.5}
    assert moved(tmp_path / flat.folder) == 0.0
    ended = weights(tmp_path / flat.folder)
    assert ended.keys() == begun.keys() and all((ended[name] == begun[name]).all() for name in begun)


def test_a_step_of_constant_groups_does_not_move_weights_by_momentum(
    tiny: Path, letters: Letters, tmp_path: Path
) -> None:
    """Of tasks 2 to 5, the last gives equal rewards; each step is one group."""
    one_group = {"groups_per_step": 1, "epochs": 1}
    with inside(tmp_path):
        three = train(job(tiny, letters("some", flat=5), trainer=one_group, rollouts=12))
        four = train(job(tiny, letters("some", flat=5), trainer=one_group, rollouts=16))
    assert [row.informative for row in four.history] == [1.0, 1.0, 1.0, 0.0] and four.discarded == 4
    first, second = weights(tmp_path / three.folder), weights(tmp_path / four.folder)
    assert moved(tmp_path / three.folder) > 1e-3 and all((second[name] == one).all() for name, one in first.items())


def test_an_update_makes_better_than_average_rollouts_likelier(tiny: Path, letters: Letters) -> None:
    trainer = trainer_of(job(tiny, letters(), skip=0))
    rewards: list[float] = []
    sampled: list[list[float]] = []
    play = trainer.rollout_func

    def remembered(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        out = play(prompts, trainer)
        rewards.extend(out["environment_reward"])
        sampled.extend(out["logprobs"])
        return out

    trainer.rollout_func = remembered
    batch = trainer._generate_and_score_completions(groups(2))
    earned = torch.tensor(rewards).view(2, 4)
    expected = (earned - earned.mean(1, keepdim=True)) / (earned.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(
        batch["advantages"].flatten(), expected.flatten(), rtol=1e-4, atol=1e-5, check_dtype=False
    )

    def log_probabilities() -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].shape[1]
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, seen, width)[0].detach()

    learnt = batch["tool_mask"] * batch["completion_mask"]
    before = log_probabilities()
    # The old log-probabilities are exactly the sampler's, and close to the trainer's.
    old = zip(batch["old_per_token_logps"], batch["completion_mask"], sampled, strict=True)
    assert all(row[seen.bool()].tolist() == said for row, seen, said in old)
    assert ((before - batch["old_per_token_logps"]) * learnt).abs().max() < 1e-4
    trainer.current_gradient_accumulation_steps = 1  # TRL sets it when training begins.
    trainer.compute_loss(trainer.model, batch).backward()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    gained = ((log_probabilities() - before) * learnt).sum(1)
    assert torch.corrcoef(torch.stack([gained, batch["advantages"].flatten()]))[0, 1] > 0.5


def test_dropping_discarded_rows_changes_neither_loss_nor_gradient(
    tiny: Path, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    from captrain.training import grpo as module

    trainer = trainer_of(job(tiny, letters("half", flat=2), trainer={"groups_per_step": 4}, rollouts=16, skip=0))
    inputs = groups(4)
    monkeypatch.setattr(module, "without_discarded", lambda batch: batch)
    whole = trainer._generate_and_score_completions(inputs)
    monkeypatch.undo()
    short = module.without_discarded(whole)
    assert (len(whole["completion_ids"]), len(short["completion_ids"])) == (16, 8)
    learnt = (whole["tool_mask"] * whole["completion_mask"]).any(1).tolist()
    assert learnt == [index // 4 % 2 == 1 for index in range(16)]

    trainer.current_gradient_accumulation_steps = 1  # TRL sets it when training begins.

    def gradient(batch: dict[str, Any]) -> tuple[float, list[Any]]:
        model = trainer.model
        model.zero_grad()
        loss = trainer.compute_loss(model, batch)
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (loss, full), (short_loss, less) = gradient(whole), gradient(short)
    assert short_loss == pytest.approx(loss, abs=1e-7)
    assert max(grad.abs().max().item() for grad in full) > 1e-4
    for one_grad, other in zip(full, less, strict=True):
        torch.testing.assert_close(one_grad, other, rtol=1e-4, atol=1e-7)


def test_the_grpo_loss_averages_over_informative_rollouts_however_a_batch_is_divided(
    tiny: Path, letters: Letters
) -> None:
    def gradient(loss: str, parts: int) -> list[torch.Tensor]:
        settings = {"groups_per_step": 4, "loss": loss}
        trainer = trainer_of(job(tiny, letters("half", flat=2), trainer=settings, rollouts=16, skip=0))
        trainer.args.gradient_accumulation_steps = parts
        batch = trainer._generate_and_score_completions(groups(4))
        assert len(batch["completion_ids"]) == (8 if parts == 1 else 16)
        trainer.current_gradient_accumulation_steps = 1  # TRL sets it when training begins.
        trainer.compute_loss(trainer.model, batch).backward()
        return [p.grad for p in trainer.model.parameters() if p.grad is not None]

    whole, divided, over_tokens = gradient("grpo", 1), gradient("grpo", 2), gradient("dapo", 1)
    assert max(part.abs().max().item() for part in whole) > 1e-4
    for first, second in zip(whole, divided, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)
    assert any(not torch.allclose(one, other, rtol=1e-2) for one, other in zip(whole, over_tokens, strict=True))


def test_a_batch_without_any_signal_keeps_one_row() -> None:
    from captrain.training.grpo import without_discarded

    batch = {"tool_mask": torch.zeros(4, 3), "completion_mask": torch.ones(4, 3), "num_items_in_batch": torch.tensor(0)}
    assert {name: tuple(value.shape) for name, value in without_discarded(batch).items()} == {
        "tool_mask": (1, 3), "completion_mask": (1, 3), "num_items_in_batch": ()
    }  # fmt: skip


def test_a_budget_between_steps_is_spent_to_the_last_rollout(
    tiny: Path, environment: Path, tmp_path: Path, opened: list[Task]
) -> None:
    with inside(tmp_path):
        whole, some, alone = [train(job(tiny, environment, rollouts=rollouts)) for rollouts in (16, 22, 17)]
    assert [(one.rollouts, len(one.history)) for one in (whole, some, alone)] == [(16, 2), (22, 3), (17, 3)]
    assert len(opened) == 16 + 22 + 17
    assert [row.rollouts for row in some.history] == [8, 16, 22]
    # A group of two teaches; a group of one is counted, but teaches nothing.
    assert some.history[:2] == whole.history == alone.history[:2]
    assert (alone.digest, alone.discarded) == (whole.digest, whole.discarded + 1) and some.digest != whole.digest
    assert [row.places for row in some.history] == [{"letters": 2}, {"letters": 2}, {"letters": 2}]


def test_advantages_of_a_smaller_last_group_are_standardized_over_it(tiny: Path, letters: Letters) -> None:
    trainer = trainer_of(job(tiny, letters(), skip=0, rollouts=7))
    batch = trainer._generate_and_score_completions(groups(2))
    first, second = batch["advantages"].flatten()[:4], batch["advantages"].flatten()[4:]
    assert len(second) == 3 and (batch["tool_mask"] * batch["completion_mask"]).any(1).all()
    for some in (first, second):
        assert some.sum().item() == pytest.approx(0.0, abs=1e-4) and some.std().item() == pytest.approx(1.0, abs=0.02)
    assert torch.isfinite(batch["advantages"]).all()


def test_a_job_without_a_rollout_is_refused(tiny: Path, environment: Path, tmp_path: Path) -> None:
    with inside(tmp_path), pytest.raises(UserError) as refusal:
        train(job(tiny, environment, rollouts=0))
    assert refusal.value.problem == "letters: no rollouts are left to train with (0)"
    assert "adapters.rollouts" in refusal.value.remedy


def test_only_named_layers_are_adapted_and_unknown_ones_are_refused(
    tiny: Path, environment: Path, tmp_path: Path
) -> None:
    with inside(tmp_path):
        one = train(job(tiny, environment, rollouts=8, trainer={"targets": ["v_proj", "q_proj"]}))
        assert {name.split(".")[-3] for name in weights(one.folder)} == {"q_proj", "v_proj"}
        config = json.loads((one.folder / "adapter_config.json").read_text())
        assert config["target_modules"] == ["q_proj", "v_proj"]
        with pytest.raises(UserError, match="trainer.targets: the base has no linear layer w_proj") as refusal:
            train(job(tiny, environment, rollouts=8, trainer={"targets": ["q_proj", "w_proj"]}))
    assert "q_proj" in refusal.value.remedy
    for wrong in ("[]", "['']", "q_proj"):
        with pytest.raises(UserError, match=r"trainer\.targets"):
            compose_spec("smoke", 0, [f"trainer.targets={wrong}"], ROOT / "conf")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "README.md"])
@pytest.mark.parametrize("removed", [False, True], ids=["altered", "removed"])
def test_an_altered_cached_adapter_is_refused_once_and_trained_again(
    tiny: Path, environment: Path, trained: Trained, home: Path, tmp_path: Path, name: str, removed: bool
) -> None:
    with inside(shutil.copytree(home, tmp_path / "home")) as here:
        path = here / trained.folder.relative_to(home) / name
        content = path.read_bytes()
        path.unlink() if removed else path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match="adapter letters in .* was altered after training") as refusal:
            train(job(tiny, environment))
        assert "run `dvc repro` to train it again" in refusal.value.remedy
        if not removed and name.endswith(".json"):
            assert train(job(tiny, environment)).digest == trained.digest


def test_a_missing_base_or_environment_ends_in_one_message(tiny: Path, environment: Path, tmp_path: Path) -> None:
    with inside(tmp_path):
        with pytest.raises(UserError, match="nowhere lacks config.json"):
            train(job(tmp_path / "nowhere", environment))
        with pytest.raises(UserError, match="none.py is missing"):
            train(job(tiny, tmp_path / "none.py"))


def test_an_environment_altered_after_its_passport_is_refused(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    path = letters()
    one = job(tiny, path)
    path.write_text(path.read_text() + "\n# Changed.\n")
    with inside(tmp_path / "work"), pytest.raises(UserError) as refusal:
        train(one)
    assert refusal.value.problem == f"{path} is not the file that letters.passport.json was made for"
    assert "run `dvc repro environments`" in refusal.value.remedy


def test_an_untrusted_environment_is_opened_only_in_the_sandbox(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = letters()
    sandbox, asked = types.ModuleType("captrain.environments.sandbox.confined"), []

    def confined(path: Path, least: str, *, source: bytes) -> CheckedEnvironment:
        asked.append((path, least))
        raise UserError("confined", "")

    monkeypatch.setattr(sandbox, "load_confined", confined, raising=False)
    monkeypatch.setitem(sys.modules, sandbox.__name__, sandbox)
    path.write_text("raise RuntimeError('loaded in this process')\n")
    place = TrainingEnvironment("letters", EnvironmentFile(path.parent, passport(path, trusted=False)))
    untrusted = job(tiny, path, environments=(place,))
    untrusted = replace(untrusted, machine=Machine(workers=1, batch=1, sandbox="basic"))
    with inside(tmp_path / "work"), pytest.raises(UserError, match="confined"):
        train(untrusted)
    assert asked == [(path, "basic")]


def test_training_in_the_sandbox_gives_the_same_adapter(
    tiny: Path, environment: Path, trained: Trained, tmp_path: Path
) -> None:
    confined = TrainingEnvironment(
        "letters", EnvironmentFile(environment.parent, passport(environment, trusted=False)), skip=2
    )
    machine = Machine(workers=1, batch=1, sandbox="basic")
    with inside(tmp_path):
        one = train(replace(job(tiny, environment, environments=(confined,)), machine=machine))
    assert (one.digest, one.history) == (trained.digest, trained.history)


def test_only_the_episodes_of_a_batch_are_open(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, most = 0, 0
    open_, close = CheckedEnvironment._open_episode, GuardedEpisode.close

    def opened(self: CheckedEnvironment, task: Task, key: str) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        return open_(self, task, key)

    def closed(self: GuardedEpisode) -> None:
        nonlocal now
        now -= 1
        close(self)

    monkeypatch.setattr(CheckedEnvironment, "_open_episode", opened)
    monkeypatch.setattr(GuardedEpisode, "close", closed)
    with inside(tmp_path / "work"):
        train(job(tiny, letters(), policy={"batch": 3}, rollouts=8))
    assert (now, most) == (0, 3)


def test_an_error_in_a_score_closes_all_episodes(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[GuardedEpisode] = []
    open_ = CheckedEnvironment.open

    def recorded(self: CheckedEnvironment, task: Task, key: str = "") -> GuardedEpisode:
        opened.append(open_(self, task, key))
        return opened[-1]

    monkeypatch.setattr(CheckedEnvironment, "open", recorded)
    path = letters()
    path.write_text(
        path.read_text().replace("        said = ", '        assert "/4" not in task["id"]\n        said = ')
    )
    with inside(tmp_path / "work"), pytest.raises(EnvironmentFault, match="raised AssertionError.* in score"):
        train(job(tiny, path, policy={"batch": 4}, rollouts=16))
    assert sum(episode._opening is not None for episode in opened) >= 12
    assert not any(episode.is_open for episode in opened)


def test_the_adapter_acts_in_plain_peft_as_in_the_engine(tiny: Path, trained: Trained) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.arange(3, 93).view(2, 45)
    with torch.inference_mode():
        base = plain(ids).logits[:, -1]
        adapted = PeftModel.from_pretrained(plain, str(trained.folder)).eval()(ids).logits[:, -1]
        decoder = LocalPolicy(tiny, temperature=1.0, max_turns=1, max_tokens=1).decoder(str(trained.folder))
        decoder.reset()
        decoder.keep([0, 0])
        ours = decoder.forward(ids, [0, 1])
    torch.testing.assert_close(ours.float(), adapted, rtol=0, atol=1e-4)
    assert (adapted - base).abs().max() > 0.01
    config = json.loads((trained.folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    # PEFT keeps a set, whose order differs between processes.
    assert config["target_modules"] == sorted(config["target_modules"]) and len(config["target_modules"]) == 7
    assert config["base_model_name_or_path"].startswith("captrain-base-")


def test_the_model_card_names_its_numbers(environment: Path, trained: Trained) -> None:
    card = (trained.folder / "README.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z][^|]*) \| ([^|]*) \|$", card, re.MULTILINE))
    first, last = trained.history[0], trained.history[-1]
    assert rows == {
        "content hash": trained.digest,
        "environment fingerprint": load_file(environment).fingerprint,
        "rollouts (of which in discarded constant groups)": f"24 ({trained.discarded})",
        "group size, groups per step, epochs": "4, 2, 2",
        "learning rate, clip": "0.01 constant, 0.2",
        "mean reward, first and last step": f"{first.reward:.3f}, {last.reward:.3f}",
        "pass rate in its environment, first and last step": f"{first.success:.3f}, {last.success:.3f}",
        "seed": "0",
    }
    assert "# letters\n" in card and "(rank 4, alpha 8)" in card
    assert card.startswith("---\nlibrary_name: peft\n")
    # The card holds no path.
    assert str(trained.folder.parents[3]) not in card


def test_an_adapter_holds_no_path_of_this_machine(trained: Trained, tiny: Path) -> None:
    for path in trained.folder.iterdir():
        content = path.read_bytes()
        assert str(tiny).encode() not in content and str(trained.folder.parents[2]).encode() not in content


def test_published_adapters_are_indexed_under_their_hash(trained: Trained, tmp_path: Path) -> None:
    with inside(tmp_path):
        publish_adapters([trained], "adapters", "trace")
        publish_adapters([trained], "adapters", "trace")
        index = json.loads(Path("results/adapters/index.json").read_text(encoding="utf-8"))
        assert index == {
            "letters": {
                "digest": trained.digest,
                "path": f"artifacts/adapters/{trained.digest}",
                "rollouts": 24,
                "discarded": trained.discarded,
            }
        }
        assert adapter_digest(Path(index["letters"]["path"])) == trained.digest
        history = Path("results/adapters/history.csv").read_text(encoding="utf-8").splitlines()
        assert history[0] == "adapter,step,rollouts,reward,success,informative" and len(history) == 4
        assert load(Path("results/adapters/ledger.jsonl"), LedgerEntry) == [trained.ledger("adapters", "trace")]


def test_without_capabilities_the_published_files_are_empty(tmp_path: Path) -> None:
    with inside(tmp_path):
        publish_adapters([], "adapters", "trace")
        assert json.loads(Path("results/adapters/index.json").read_text(encoding="utf-8")) == {}
        assert load(Path("results/adapters/ledger.jsonl"), LedgerEntry) == [] and Path("artifacts/adapters").is_dir()


def entry(rollouts: int, method: str = "trace", stage: str = "rollouts", discarded: int = 0) -> LedgerEntry:
    purpose = "diagnosis" if stage == "rollouts" else "training"
    return LedgerEntry(stage=stage, purpose=purpose, method=method, rollouts=rollouts, discarded=discarded)


def test_the_baseline_spends_exactly_what_trace_spends_in_all(tiny: Path, tmp_path: Path, opened: list[Task]) -> None:
    overrides = [f"trainer.{key}={value}" for key, value in GRPO.items()]
    overrides += ["benchmark.mix=rare", "policy.max_tokens=8", "baselines.grpo_target.learning_rate=0.005"]
    chosen = compose_spec("smoke", 3, overrides, ROOT / "conf")
    trace = [entry(8), entry(11), entry(5, stage="adapters", discarded=5)]
    spent = [*trace, entry(100, "grpo_target"), entry(7, "evaluation")]
    shutil.copytree(tiny, tmp_path / "artifacts/base")
    [one] = GRPO_TARGET.jobs(chosen, tmp_path, spent)
    assert (one.rollouts, one.seed, one.name) == (24, 3, "grpo_target")
    assert one.environments == (TrainingEnvironment("target", chosen.benchmark),) and one.policy == chosen.policy
    settings = chosen.baselines.grpo_target.differences()
    assert settings["learning_rate"] == 0.005 and settings["group_size"] == 4
    assert one.trainer.settings() == {**chosen.trainer.settings(), **settings}
    with inside(tmp_path):
        baseline = train(one)
    assert (baseline.rollouts, len(opened)) == (24, 24)
    assert {task.split for task in opened} == {"training"} and len({task.id for task in opened}) == 6
    assert all(task.id.startswith("servicedesk-rare/") for task in opened)
