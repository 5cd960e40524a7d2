"""Supervised fine-tuning of an adapter on demonstrations in tokens, which costs no rollout.

Demonstrations are rendered token by token as rollouts are: the loss is on the tokens that the agent writes, and on no
other. One LoRA adapter of the trainer's rank and alpha, in plain PEFT format, named by its content. Training is short
and not resumed: a folder is whole, or it is made again. On one CPU thread equal seeds give equal bytes.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from captrain.config import Spec, build
from captrain.execution import code_digest
from captrain.ledger import LedgerEntry
from captrain.models import Chat, adapter_digest, dialogue_tokens, load_module, save_adapter
from captrain.records import JsonObject, Message, digest, publish_text
from captrain.training.jobs import Learner
from captrain.training.recipe import GRPO
from captrain.training.workspace import Workspace, replace_folder

if TYPE_CHECKING:
    from trl.trainer.sft_config import SFTConfig

BATCH = 16
"""Sequences of one update."""
TOO_LONG = "longer than the model reads"
SFT_COLUMNS = ("adapter", "step", "loss")
"""Of history.csv (see `captrain.training.workspace.publish_adapters`)."""


@dataclass(frozen=True)
class Demonstration:
    """A dialogue in tokens: ids, and 1 where the agent wrote."""

    ids: list[int]
    mask: list[int]


class Settings(TypedDict):
    """All that decides a fine-tuning beside its demonstrations and its base; `batch` in sequences of one update."""

    rank: int
    alpha: int
    epochs: int
    learning_rate: float
    batch: int
    seed: int
    targets: list[str]


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned adapter: its content hash and folder, what it was trained on, and the loss of each update."""

    name: str
    digest: str
    folder: Path
    demonstrations: int
    left_out: dict[str, int]
    losses: list[float]
    costs: tuple[LedgerEntry, ...] = ()
    """Rollouts that demonstrations were taken from."""

    @property
    def history(self) -> list[JsonObject]:
        """One row an update: step, from 1 on, and loss."""
        return [{"step": step, "loss": loss} for step, loss in enumerate(self.losses, start=1)]

    def summary(self) -> JsonObject:
        """What the index of its stage says of the training."""
        counts = {"demonstrations": self.demonstrations, "left_out": self.left_out}
        return {"rollouts": sum(entry.rollouts for entry in self.costs), "discarded": 0, **counts}

    def ledger(self, stage: str, method: str) -> None:
        """Nothing of its own: fine-tuning costs no rollout, and what demonstrations have cost is in `costs`."""


def demonstration_of(chat: Chat, messages: Sequence[Message], max_length: int) -> Demonstration | None:
    """A dialogue in tokens; None if it is longer than the `max_length` tokens that the model reads."""
    opening = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    ids, mask = dialogue_tokens(chat, [*messages[:opening]], [*messages[opening:]])
    return Demonstration(ids, mask) if len(ids) <= max_length else None


def fine_tuning_settings(spec: Spec, epochs: int, learning_rate: float) -> Settings:
    """The settings of a baseline that is fine-tuned: rank and alpha are the trainer's, the rest its own."""
    trainer = spec.trainer.settings()
    return {
        "rank": trainer["rank"],
        "alpha": trainer["alpha"],
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch": BATCH,
        "seed": spec.seed,
        "targets": build(spec.trainer, GRPO).targets,
    }


@dataclass(frozen=True)
class FineTuning:
    """One adapter to fine-tune.

    Args:
        name: of the adapter.
        base: folder of the base model.
        settings: as of `fine_tuning_settings`.
        demonstrations: what is trained on.
        left_out: how many further ones could not be used, by reason.
        card: rows of the model card that say where the demonstrations come from.
        precision: of the arithmetic, as `machine.accelerate.precision` says.
        key: what else decides the adapter, such as the code that made the demonstrations.
        stage: its workspaces lie in .cache/<stage>; "": the name.
    """

    name: str
    base: Path
    settings: Settings
    demonstrations: Sequence[Demonstration]
    left_out: dict[str, int]
    card: str
    precision: str
    key: Sequence[str] = ()
    stage: str = ""


