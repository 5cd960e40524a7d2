"""Train the base: a tiny Qwen3 from random weights (the embedded base), or a pretrained model further.

Both learn from flawed demonstrations (`demonstrations`), so that the capabilities that they lack are known.

The embedded base trains with fixed seeds, in float64 and behind a barrier (`captrain.models.barrier`), so that its
weights are the same, bit for bit, on every CPU. Matrices train by Muon and the rest by AdamW; the loss is on the tokens
that the agent writes. The first part of training has many look-up drills, without which so small a model would not
learn to copy and compare.

Without demonstrations, a small pretrained model answers the desk in prose without calls, and there is nothing to
diagnose. It computes in float32, with products in bfloat16 if configured; its bytes differ between CPUs. On a processor
without bfloat16 instructions, bfloat16 is about thirty times slower.
"""

import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captrain.benchmarks import servicedesk as desk
from captrain.errors import UserError
from captrain.models import Chat, dialogue_tokens, load_module, record_files
from captrain.records import JsonObject, Message, file_digest, place_aside, publish_json
from captrain.run import BaseModelSettings, Machine, build, launch, prepare_torch
from captrain.training.base import demonstrations
from captrain.training.base.demonstrations import Demonstrations
from captrain.training.base.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel, Qwen3ForCausalLM

    from captrain.models import SharedPasses

Supervised = tuple[list[int], list[int]]
"""Token ids of a dialogue, and 1 where the agent writes."""
Show = Callable[[list[list[Supervised]]], Iterable[list[Supervised]]]

INITIAL_DEVIATION = 0.06
"""Standard deviation of the initial weights of matrices."""
REMEDY = "make it: `make smollm` for the one of experiment=smollm"


