"""Passes over rows as trees, in one process and in two: scores and gradients equal those of single rows."""

import ctypes
import os
import signal
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from captrain.errors import UserError
from captrain.models import forest as forest_module
from captrain.models.dense import to_float64
from captrain.models.forest import Row, make_forest, split_forest
from captrain.models.passes import IGNORED, SharedPasses, share_beginnings
from captrain.run import Accelerate, Machine

SIZE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FORMS: dict[str, Any] = {
    "a prompt each": lambda number: number,
    "one prompt for all": lambda number: 0,
    "groups": lambda number: number % 3,
}


def a_model(kind: str) -> PreTrainedModel:
    """A Qwen3 in float64 or a Llama in float32, with grouped queries."""
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZE))
    model = Qwen3ForCausalLM(Qwen3Config(**SIZE))
    to_float64(model)
    return model


def some_rows(form: str, count: int = 8) -> list[Row]:
    """Rows of different lengths with shared beginnings, some with the same prompt and first answer."""
    draw = torch.Generator().manual_seed(1)
    system, stem = (torch.randint(1, 50, (size,), generator=draw).tolist() for size in (6, 4))
    rows = []
    for number in range(count):
        prompt = FORMS[form](number)
        ids = [*system, *([1 + prompt] * (1 + prompt)), *stem[: 1 + number % 4]]
        ids += torch.randint(1, 50, (3 + 2 * number,), generator=draw).tolist()
        first = len(system) + 1 + prompt
        rows.append((ids, [place >= first and place % 5 != 0 for place in range(len(ids))]))
    return rows