def fine_tune(job: FineTuning, policy: Learner) -> FineTuned:
    """Train the adapter, or return it from its workspace when it is there already.

    Args:
        job: what to train.
        policy: its tokenizer is trained with, and its digest names the base.

    Raises:
        UserError: the adapter was altered after training.
    """
    tokens = [(demonstration.ids, demonstration.mask) for demonstration in job.demonstrations]
    identity = digest(code_digest(fine_tune), policy.digest, job.settings, tokens, *job.key)
    workspace = Workspace(Path(".cache") / (job.stage or job.name) / identity, job.name, scratch=("unfinished",))

    def train() -> JsonObject:
        aside = workspace.folder / "unfinished"
        losses = _fit(job, policy, aside)
        content = adapter_digest(aside)
        publish_text(aside / "README.md", _card(job, content, losses))
        replace_folder(aside, workspace.adapter)
        return {"digest": content, "losses": losses}

    result = workspace.result(train)
    return FineTuned(
        job.name, result["digest"], workspace.adapter, len(job.demonstrations), job.left_out, result["losses"]
    )


def _fit(job: FineTuning, policy: Learner, folder: Path) -> list[float]:
    """Train on demonstrations and leave the adapter in `folder`; returns the mean loss over written tokens of each
    update. The learning rate falls linearly to zero."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, set_seed
    from transformers.utils import logging as hf_logging
    from trl.trainer.sft_trainer import SFTTrainer

    from captrain.models import make_exact

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    settings = job.settings
    lora = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=0.0,
        target_modules=settings["targets"],
        bias="none",
        task_type="CAUSAL_LM",
    )
    config = _configuration(settings, folder)
    set_seed(settings["seed"])
    trainer: Any = SFTTrainer(
        model=load_module(job.base, job.precision),
        args=config,
        train_dataset=Dataset.from_list([_example(demonstration) for demonstration in job.demonstrations]),
        processing_class=policy.tokenizer,
        peft_config=lora,
    )
    if job.precision == "float64":
        make_exact(trainer, settings["seed"])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    save_adapter(trainer.model, folder, job.base, policy.digest)
    return [round(row["loss"], 6) for row in trainer.state.log_history if "loss" in row]


def _configuration(settings: Settings, folder: Path) -> "SFTConfig":
    import torch
    from trl.trainer.sft_config import SFTConfig

    config = SFTConfig(
        output_dir=str(folder),
        seed=settings["seed"],
        data_seed=settings["seed"],
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=settings["batch"],
        num_train_epochs=settings["epochs"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="linear",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        max_length=None,
        packing=False,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="no",
    )
    # Of several GPUs one trains, as with GRPO.
    config._n_gpu = min(config.n_gpu, 1)
    return config


def _example(demonstration: Demonstration) -> dict[str, list[int]]:
    """A demonstration as TRL takes it: what the agent did not write has no label."""
    pairs = zip(demonstration.ids, demonstration.mask, strict=True)
    return {"input_ids": demonstration.ids, "labels": [token if flag else -100 for token, flag in pairs]}


def _card(job: FineTuning, content: str, losses: Sequence[float]) -> str:
    """A model card in Markdown, from results only."""
    settings, demonstrations = job.settings, job.demonstrations
    left_out = "".join(f"| left out: {reason} | {count} |\n" for reason, count in job.left_out.items())
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, sft, lora]
---
# {job.name}

LoRA adapter (rank {settings["rank"]}, alpha {settings["alpha"]}) fine-tuned on demonstrations.

| | |
|---|---|
| content hash | {content} |
| demonstrations used | {len(demonstrations)} |
{job.card}{left_out}| tokens read, of which written by the agent | {sum(len(row.ids) for row in demonstrations)}, \
{sum(sum(row.mask) for row in demonstrations)} |
| epochs, sequences an update, learning rate | {settings["epochs"]}, {settings["batch"]}, {settings["learning_rate"]} |
| loss, first and last update | {losses[0]:.4f}, {losses[-1]:.4f} |
| seed | {settings["seed"]} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""
