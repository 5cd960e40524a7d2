"""Hints: a share of the rollouts reads them while sampling, and training never sees them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import groups, inside, interrupted, job, moved, targets_of, trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from captrain.agents import engine
from captrain.agents.local import LocalPolicy
from captrain.contract import CheckedEnvironment, RunningEpisode, load_file
from captrain.errors import EnvironmentFault, UserError
from captrain.models.chat import Chat
from captrain.run import build
from captrain.run.components import check
from captrain.training.checkpoints import last_checkpoint
from captrain.training.jobs import Trained
from captrain.training.runs import train
from captrain.training.workspace import publish_adapters

pytestmark = pytest.mark.usefixtures("vouched")

HALF = {"hints": 0.5}
HINT = "Only letters of the alphabet."
METHOD = f'''
    def hint(self, task):
        return "{HINT}"
'''


@pytest.fixture
def hinting(letters: Callable[..., Path]) -> Path:
    """The letters environment, with a hint."""
    path = letters()
    path.write_text(path.read_text() + METHOD)
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[engine.EngineRow]:
    """Collect the rows that the engine samples: what the model really read."""
    rows: list[engine.EngineRow] = []
    run = engine.sample_rows
    monkeypatch.setattr(
        engine, "sample_rows", lambda decoder, some, **how: (rows.extend(some), run(decoder, some, **how))[1]
    )
    return rows


def batch_of(trainer: Any, count: int) -> dict[str, Any]:
    """Make a batch of `count` groups of the letters environment, as the update takes it."""
    return trainer._generate_and_score_completions(groups(count))


def now(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Score the batch's completions by the current model, as the loss does."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, seen, width)[0].detach()


def test_the_ratio_without_the_hint_is_one_before_the_first_update(tiny: Path, hinting: Path) -> None:
    trainer = trainer_of(job(tiny, hinting, trainer={**HALF, "groups_per_step": 4}, rollouts=16, skip=0))
    torch.manual_seed(0)
    with torch.no_grad():
        # An adapter that changes something.
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    batch = batch_of(trainer, 4)
    hinted, sampler = trainer.batch.hinted, batch["sampling_per_token_logps"]
    assert len(hinted) == len(sampler) == 16 and 0 < hinted.sum() < 16
    learnt = (batch["tool_mask"] * batch["completion_mask"]).bool()
    log_ratio = (now(trainer, batch) - batch["old_per_token_logps"]) * learnt
    assert log_ratio[hinted].abs().max() < 2e-6 and log_ratio[~hinted].abs().max() < 1e-4
    # The sampler, which read the hint, gave other log-probabilities.
    assert ((now(trainer, batch) - sampler) * learnt)[hinted].abs().max() > 0.1
    assert (batch["old_per_token_logps"][~hinted].float() == sampler[~hinted]).all()


def test_hints_are_neither_trained_on_nor_scored_but_their_tokens_are_counted(
    tiny: Path, hinting: Path, read: list[engine.EngineRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    score = CheckedEnvironment.score
    monkeypatch.setattr(
        CheckedEnvironment,
        "score",
        lambda self, task, messages: (scored.append(str(messages)), score(self, task, messages))[1],
    )
    one = job(tiny, hinting, trainer=HALF, skip=0)
    policy = build(one.policy, LocalPolicy, model=tiny)
    trainer, chat, [target] = trainer_of(one), policy.chat([]), targets_of(one)
    batch = batch_of(trainer, 2)
    tasks = [task for task in target.tasks("training", 2) for _ in range(4)]
    openings = [list(target.open(task).messages) for task in tasks]
    wrote = [
        ids[seen.bool()].tolist() for ids, seen in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]
    plain = [ids[seen.bool()].tolist() for ids, seen in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    assert plain == [chat.prompt(opening) for opening in openings]
    aided = [[{"role": "system", "content": f"Talk.\n\n{HINT}"}, opening[1]] for opening in openings]
    for row, prompt, opening, written, hinted in zip(read, plain, aided, wrote, trainer.batch.hinted, strict=True):
        assert row.ids == (chat.prompt(opening) if hinted else prompt) + written
    assert sum(HINT in chat.tokenizer.decode(row.ids) for row in read) == trainer.batch.hinted.sum() > 0
    assert len(scored) == 8 and not any(HINT in text for text in scored)
    [step] = trainer.history
    assert step.prompt_tokens + step.completion_tokens == sum(len(row.ids) for row in read)
    assert step.completion_tokens == sum(sum(row.mask) for row in read)


def test_without_a_system_prompt_the_first_message_has_the_hint(
    tiny: Path, hinting: Path, read: list[engine.EngineRow]
) -> None:
    hinting.write_text(
        hinting.read_text(encoding="utf-8").replace('{"role": "system", "content": "Talk."}, ', ""), encoding="utf-8"
    )
    one = job(tiny, hinting, trainer={"hints": 1.0}, skip=0)
    chat = build(one.policy, LocalPolicy, model=tiny).chat([])
    batch = batch_of(trainer_of(one), 2)
    said = [{"role": "user", "content": f"Say 1.\n\n{HINT}"}]
    assert read[4].ids[: read[4].mask.index(1)] == chat.prompt(said)
    assert batch["prompt_ids"][4][batch["prompt_mask"][4].bool()].tolist() == chat.prompt(
        [{"role": "user", "content": "Say 1."}]
    )


def test_each_rollout_draws_its_hint_by_its_own_key(tiny: Path, hinting: Path) -> None:
    def drawn(share: float | list[float], count: int = 64, **changes: Any) -> torch.Tensor:
        recipe = {"hints": share, "groups_per_step": count}
        trainer = trainer_of(job(tiny, hinting, trainer=recipe, rollouts=4 * count, skip=0, **changes))
        batch_of(trainer, count)
        return trainer.batch.hinted.view(count, 4)

    third = drawn(0.3)
    assert third.float().mean() == pytest.approx(0.3, abs=0.06)
    # The position in the group does not matter, and most groups have both kinds.
    assert all(0.15 < share < 0.45 for share in third.float().mean(0).tolist())
    assert (third.any(1) & ~third.all(1)).sum() > 32
    assert (drawn(0.3, 8, policy={"batch": 3}) == third[:8]).all()
    assert (drawn(0.3, 8, seed=1) != third[:8]).any()
    assert drawn(1.0, 2).all() and not drawn(0.0, 2).any()
    # With a range, tasks have different shares, whose mean is the middle.
    assert (drawn([0.3, 0.3]) == third).all()
    ranged = drawn([0.0, 1.0]).float().mean(1)
    assert ranged.mean() == pytest.approx(0.5, abs=0.1) and ranged.std() > 1.2 * third.float().mean(1).std()


@pytest.mark.needs("minutes")
def test_without_hints_the_adapter_is_the_same(
    tiny: Path, hinting: Path, letters: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    plain = letters(folder=tmp_path / "plain")
    with inside(tmp_path / "work"):
        usual = train(job(tiny, plain))
        none_drawn = train(job(tiny, hinting, trainer={"hints": 0.0}))
        none_defined = train(job(tiny, plain, trainer=HALF))
        half = train(job(tiny, hinting, trainer=HALF))
        for same in (none_drawn, none_defined):
            assert replace(same, folder=usual.folder) == usual
        assert (none_defined.folder / "README.md").read_bytes() == (usual.folder / "README.md").read_bytes()
    assert len({one.folder for one in (usual, none_drawn, none_defined, half)}) == 4
    assert half.digest != usual.digest


@pytest.mark.needs("minutes")
def test_a_training_with_hints_resumes_to_the_identical_adapter_whatever_the_batch(
    tiny: Path, hinting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(tiny, hinting, trainer=HALF)
    with inside(tmp_path / "undisturbed"):
        whole = train(one)
        card = (whole.folder / "README.md").read_text()
    with inside(tmp_path / "cut off"):
        assert last_checkpoint(interrupted(one, 2)) is not None
        resumed = train(job(tiny, hinting, trainer=HALF, policy={"batch": 3}))
        assert (resumed, (resumed.folder / "README.md").read_text()) == (whole, card)
        publish_adapters([resumed], "adapters", "trace")
        [columns, *_] = Path("results/adapters/history.csv").read_text(encoding="utf-8").splitlines()
    assert columns == "adapter,step,rollouts,reward,success,informative"
    first, last = resumed.history[0], resumed.history[-1]
    assert 0 < sum(step.unhinted or 0 for step in resumed.history) < 24
    assert "| share of rollouts with a hint | 0.5 |\n" in card
    assert (
        "| passed of those without, first and last step | "
        f"{first.unhinted_passed} of {first.unhinted}, {last.unhinted_passed} of {last.unhinted} |\n"
    ) in card


OBEY = '''"""Say yes."""


class Episode:
    def __init__(self):
        self.messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Well?"}]

    def step(self, message):
        return [], True


class Environment:
    name = "obey"
    tools = []

    def tasks(self, split, count):
        return [{"id": f"obey/{split}/{i}", "split": split, "data": {}} for i in range(count)]

    def open(self, task):
        return Episode()

    def score(self, task, messages):
        said = messages[-1]["content"] == "yes"
        return {"reward": float(said), "success": said, "parts": {}}

    def reference(self, task):
        return [{"role": "assistant", "content": "yes"}]

    def hint(self, task):
        return "Say yes."
'''


@pytest.fixture
def obedient(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model, taught to say no, and yes when told to."""
    folder = shutil.copytree(tiny, tmp_path / "obedient")
    chat, model = Chat(AutoTokenizer.from_pretrained(tiny), []), AutoModelForCausalLM.from_pretrained(tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(200):
        system, answer = [("Answer.", "no"), ("Answer.\n\nSay yes.", "yes")][step % 2]
        prompt = chat.prompt([{"role": "system", "content": system}, {"role": "user", "content": "Well?"}])
        turn = chat.turn({"role": "assistant", "content": answer})
        model(torch.tensor([prompt + turn]), labels=torch.tensor([[-100] * len(prompt) + turn])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def test_hints_teach_a_task_that_is_out_of_reach_without_them(obedient: Path, tmp_path: Path) -> None:
    path = tmp_path / "obey.py"
    path.write_text(OBEY)

    def trained(share: float) -> Trained:
        recipe = {"hints": share, "groups_per_step": 2, "checkpoint_every": 20}
        return train(job(obedient, path, name="obey", rollouts=96, trainer=recipe))

    with inside(tmp_path / "work"):
        alone, helped = trained(0.0), trained(0.5)
        assert (alone.discarded, {row.reward for row in alone.history}, moved(alone.folder)) == (96, {0.0}, 0.0)
        first, late = helped.history[0], helped.history[-6:]
        assert first.unhinted_passed == 0 and first.unhinted
        passed, unhinted = (sum(getattr(step, name) for step in late) for name in ("unhinted_passed", "unhinted"))
        assert passed > 0.8 * unhinted > 0
        # After training, without the hint.
        one = job(obedient, path, policy={"temperature": 0.0})
        policy = build(one.policy, LocalPolicy, model=obedient)
        [task] = load_file(path).tasks("test", 1)
        for adapter, answer in (("", "no"), (str(helped.folder), "yes")):
            [play] = policy.play([RunningEpisode("key", load_file(path).open(task), adapter)])
            assert play.messages[-1]["content"] == answer


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 7", "environment letters .*letters.py. gave 7 as the hint of letters/training/"),
        ("raise KeyError('x')", "environment letters .* raised KeyError: 'x' in hint on letters/training/"),
    ],
)
def test_an_invalid_hint_is_a_fault_of_the_environment(
    tiny: Path, hinting: Path, tmp_path: Path, body: str, said: str
) -> None:
    hinting.write_text(hinting.read_text(encoding="utf-8").replace(f'return "{HINT}"', body), encoding="utf-8")
    with inside(tmp_path / "work"), pytest.raises(EnvironmentFault, match=said):
        train(job(tiny, hinting, trainer={"hints": 1.0}))


def test_a_share_above_one_is_refused(tiny: Path, hinting: Path) -> None:
    with pytest.raises(UserError, match="trainer.hints"):
        check("trainer", job(tiny, hinting, trainer={"hints": 1.5}).trainer)
