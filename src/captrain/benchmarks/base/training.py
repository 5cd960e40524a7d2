"""Train the embedded base: a tiny Qwen3 from random weights on flawed demonstrations.

Fixed seeds, float64 and a barrier around each step (`captrain.models.barrier`): every run on every CPU gives the same
weights, bit for bit. Muon on the matrices and AdamW on the rest, loss on the tokens the agent writes. The first part of
training is rich in look-up drills, which is what lets so small a model copy and compare at all.
"""

import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captrain.benchmarks import servicedesk as desk
from captrain.benchmarks.base import demonstrations
from captrain.benchmarks.base.demonstrations import Demonstrations
from captrain.benchmarks.base.tokenizer import build_tokenizer
from captrain.config import Base, build
from captrain.execution import prepare_torch
from captrain.models import Chat, dialogue_tokens
from captrain.records import JsonObject, Message, file_digest, place_aside, publish_json

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel, Qwen3ForCausalLM

Supervised = tuple[list[int], list[int]]
"""Token ids of a dialogue, and which of them the agent writes."""

INITIAL_DEVIATION = 0.06
"""Standard deviation of the random weights that matrices begin with."""
BUCKET = 16
"""Batches whose sequences are sorted by length together: little padding, still mixed."""


def drill_tokens(chat: Chat, messages: list[Message]) -> Supervised:
    """Ids and mask of a look-up drill: questions without their role markers, only the answers supervised."""
    ids = chat.suffix(messages[:1])
    mask = [0] * len(ids)
    header = ids[-1:]
    for question, answer in zip(messages[1::2], messages[2::2], strict=True):
        prompt, completion = chat.encode(question["content"]) + header, chat.encode(answer["content"])
        ids = [*ids, *prompt, *completion, chat.end]
        mask = [*mask, *[0] * len(prompt), *[1] * len(completion), 0]
    return ids, mask


def make_batches(chat: Chat, spec: Base, seed: int, source: Demonstrations | None = None) -> list[list[Supervised]]:
    """All training batches: of the service desk, where drills are half of the first 30% and a tenth of the rest, or of
    the demonstrations of another benchmark."""
    rng = random.Random(f"demonstrations-{seed}")
    count = spec.steps * spec.batch
    rows = []
    for i in range(count):
        if source is not None:
            rows.append(dialogue_tokens(chat, *source.demonstration(rng)))
        elif rng.random() < (0.5 if i < 0.3 * count else 0.1):
            rows.append(drill_tokens(chat, demonstrations.drill(rng)))
        else:
            rows.append(dialogue_tokens(chat, *demonstrations.demonstration(rng)))
    batches = []
    for start in range(0, count, spec.batch * BUCKET):
        by_length = sorted(rows[start : start + spec.batch * BUCKET], key=lambda row: len(row[0]))
        bucket = [by_length[i : i + spec.batch] for i in range(0, len(by_length), spec.batch)]
        rng.shuffle(bucket)
        batches += bucket
    return batches


def build_model(tokenizer: Any, spec: Base, seed: int) -> "Qwen3ForCausalLM":
    """A Qwen3 with random weights, as wide and deep as the spec says."""
    import numpy as np
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from captrain.models import draw_normal

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden,
        intermediate_size=2 * spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        head_dim=spec.hidden // spec.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Qwen3ForCausalLM(config)
    random = np.random.Generator(np.random.PCG64(seed))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            draw_normal(parameter, INITIAL_DEVIATION, random)
    return model


def train_base(
    spec: Base,
    seed: int,
    folder: Path,
    show: Callable[[list[list[Supervised]]], Iterable[list[Supervised]]] = iter,
    processes: int = 1,
) -> JsonObject:
    """Train and save the base in Hugging Face format. Where `model` names one that is served elsewhere, nothing is
    trained and the folder holds that name alone.

    Args:
        spec: the `base` section.
        seed: run seed.
        folder: where model and tokenizer are written.
        show: wraps the sequence of batches, for a progress bar.
        processes: that share the work; no part of the result.

    Returns:
        Summary: SHA-256 of the weights, parameter count, losses (mean over the last tenth of steps).
    """
    if spec.model is not None:
        shutil.rmtree(folder, ignore_errors=True)
        publish_json(folder / "model.json", {"model": spec.model})
        return {"model": spec.model}
    import torch
    from transformers.utils import logging as hf_logging

    from captrain.models import SharedPasses, to_float64

    prepare_torch()
    hf_logging.disable_progress_bar()
    source = build(spec.demonstrations, Demonstrations) if spec.demonstrations else None
    tokenizer = build_tokenizer(source)
    model = build_model(tokenizer, spec, seed)
    to_float64(model)
    batches = make_batches(Chat(tokenizer, source.tools if source else desk.TOOLS), spec, seed, source)
    optimizers = _optimizers(model, spec)
    warm = max(5, spec.steps // 20)
    losses = []
    with SharedPasses(model, processes) as passes:
        for step, rows in enumerate(show(batches)):
            loss = -passes.scores(rows).log_probs.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale = min((step + 1) / warm, max(0.02, 1 - (step - warm) / max(1, spec.steps - warm)))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = spec.learning_rate * scale
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return save_base(model.float(), tokenizer, folder, losses)  # exact: see `captrain.models.barrier`


def save_base(model: "PreTrainedModel", tokenizer: Any, folder: Path, losses: Sequence[float]) -> JsonObject:
    """Save a trained base in Hugging Face format; returns its summary, see `train_base`.

    Args:
        model: in the precision in which it is saved.
        tokenizer: its tokenizer.
        folder: is replaced as a whole.
        losses: one a step.
    """
    with place_aside(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "weights_sha256": file_digest(folder / "model.safetensors"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "steps": len(losses),
        "loss": round(sum(tail) / len(tail), 6),
    }


def _optimizers(model: "Qwen3ForCausalLM", spec: Base) -> "list[Optimizer]":
    from captrain.models import AdamW, Muon

    parameters = list(model.named_parameters())
    matrices = [p for name, p in parameters if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in parameters if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=spec.learning_rate, weight_decay=spec.weight_decay, iterations=3)
    return [muon, AdamW(vectors, lr=spec.learning_rate, betas=(0.9, 0.98))]
