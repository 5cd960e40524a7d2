"""Supervised fine-tuning of one LoRA adapter on demonstrations, which costs no rollout.

Demonstrations are tokenized like rollouts, and the loss is on the tokens that the agent writes. Several processes and
checkpoints work as for GRPO (`captrain.training.processes`). On one CPU thread, equal seeds give equal bytes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from captrain.models import (
    Chat,
    LoraShape,
    adapter_digest,
    dialogue_tokens,
    load_module,
    lora_config,
)
from captrain.records import Message, digest, publish_text
from captrain.run import Machine, Spec, build, code_digest
from captrain.training import collectives, processes
from captrain.training.jobs import FineTuned, Learner, Result
from captrain.training.recipe import GRPO
from captrain.training.workspace import replace_folder, train_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 16
"""Number of sequences per update."""
CHECKPOINT = 200
"""Number of updates between checkpoints. It does not change the result."""
TOO_LONG = "longer than the model reads"
FORMULA = "Use it with the base it was trained on only: W' = W + (alpha / rank) B A."
SFT_COLUMNS = ("adapter", "step", "loss")
"""Columns of history.csv (see `captrain.training.workspace.publish_adapters`)."""


@dataclass(frozen=True)
class Demonstration:
    """A dialogue in tokens: ids, and 1 where the agent wrote."""

    ids: list[int]
    mask: list[int]

    def labels(self) -> list[int]:
        """Return TRL's labels: -100 for tokens that the agent did not write."""
        return [token if flag else -100 for token, flag in zip(self.ids, self.mask, strict=True)]


class Settings(TypedDict):
    """The settings that decide a fine-tuning, in addition to demonstrations and base. `batch`: sequences per update."""

    rank: int
    alpha: int
    epochs: int
    learning_rate: float
    batch: int
    seed: int
    targets: list[str]
    experts: bool


@dataclass(frozen=True)
class FineTuningResult(Result):
    """Result of a fine-tuning: the mean loss over written tokens of each update."""

    losses: list[float]


@dataclass(frozen=True)
class FineTuning:
    """One adapter to fine-tune.

    Args:
        name: name of the adapter.
        base: folder of the base model.
        settings: see `fine_tuning_settings`.
        demonstrations: to train on.
        left_out: number of demonstrations that could not be used, by reason.
        card: rows of the model card about the source of the demonstrations.
        machine: number of processes, and precision.
        key: further parts of the adapter's identity, such as the code that made the demonstrations.
        stage: workspaces are in .cache/<stage>; "": in .cache/<name>.
    """

    name: str
    base: Path
    settings: Settings
    demonstrations: Sequence[Demonstration]
    left_out: dict[str, int]
    card: str
    machine: Machine
    key: Sequence[str] = ()
    stage: str = ""


def demonstration_of(chat: Chat, messages: Sequence[Message], max_length: int) -> Demonstration | None:
    """Tokenize a dialogue; None if it is longer than `max_length` tokens."""
    opening = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    ids, mask = dialogue_tokens(chat, [*messages[:opening]], [*messages[opening:]])
    return Demonstration(ids, mask) if len(ids) <= max_length else None


def fine_tuning_settings(spec: Spec, epochs: int, learning_rate: float) -> Settings:
    """Return the settings of a fine-tuned row. Rank, alpha and layers are those of the section `trainer`."""
    shape = build(spec.trainer, GRPO).shape
    return {
        "rank": shape.rank,
        "alpha": shape.alpha,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch": BATCH,
        "seed": spec.seed,
        "targets": list(shape.targets),
        "experts": shape.experts,
    }


def fine_tune(job: FineTuning, policy: Learner) -> FineTuned:
    """Train the adapter and cache it in its workspace.

    Args:
        job: what to train.
        policy: gives the tokenizer, and the digest that identifies the base.

    Raises:
        UserError: the cached adapter was altered.
    """
    tokens = [(demonstration.ids, demonstration.mask) for demonstration in job.demonstrations]
    precision = job.machine.accelerate.precision
    identity = digest(code_digest(fine_tune), policy.digest, job.settings, precision, tokens, *job.key)
    folder = Path(".cache") / (job.stage or job.name) / identity
    train = partial(fit, job, policy.tokenizer, policy.digest)

    def trained() -> FineTuningResult:
        if job.machine.accelerate.processes == 1:
            return train(job.machine, folder)
        portions = job.settings["batch"], "demonstrations of an update"
        return processes.fit(job.name, job.machine, portions, train, FineTuningResult, folder)

    result = train_once(folder, job.name, FineTuningResult, trained)
    count = len(job.demonstrations)
    return FineTuned(job.name, result.digest, folder / "adapter", count, job.left_out, result.losses)


def fit(
    job: FineTuning, tokenizer: "PreTrainedTokenizerBase", policy: str, machine: Machine, workspace: Path
) -> FineTuningResult:
    """Fine-tune, together with the other processes of the training. The learning rate falls linearly to zero.

    Args:
        job: what to train.
        tokenizer: tokenizer of the policy.
        policy: digest of the policy.
        machine: gives the layout over processes and GPUs.
        workspace: folder of checkpoints and of the adapter.
    """
    from captrain.training import trainers
    from captrain.training.checkpoints import last_checkpoint

    # 1. Updates, from the last whole checkpoint on.
    trainer = _trainer(job, tokenizer, machine, workspace)
    last = collectives.once(lambda: last_checkpoint(Path(str(trainer.args.output_dir))))
    trainers.train(job.name, trainer, machine, last, lambda: None)
    losses = [round(row["loss"], 6) for row in trainer.state.log_history if "loss" in row]

    # 2. The adapter with its model card, published whole.
    aside = workspace / "unfinished"
    collectives.save(trainer.model, aside, job.base, policy)

    def publish() -> str:
        content = adapter_digest(aside)
        publish_text(aside / "README.md", _card(job, content, losses))
        replace_folder(aside, workspace / "adapter")
        return content

    return FineTuningResult(collectives.once(publish), losses)


def _trainer(job: FineTuning, tokenizer: "PreTrainedTokenizerBase", machine: Machine, workspace: Path) -> Any:
    """Make TRL's trainer over a fresh adapter of the base."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from captrain.models import exact_optimizer, prepare_trainer
    from captrain.training import trainers

    settings, accelerate = job.settings, machine.accelerate
    rows = [{"input_ids": row.ids, "labels": row.labels()} for row in job.demonstrations]
    if accelerate.processes > 1:
        # All processes need equally many rows. accelerate would repeat demonstrations, so add rows without labels.
        blank = {"input_ids": rows[0]["input_ids"][:2], "labels": [-100, -100]}
        rows += [blank] * (-len(rows) % settings["batch"])
    options = trainers.arguments(
        SFTConfig,
        job.name,
        machine,
        workspace,
        settings["seed"],
        settings["batch"],
        num_train_epochs=settings["epochs"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="linear",
        max_length=None,
        packing=False,
        logging_strategy="steps",
        logging_steps=1,
        save_steps=CHECKPOINT,
    )
    base = load_module(job.base, accelerate.precision)
    shape = LoraShape(settings["rank"], settings["alpha"], settings["targets"], settings["experts"])
    trainer: Any = SFTTrainer(
        model=base,
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora_config(base, shape),
        optimizer_cls_and_kwargs=exact_optimizer(options) if accelerate.precision == "float64" else None,
    )
    prepare_trainer(trainer, 1.0, machine, settings["seed"])
    return trainer


def _card(job: FineTuning, content: str, losses: Sequence[float]) -> str:
    """Write a model card in Markdown, from results only."""
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

{FORMULA}
"""
