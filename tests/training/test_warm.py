"""A pretrained model as the base: found by its digest, trained further, and acting."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import load_script
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from captrain.agents.local import LocalPolicy
from captrain.benchmarks import load_benchmark
from captrain.benchmarks.servicedesk import TOOLS
from captrain.contract import RunningEpisode
from captrain.errors import UserError
from captrain.models import Chat
from captrain.run import BaseModelSettings, Component
from captrain.training import pretrained_digest, pretrained_folder, warm_start
from captrain.training.base import demonstrations


@pytest.fixture(scope="module")
def llama(tiny: Path) -> Path:
    """A tiny Llama with the embedded base's tokenizer and the template for models without tools."""
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = load_script("smollm").TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tiny.parent / "pretrained" / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def section(folder: Path, steps: int) -> BaseModelSettings:
    name = f"llama@{pretrained_digest(folder)}"
    return BaseModelSettings(
        pretrained=name, hidden=8, layers=1, heads=1, steps=steps, batch=4, learning_rate=1e-2, weight_decay=0.0
    )


def test_a_pretrained_model_is_trained_further_and_acts(llama: Path, tmp_path: Path) -> None:
    before = pretrained_digest(llama)
    short = warm_start(section(llama, 1), 0, tmp_path / "short", llama)
    summary = warm_start(section(llama, 12), 0, tmp_path / "base", llama)
    assert summary["loss"] < short["loss"] and summary["demonstrations"] == 48
    assert pretrained_digest(llama) == before
    policy = LocalPolicy(tmp_path / "base", temperature=1.0, max_turns=2, max_tokens=8, precision="bfloat16")
    target = load_benchmark(Component.model_validate({"_target_": "captrain.benchmarks.servicedesk.ServiceDesk"}))
    plays = [RunningEpisode(task.id, target.open(task)) for task in target.tasks("training", 4)]
    assert all(play.turns and len(play.token_ids) == len(play.logprobs) for play in policy.play(plays))


def test_bfloat16_products_train_nearly_as_float32(llama: Path, tmp_path: Path) -> None:
    spec = section(llama, 12)
    exact = warm_start(spec, 0, tmp_path / "exact", llama)
    near = warm_start(spec.model_copy(update={"products": "bfloat16"}), 0, tmp_path / "near", llama)
    assert near["weights_sha256"] != exact["weights_sha256"]
    assert near["loss"] == pytest.approx(exact["loss"], rel=0.05)


def test_equal_seeds_give_equal_weights(llama: Path, tmp_path: Path) -> None:
    digests = [warm_start(section(llama, 2), seed, tmp_path / "base", llama)["weights_sha256"] for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_the_template_for_models_without_tools_round_trips(llama: Path) -> None:
    chat = Chat(AutoTokenizer.from_pretrained(llama), TOOLS)
    rng = random.Random(0)
    for _ in range(20):
        opening, messages = demonstrations.demonstration(rng, guided=0.0)
        ids = chat.prompt(opening)
        pending: list[Any] = []
        for message in messages:
            if message["role"] != "assistant":
                pending.append(message)
                continue
            ids += (chat.suffix(pending) if pending else []) + (turn := chat.turn(message))
            pending = []
            parsed = chat.parse(turn)
            assert (parsed.get("tool_calls"), parsed["content"]) == (message.get("tool_calls"), message["content"])
        assert chat.dialogue([*opening, *messages])[: len(ids)] == ids


def test_a_missing_or_different_pretrained_model_is_refused(llama: Path, tmp_path: Path) -> None:
    name = section(llama, 1).pretrained
    assert name is not None and pretrained_folder(name, llama.parent) == llama
    with pytest.raises(UserError, match="there is no") as refusal:
        pretrained_folder(name, tmp_path)
    assert "make smollm" in refusal.value.remedy
    shutil.copytree(llama, tmp_path / "llama")
    config = tmp_path / "llama/config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(UserError, match="the content of .*llama has the digest"):
        pretrained_folder(name, tmp_path)