def pretrained_digest(folder: Path) -> str:
    """Hash a model in Hugging Face format: configuration, tokenizer, template and weights."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    weights = sorted(folder.glob("*.safetensors"))
    return file_digest(*(folder / name for name in names if (folder / name).exists()), *weights)


def pretrained_folder(name: str, root: Path) -> Path:
    """Find the folder of a pretrained model.

    Args:
        name: name@digest.
        root: `machine.pretrained`.

    Raises:
        UserError: it does not exist, or has another digest.
    """
    label, _, expected = name.partition("@")
    folder = root.expanduser() / label
    if not (folder / "config.json").exists():
        raise UserError(f"base.pretrained = {name}: there is no {folder}", REMEDY)
    if (content := pretrained_digest(folder)) != expected:
        raise UserError(
            f"base.pretrained = {name}: the content of {folder} has the digest {content}", f"{REMEDY}, again"
        )
    return folder


def make_base(spec: BaseModelSettings, seed: int, folder: Path, machine: Machine, show: Show = iter) -> JsonObject:
    """Make the base of the spec: by `warm_start` from a pretrained model, or by `train_base`.

    Args:
        spec: the `base` section.
        seed: run seed.
        folder: where model and tokenizer are written.
        machine: where pretrained models lie, and how many processes share the training.
        show: wraps the sequence of batches, for a progress bar.

    Raises:
        UserError: the pretrained model does not exist, or has another digest.
    """
    if spec.pretrained is None:
        return train_base(spec, seed, folder, show, launch.cores(machine))
    pretrained = pretrained_folder(spec.pretrained, Path(machine.pretrained))
    return warm_start(spec, seed, folder, pretrained, show, launch.cores(machine), launch.room(machine))


def train_base(spec: BaseModelSettings, seed: int, folder: Path, show: Show = iter, processes: int = 1) -> JsonObject:
    """Train and save the embedded base in Hugging Face format. If `model` names a model that is served elsewhere,
    nothing is trained, and the folder holds that name alone.

    Args:
        spec: the `base` section.
        seed: run seed.
        folder: where model and tokenizer are written.
        show: wraps the sequence of batches, for a progress bar.
        processes: that share the work; they do not change the result.

    Returns:
        Summary: hash of the weights, parameter count, loss (mean over the last tenth of steps).
    """
    if spec.model is not None:
        shutil.rmtree(folder, ignore_errors=True)
        publish_json(folder / "model.json", {"model": spec.model})
        return {"model": spec.model}
    from transformers.utils import logging

    from captrain.models import AdamW, Muon, SharedPasses, to_float64

    prepare_torch()
    logging.disable_progress_bar()
    source = build(spec.demonstrations, Demonstrations) if spec.demonstrations else None
    tokenizer = build_tokenizer(source)
    model = build_model(tokenizer, spec, seed)
    to_float64(model)
    batches = make_batches(Chat(tokenizer, source.tools if source else desk.TOOLS), spec, seed, source)
    parameters = list(model.named_parameters())
    matrices = [p for name, p in parameters if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in parameters if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=spec.learning_rate, weight_decay=spec.weight_decay, iterations=3)
    optimizers = [muon, AdamW(vectors, lr=spec.learning_rate, betas=(0.9, 0.98))]
    passes = SharedPasses(model, processes)
    losses = _fit(passes, show(batches), optimizers, spec, warm=max(5, spec.steps // 20), floor=0.02)
    return _save(model.float(), tokenizer, folder, losses)  # exact, see `captrain.models.barrier`


def warm_start(
    spec: BaseModelSettings,
    seed: int,
    folder: Path,
    pretrained: Path,
    show: Show = iter,
    processes: int = 1,
    room: int | None = None,
) -> JsonObject:
    """Train a pretrained model further and save it in Hugging Face format.

    Args:
        spec: the `base` section; steps, batch, learning_rate, weight_decay and products are used.
        seed: run seed.
        folder: where model and tokenizer are written.
        pretrained: folder of the model to start from, in the same format.
        show: wraps the sequence of batches, for a progress bar.
        processes: that share the work; they do not change the result.
        room: bytes for the activations of each process; it does not change the result.

    Returns:
        Summary as of `train_base`, with the number of demonstrations and tokens.
    """
    import torch
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    from captrain.models import SharedPasses

    # Not `prepare_torch`, which keeps freed memory: with sequences of many lengths, memory would run out.
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    source = build(spec.demonstrations, Demonstrations) if spec.demonstrations else None
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pretrained)
    model = load_module(pretrained, "float32")
    batches = make_batches(Chat(tokenizer, source.tools if source else desk.TOOLS), spec, seed, source)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
    )
    passes = SharedPasses(model, processes, getattr(torch, spec.products), room)
    losses = _fit(passes, show(batches), [optimizer], spec, warm=max(1, spec.steps // 20), floor=0.05)
    return {
        "pretrained": spec.pretrained,
        **_save(model, tokenizer, folder, losses),
        "demonstrations": spec.steps * spec.batch,
        "tokens": sum(len(ids) for rows in batches for ids, _ in rows),
    }


def build_model(tokenizer: Any, spec: BaseModelSettings, seed: int) -> "Qwen3ForCausalLM":
    """Build a Qwen3 with random weights, in the size of the spec."""
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


def make_batches(
    chat: Chat, spec: BaseModelSettings, seed: int, source: Demonstrations | None = None
) -> list[list[Supervised]]:
    """Make all training batches, with sequences of similar length together: demonstrations of another benchmark, or of
    the service desk. Those for a pretrained model have no guidance. For the embedded base, drills are half of the first
    30% and a tenth of the rest."""
    rng = random.Random(f"demonstrations-{seed}")
    count = spec.steps * spec.batch
    rows = []
    for i in range(count):
        if source is not None:
            rows.append(dialogue_tokens(chat, *source.demonstration(rng)))
        elif spec.pretrained is not None:
            rows.append(dialogue_tokens(chat, *demonstrations.demonstration(rng, guided=0.0)))
        elif rng.random() < (0.5 if i < 0.3 * count else 0.1):
            rows.append(_drill_tokens(chat, demonstrations.drill(rng)))
        else:
            rows.append(dialogue_tokens(chat, *demonstrations.demonstration(rng)))
    # Sort this many batches by length together: little padding, but still mixed.
    size = spec.batch * (16 if spec.pretrained is None else 8)
    batches = []
    for start in range(0, count, size):
        by_length = sorted(rows[start : start + size], key=lambda row: len(row[0]))
        bucket = [by_length[i : i + spec.batch] for i in range(0, len(by_length), spec.batch)]
        rng.shuffle(bucket)
        batches += bucket
    return batches


def _drill_tokens(chat: Chat, messages: list[Message]) -> Supervised:
    """Tokenize a look-up drill: questions without role markers, and only the answers supervised."""
    ids = chat.suffix(messages[:1])
    mask = [0] * len(ids)
    header = ids[-1:]
    for question, answer in zip(messages[1::2], messages[2::2], strict=True):
        prompt, completion = chat.encode(question["content"]) + header, chat.encode(answer["content"])
        ids = [*ids, *prompt, *completion, chat.end]
        mask = [*mask, *[0] * len(prompt), *[1] * len(completion), 0]
    return ids, mask


def _fit(
    passes: "SharedPasses",
    batches: Iterable[list[Supervised]],
    optimizers: "Sequence[Optimizer]",
    spec: BaseModelSettings,
    warm: int,
    floor: float,
) -> list[float]:
    """Step through the batches and return their losses. The rate rises for `warm` steps, then falls linearly to a share
    of `floor`."""
    import torch

    losses = []
    with passes:
        for step, rows in enumerate(batches):
            loss = -passes.scores(rows).log_probs.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(passes.model.parameters(), 1.0)
            scale = min((step + 1) / warm, max(floor, 1 - (step - warm) / max(1, spec.steps - warm)))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = spec.learning_rate * scale
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _save(model: "PreTrainedModel", tokenizer: Any, folder: Path, losses: Sequence[float]) -> JsonObject:
    """Save a trained base in place of the folder, and return its summary (see `train_base`)."""
    with place_aside(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        record_files(aside)
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