def padded(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and labels as TRL pads them, left and right."""
    width = max(len(ids) for ids, _ in rows) + 2
    ids, mask = torch.zeros((len(rows), width), dtype=torch.long), torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for number, (tokens, scored) in enumerate(rows):
        place = slice(number % 3, number % 3 + len(tokens))
        ids[number, place], mask[number, place] = torch.tensor(tokens), 1
        labels[number, place] = torch.tensor([t if s else IGNORED for t, s in zip(tokens, scored, strict=True)])
    return ids, mask, labels


def one_by_one(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    """Score tokens by the model's own modules, row by row."""
    parts = []
    for ids, scored in rows:
        distribution = (model(input_ids=torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        places = [place for place, flag in enumerate(scored) if flag]
        parts.append(distribution[[place - 1 for place in places], [ids[place] for place in places]])
    return torch.cat(parts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "tolerance"), [("qwen3", 1e-12), ("llama", 1e-5)])
def test_scores_and_gradients_equal_those_of_single_rows(kind: str, tolerance: float, form: str) -> None:
    model, rows = a_model(kind), some_rows(form)
    expected = one_by_one(model, rows)
    importance = torch.randn(expected.shape, dtype=torch.float64)
    (expected * importance).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    scores = SharedPasses(model, 1).scores(rows, 0.7)
    torch.testing.assert_close(scores.log_probs, expected, rtol=0, atol=tolerance)
    (scores.log_probs * importance).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=100 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    "targets", [("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), ("v_proj", "down_proj")]
)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_adapter_gradients_equal_those_of_single_rows(kind: str, targets: tuple[str, ...]) -> None:
    base, rows = a_model(kind), some_rows("groups")
    model: Any = get_peft_model(base.float(), LoraConfig(r=4, lora_alpha=8, target_modules=[*targets]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    expected = one_by_one(model, rows)
    expected.mean().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad.clone() for parameter in trained]
    model.zero_grad()
    scores = SharedPasses(base, 1).scores(rows, 0.7)
    torch.testing.assert_close(scores.log_probs, expected, rtol=0, atol=1e-4)
    scores.log_probs.mean().backward()
    assert len(gradients) == 2 * 2 * len(targets)
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_a_pass_with_little_room_gives_the_same_bytes_and_keeps_fewer() -> None:
    found, sizes = [], []
    for room in (None, 400_000, 0):
        model, kept = a_model("llama"), list[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: (kept.append(x.nbytes), x)[1], lambda x: x):
            scores = SharedPasses(model, 1, room=room).scores(some_rows("groups"))
        scores.log_probs.mean().backward()
        found.append([scores.log_probs.detach(), *(parameter.grad for parameter in model.parameters())])
        sizes.append(sum(kept))
    for others in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], others, strict=True))
    assert sizes[0] > sizes[1] > sizes[2]


def memory() -> int:
    """Return the memory of this process in bytes, without glibc's free memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_recomputed_layers_hold_no_attention() -> None:
    layers, nodes = 12, 1500
    shares = layers * SIZE["num_attention_heads"] * nodes**2 * 4
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZE, "num_hidden_layers": layers, "max_position_embeddings": nodes + 1}))
    row = torch.randint(1, 50, (nodes + 1,)).tolist(), [0, *([1] * nodes)]
    held = dict[int | None, int]()
    for room in (0, None):
        before = memory()
        scores = SharedPasses(model, 1, room=room).scores([row])
        held[room] = memory() - before
        scores.log_probs.mean().backward()
        del scores
    assert held[0] < shares / 3 and held[None] > shares * 2 / 3


def test_bfloat16_products_are_close_and_gradients_stay_float32() -> None:
    found = []
    for products in (None, torch.bfloat16):
        model = a_model("llama")
        scores = SharedPasses(model, 1, products).scores(some_rows("groups"))
        scores.log_probs.mean().backward()
        found.append((scores.log_probs.detach(), [parameter.grad for parameter in model.parameters()]))
    (exact, gradients), (near, others) = found
    assert 0 < (exact - near).abs().max() < 0.2
    for gradient, other in zip(gradients, others, strict=True):
        assert gradient is not None and other is not None and other.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), other.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("form", FORMS)
def test_two_processes_give_the_bytes_of_one(form: str) -> None:
    found = []
    for processes in (1, 2):
        model, rows = a_model("qwen3"), some_rows(form)
        passes = SharedPasses(model, processes)
        values: list[Tensor] = []
        for _ in range(2):
            model.zero_grad()
            scores = passes.scores(rows)
            (scores.log_probs * torch.arange(len(scores.log_probs))).sum().backward()
            with torch.no_grad():
                gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                values += [*scores, *(gradient.clone() for gradient in gradients)]
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.01 * gradient
        found.append(values)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_killed_helper_is_one_message() -> None:
    passes = SharedPasses(a_model("qwen3"), 2)
    passes.scores(some_rows("groups"))
    helper = passes.helper()
    assert helper is not None and helper.process.pid is not None
    os.kill(helper.process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="shares the training of this one died") as refusal:
        passes.scores(some_rows("groups"))
    assert "machine.workers=1" in refusal.value.remedy


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_the_replaced_head_gives_the_scores_of_trls(strategy: Any) -> None:
    model, rows = a_model("qwen3"), some_rows("groups")
    expected = one_by_one(model, rows)
    accelerate = Accelerate(strategy=strategy, processes=1 if strategy == "none" else 2)
    share_beginnings(model, 0.7, Machine(workers=1, batch=8, accelerate=accelerate))
    ids, mask, labels = padded(rows)
    output: Any = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    scored = labels[:, 1:] != IGNORED
    torch.testing.assert_close(output.log_probs[scored], expected, rtol=0, atol=1e-12)
    assert not output.log_probs[~scored].any() and torch.equal(output.label_mask, scored)
    assert output.loss.item() == pytest.approx(-expected.mean().item())
    likeliest = model.get_output_embeddings()
    assert likeliest is not None and output.is_top1.dtype == torch.bool


def test_a_forest_holds_shared_beginnings_once() -> None:
    rows = some_rows("groups")
    forest = make_forest(rows)
    read = [max(index for index, flag in enumerate(scored) if flag) for _, scored in rows]
    distinct = {tuple(ids[:stop]) for (ids, _), end in zip(rows, read, strict=True) for stop in range(1, end + 1)}
    prompts = {tuple(ids[: scored.index(True)]) for ids, scored in rows}
    assert len(forest.trees) == len(prompts) == 3 and forest.trunk == 6
    # Prompts of different groups are separate trees, even if they share more than the trunk.
    assert len(distinct) <= len(forest.ids) < sum(len(ids) for ids, _ in rows)
    assert forest.targets.tolist() == [
        token for ids, scored in rows for token, flag in zip(ids, scored, strict=True) if flag
    ]
    # The last scored token predicts nothing.
    assert forest.positions.max() == max(read) - 1


def test_long_rows_make_several_trees_with_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = a_model("qwen3"), some_rows("groups")
    longest = max(len(ids) for ids, _ in rows)
    monkeypatch.setattr(forest_module, "TREE", 2 * longest)
    forest = make_forest(rows)
    assert len(forest.trees) > len({tuple(ids[: scored.index(True)]) for ids, scored in rows})
    assert all(tree.stop - tree.start <= 3 * longest for tree in forest.trees)
    scores = SharedPasses(model, 1).scores(rows, 0.7)
    torch.testing.assert_close(scores.log_probs, one_by_one(model, rows), rtol=0, atol=1e-12)


def test_rows_of_a_prompt_stay_together_and_tokens_divide_evenly() -> None:
    rows = some_rows("groups", 12)
    shares = split_forest(rows, 2)
    assert sorted(number for share in shares for number in share) == [*range(12)]
    prompts = [{tuple(rows[number][0][: rows[number][1].index(True)]) for number in share} for share in shares]
    assert not prompts[0] & prompts[1]
    assert split_forest(rows[:1], 2) == [[0], []]
