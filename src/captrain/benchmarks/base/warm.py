"""A pretrained model as the base: all of its weights trained further on the demonstrations of the embedded one.

Without that a small model answers the desk in prose and calls nothing, and there is nothing to diagnose. The
demonstrations have the same shortcuts (`demonstrations`), so what the model lacks afterwards is known here, and must be
found there. It computes in float32, with products in bfloat16 where that is asked for: unlike the embedded base, its
bytes are not the same on every CPU. In bfloat16 a processor without instructions for it is some thirty times slower.
"""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

from captrain.benchmarks import servicedesk as desk
from captrain.benchmarks.base import demonstrations
from captrain.benchmarks.base.demonstrations import Demonstrations
from captrain.benchmarks.base.training import Supervised, save_base, train_base
from captrain.config import Base, Machine, build
from captrain.errors import UserError
from captrain.execution import launch
from captrain.models import Chat, dialogue_tokens, load_module
from captrain.records import JsonObject, Message, file_digest

Show = Callable[[list[list[Supervised]]], Iterable[list[Supervised]]]

BUCKET = 8
"""Batches whose sequences are sorted by length together: little padding, still mixed."""
REMEDY = "make it: `make smollm` for the one of experiment=smollm"


def pretrained_digest(folder: Path) -> str:
    """Content hash of a model in Hugging Face format: configuration, tokenizer, template and weights."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    weights = sorted(folder.glob("*.safetensors"))
    return file_digest(*(folder / name for name in names if (folder / name).exists()), *weights)


def pretrained_folder(name: str, root: Path) -> Path:
    """The folder of a pretrained model.

    Args:
        name: name@digest.
        root: `machine.pretrained`.

    Raises:
        UserError: it is not there, or has another content.
    """
    label, _, expected = name.partition("@")
    folder = root.expanduser() / label
    if not (folder / "config.json").exists():
        raise UserError(f"base.pretrained = {name}: there is no {folder}", REMEDY)
    if (content := pretrained_digest(folder)) != expected:
        raise UserError(f"base.pretrained = {name}: the content of {folder} is {content}", f"{REMEDY}, again")
    return folder


def make_batches(chat: Chat, spec: Base, seed: int, source: Demonstrations | None) -> list[list[Supervised]]:
    """All training batches, of the service desk or of another benchmark: sequences of near length together."""
    rng = random.Random(f"demonstrations-{seed}")

    def demonstration() -> tuple[list[Message], list[Message]]:
        return demonstrations.demonstration(rng, guided=0.0) if source is None else source.demonstration(rng)

    rows = [dialogue_tokens(chat, *demonstration()) for _ in range(spec.steps * spec.batch)]
    batches = []
    for start in range(0, len(rows), spec.batch * BUCKET):
        by_length = sorted(rows[start : start + spec.batch * BUCKET], key=lambda row: len(row[0]))
        bucket = [by_length[i : i + spec.batch] for i in range(0, len(by_length), spec.batch)]
        rng.shuffle(bucket)
        batches += bucket
    return batches


def make_base(spec: Base, seed: int, folder: Path, machine: Machine, show: Show = iter) -> JsonObject:
    """The base that the spec asks for: a pretrained model trained further, or `train_base`.

    Args:
        spec: the `base` section.
        seed: run seed.
        folder: where model and tokenizer are written.
        machine: where pretrained models lie, and how many processes share the training.
        show: wraps the sequence of batches, for a progress bar.

    Raises:
        UserError: the pretrained model is not there, or is another one.
    """
    if spec.pretrained is None:
        return train_base(spec, seed, folder, show, launch.cores(machine))
    pretrained = pretrained_folder(spec.pretrained, Path(machine.pretrained))
    return warm_start(spec, seed, folder, pretrained, show, launch.cores(machine), launch.room(machine))


def warm_start(
    spec: Base,
    seed: int,
    folder: Path,
    pretrained: Path,
    show: Show = iter,
    processes: int = 1,
    room: int | None = None,
) -> JsonObject:
    """Train a pretrained model further and save it in Hugging Face format.

    Args:
        spec: the `base` section; of it steps, batch, learning_rate, weight_decay and products.
        seed: run seed.
        folder: where model and tokenizer are written.
        pretrained: folder of the model to begin with, in the same format.
        show: wraps the sequence of batches, for a progress bar.
        processes: that share the work; no part of the result.
        room: bytes for the activations of each; no part of the result.

    Returns:
        Summary as of `captrain.benchmarks.train_base`, and what was trained on.
    """
    import torch
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as hf_logging

    from captrain.models import SharedPasses

    # Not `prepare_torch`: sequences of many lengths, and a process that keeps what it has once used would keep it all.
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pretrained)
    model = load_module(pretrained, "float32")
    source = build(spec.demonstrations, Demonstrations) if spec.demonstrations else None
    batches = make_batches(Chat(tokenizer, source.tools if source else desk.TOOLS), spec, seed, source)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
    )
    warm = max(1, spec.steps // 20)
    losses: list[float] = []
    with SharedPasses(model, processes, getattr(torch, spec.products), room) as passes:
        for step, rows in enumerate(show(batches)):
            loss = -passes.scores(rows).log_probs.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale = min((step + 1) / warm, max(0.05, 1 - (step - warm) / max(1, spec.steps - warm)))
            optimizer.param_groups[0]["lr"] = spec.learning_rate * scale
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {
        "pretrained": spec.pretrained,
        **save_base(model, tokenizer, folder, losses),
        "demonstrations": spec.steps * spec.batch,
        "tokens": sum(len(ids) for rows in batches for ids, _ in rows),
    }
