"""Supervised fine-tuning of an adapter on demonstrations in tokens, which costs no rollout.

Demonstrations are rendered token by token as rollouts are: the loss is on the tokens that the agent writes, and on no
other. One LoRA adapter of the trainer's rank and alpha, in plain PEFT format, named by its content. Training is short
and not resumed: a folder is whole, or it is made again. On one CPU thread equal seeds give equal bytes.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captrain.config import Adp, ReferenceSft, Spec, build
from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.models import Chat, adapter_digest, dialogue_tokens, model_source, settle
from captrain.records import Message, digest, publish, publish_json, publish_text
from captrain.training.jobs import Learner
from captrain.training.recipe import GRPO

BATCH = 16
"""Sequences of one update."""
LONG = "longer than the model reads"


@dataclass(frozen=True)
class Row:
    """A demonstration in tokens: ids, and 1 where the agent wrote."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True)
class Taught:
    """A trained adapter: its content hash and folder, what it was trained on, and the loss of each update."""

    digest: str
    folder: Path
    demonstrations: int
    left_out: dict[str, int]
    losses: list[float]


def row_of(chat: Chat, messages: Sequence[Message], room: int) -> Row | None:
    """A dialogue in tokens; None if it is longer than the model reads."""
    opening = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
    ids, mask = dialogue_tokens(chat, [*messages[:opening]], [*messages[opening:]])
    return Row(ids, mask) if len(ids) <= room else None


def recipe_of(spec: Spec, asked: Adp | ReferenceSft) -> dict[str, Any]:
    """All that decides a training beside its rows and its base."""
    return {
        "rank": spec.trainer.settings()["rank"], "alpha": spec.trainer.settings()["alpha"], "epochs": asked.epochs,
        "learning_rate": asked.learning_rate, "batch": BATCH, "seed": spec.seed,
        "targets": build(spec.trainer, GRPO).targets,
    }  # fmt: skip


def taught(
    name: str, rows: Sequence[Row], left_out: dict[str, int], recipe: dict[str, Any], base: Path, policy: Learner,
    card: str, key: Sequence[Any] = (),
) -> Taught:  # fmt: skip
    """Train the adapter, or return it from its workspace when it is there already.

    Args:
        name: the row of the table; its workspaces lie in .cache/<name>.
        rows: demonstrations.
        left_out: how many further ones could not be used, by reason.
        recipe: as of `recipe_of`.
        base: folder of the base model.
        policy: the learner.
        card: rows of the model card that say where the demonstrations come from.
        key: what else decides the adapter, such as the code that made the rows.

    Raises:
        UserError: the adapter was altered after training.
    """
    rows_of = [(row.ids, row.mask) for row in rows]
    workspace = Path(".cache") / name / digest(code_digest(fit), policy.digest, recipe, rows_of, *key)
    workspace.mkdir(parents=True, exist_ok=True)
    with open(workspace / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workspace / "result.json").exists():
            losses = fit(rows, recipe, base, policy, workspace / "adapter")
            written = adapter_digest(workspace / "adapter")
            left = "".join(f"| left out: {reason} | {times} |\n" for reason, times in left_out.items())
            publish_text(
                workspace / "adapter/README.md", model_card(name, written, recipe, rows, f"{card}{left}", losses)
            )
            publish_json(workspace / "result.json", {"digest": written, "losses": losses})
    result = json.loads((workspace / "result.json").read_text())
    if adapter_digest(workspace / "adapter") != result["digest"]:
        shutil.rmtree(workspace)
        raise UserError(
            f"the adapter in {workspace} was altered after training",
            f"its workspace has been removed: run `dvc repro {name}` to train it again",
        )
    return Taught(result["digest"], workspace / "adapter", len(rows), left_out, result["losses"])


def fit(rows: Sequence[Row], recipe: dict[str, Any], base: Path, policy: Learner, folder: Path) -> list[float]:
    """Train on demonstrations and leave the adapter in `folder`; returns the mean loss over written tokens of each
    update. The learning rate falls linearly to zero."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PrinterCallback, set_seed
    from transformers.utils import logging as hf_logging
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    aside = folder.with_name("unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    config = SFTConfig(
        output_dir=str(aside), seed=recipe["seed"], data_seed=recipe["seed"], use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=recipe["batch"], num_train_epochs=recipe["epochs"],
        learning_rate=recipe["learning_rate"], lr_scheduler_type="linear", adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, optim="adamw_torch", max_length=None, packing=False, bf16=False,
        gradient_checkpointing=False, report_to=[], disable_tqdm=True, logging_strategy="steps", logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    # Of several GPUs one trains, as with GRPO.
    config._n_gpu = min(config.n_gpu, 1)
    lora = LoraConfig(
        r=recipe["rank"], lora_alpha=recipe["alpha"], lora_dropout=0.0, target_modules=recipe["targets"], bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = model_source(base)
    set_seed(recipe["seed"])
    trainer: Any = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.source, revision=model.revision, dtype=torch.float32),
        args=config, train_dataset=Dataset.from_list([example(row) for row in rows]),
        processing_class=policy.tokenizer, peft_config=lora,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.model.save_pretrained(aside)
    settle(aside, base, policy.digest)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return [round(row["loss"], 6) for row in trainer.state.log_history if "loss" in row]


def example(row: Row) -> dict[str, list[int]]:
    """A demonstration as TRL takes it: what the agent did not write has no label."""
    return {
        "input_ids": row.ids,
        "labels": [token if own else -100 for token, own in zip(row.ids, row.mask, strict=True)],
    }


def model_card(
    name: str, written: str, recipe: dict[str, Any], rows: Sequence[Row], origin: str, losses: Sequence[float]
) -> str:
    """A model card in Markdown, from results only."""
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, sft, lora]
---
# {name}

LoRA adapter (rank {recipe["rank"]}, alpha {recipe["alpha"]}) fine-tuned on demonstrations, without rollouts.

| | |
|---|---|
| content hash | {written} |
| demonstrations used | {len(rows)} |
{origin}| tokens read, of which written by the agent | {sum(len(row.ids) for row in rows)}, \
{sum(sum(row.mask) for row in rows)} |
| epochs, sequences an update, learning rate | {recipe["epochs"]}, {recipe["batch"]}, {recipe["learning_rate"]} |
| loss, first and last update | {losses[0]:.4f}, {losses[-1]:.4f} |
| seed | {recipe["seed"]} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""


def publish_taught(one: Taught, name: str) -> None:
    """Copy the adapter to artifacts/<name>/<digest>, and write results/<name>: index, an empty ledger, history."""
    folder = Path("artifacts") / name / one.digest
    shutil.copytree(one.folder, folder, dirs_exist_ok=True)
    row = {
        "digest": one.digest, "path": str(folder), "rollouts": 0, "discarded": 0,
        "demonstrations": one.demonstrations, "left_out": one.left_out,
    }  # fmt: skip
    results = Path("results") / name
    lines = "".join(f"{name},{step},{loss}\n" for step, loss in enumerate(one.losses, start=1))
    publish_text(results / "history.csv", f"adapter,step,loss\n{lines}")
    publish(results / "ledger.jsonl", [])
    publish_json(results / "index.json", {name: row})
