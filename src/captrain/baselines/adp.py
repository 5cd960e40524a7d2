"""What TRACE is compared with: supervised fine-tuning on generic agent trajectories, which costs no rollout.

Trajectories are read in the schemas of the Agent Data Protocol (`captrain.trajectories`), told as tool-native messages,
and rendered token by token as rollouts are: the loss is on the tokens that the agent writes, and on no other. The first
`demonstrations` of the file that can be told and fit into the model are used; what is left out is counted by reason in
the model card. One LoRA adapter of the trainer's rank and alpha, in plain PEFT format, named by its content.

Without a file, demonstrations of our own are written in that schema first and then read like any other. They are
generic: requests of every kind that the base's own corpus has, in that corpus's shares and not the target's, none of
the benchmark's tasks, by a demonstrator that takes each of the base's shortcuts half as often (`CARE`), whatever the
diagnosis found. So they are neither an expert's nor the target's. How far such data help is decided by that factor
alone: of what the protocol's real data do for a real model, the embedded row says nothing.

Training is short and not resumed: a folder is whole, or it is made again. On one CPU thread equal seeds give equal
bytes.
"""

import fcntl
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captrain.adapters import Learner, adapter_digest, settle
from captrain.base.demonstrations import KINDS, SHORTCUTS, take_shortcuts
from captrain.base.train import tokens_of
from captrain.benchmarks import load_benchmark
from captrain.benchmarks import servicedesk as desk
from captrain.chat import Chat
from captrain.errors import UserError
from captrain.policies import load_policy, model_of
from captrain.records import code_digest, digest, file_digest, publish, publish_json, publish_text
from captrain.spec import Spec, build
from captrain.trajectories import Inexpressible, atif, messages_of, read, tools_of

WORKSPACES = Path(".cache/adp")
CARE = 0.5
"""Factor on the probability of each shortcut in demonstrations of our own."""
ELIGIBLE = 0.3
"""Share of cancellations and returns in them that the desk's policy allows, as in the base's corpus."""
BATCH = 16
"""Sequences of one update."""
CODE = ("baselines.adp", "trajectories", "adapters", "chat", "base.train", "base.demonstrations",
        "benchmarks.servicedesk")  # fmt: skip
LONG = "longer than the model reads"


@dataclass(frozen=True)
class Lesson:
    """What is to be trained: the specification, and the folder of the base model."""

    spec: Spec
    base: Path
    name = "adp"

    def identity(self) -> tuple[Any, ...]:
        """What decides the adapter."""
        spec, asked = self.spec, self.spec.baselines.adp
        source = Path(asked.source) if asked.source else None
        return spec.seed, spec.benchmark, spec.policy, spec.trainer, asked, self.base, source


@dataclass(frozen=True)
class Row:
    """A demonstration in tokens: ids, and 1 where the agent wrote."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True)
class Reading:
    """What was taken from a file: demonstrations, how many trajectories were read, and why others were left out."""

    rows: list[Row]
    read: int
    left_out: dict[str, int]


@dataclass(frozen=True)
class Taught:
    """A trained adapter: its content hash and folder, what it was trained on, and the loss of each update."""

    digest: str
    folder: Path
    demonstrations: int
    left_out: dict[str, int]
    losses: list[float]


def write_generic(path: Path, count: int, seed: int) -> None:
    """Write generic demonstrations of the service desk, one trajectory in ATIF a line."""
    rng = random.Random(f"generic-{seed}")
    lines = []
    for at in range(count):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        data = desk.make_kind(rng, kind, ELIGIBLE)
        taken = {shortcut for shortcut, p in SHORTCUTS.items() if rng.random() < p * CARE}
        episode = desk.DeskEpisode(data)
        messages = list(episode.messages)
        for action in take_shortcuts(data, taken, rng):
            replies, _ = episode.step(action)
            messages += [action, *replies]
        lines.append(json.dumps(atif(messages, name=f"generic-{seed}-{at}", agent="demonstrator", extra={})) + "\n")
    publish_text(path, "".join(lines))


def demonstrations(path: Path, count: int, policy: Learner, tools: Sequence[dict[str, Any]]) -> Reading:
    """The first `count` demonstrations of a file that can be told and fit into the model.

    Args:
        path: JSONL, in any generation of the schema.
        count: at most so many.
        policy: its tokenizer, and how much it reads.
        tools: schemas of the target.

    Raises:
        UserError: the file is missing, has a line that is no trajectory, or none that can be used.
    """
    chats: dict[str, Chat] = {}
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    seen = 0
    for trajectory in read(path):
        seen += 1
        try:
            messages = messages_of(trajectory, tools)
        except Inexpressible as reason:
            left_out[str(reason)] += 1
            continue
        own = tools_of(trajectory, messages, tools)
        key = digest(own)
        if key not in chats:
            chats[key] = Chat(policy.tokenizer, own)
        opening = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
        ids, mask = tokens_of(chats[key], messages[:opening], messages[opening:])
        if len(ids) > policy.room:
            left_out[LONG] += 1
            continue
        rows.append(Row(ids, mask))
        if len(rows) == count:
            break
    if not rows:
        why = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "it is empty"
        raise UserError(
            f"none of the {seen} trajectories in {path} can be trained on ({why})",
            "set baselines.adp.source to trajectories of text and tool calls",
        )
    return Reading(rows, seen, dict(sorted(left_out.items())))


def teach(lesson: Lesson) -> Taught:
    """Train the adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the base cannot be trained, or the trajectories cannot be used.
    """
    spec, base = lesson.spec, lesson.base
    policy: Any = load_policy(spec.policy, base, spec.machine)
    if not isinstance(policy, Learner):
        raise UserError(
            f"adp: an adapter is trained for a model whose weights are at hand, and policy is {spec.policy.target}",
            "choose policy=local or policy=vllm, or set baselines.adp.run to false",
        )
    asked = spec.baselines.adp
    source = Path(asked.source) if asked.source else WORKSPACES / f"generic-{spec.seed}-{asked.demonstrations}.jsonl"
    if not asked.source:
        write_generic(source, asked.demonstrations, spec.seed)
    found = demonstrations(source, asked.demonstrations, policy, load_benchmark(spec.benchmark, spec.machine).tools)
    recipe = {
        "rank": spec.trainer.settings()["rank"], "alpha": spec.trainer.settings()["alpha"], "epochs": asked.epochs,
        "learning_rate": asked.learning_rate, "batch": BATCH, "seed": spec.seed,
        "targets": build(spec.trainer).targets,
    }  # fmt: skip
    fingerprint = digest(
        code_digest(*CODE), policy.digest, recipe, file_digest(source), [(row.ids, row.mask) for row in found.rows]
    )
    workspace = WORKSPACES / fingerprint
    workspace.mkdir(parents=True, exist_ok=True)
    with open(workspace / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workspace / "result.json").exists():
            losses = fit(found.rows, recipe, base, policy, workspace / "adapter")
            written = adapter_digest(workspace / "adapter")
            card = model_card(written, recipe, source, found, losses)
            publish_text(workspace / "adapter/README.md", card)
            publish_json(workspace / "result.json", {"digest": written, "losses": losses})
    result = json.loads((workspace / "result.json").read_text())
    if adapter_digest(workspace / "adapter") != result["digest"]:
        shutil.rmtree(workspace)
        raise UserError(
            f"the adapter in {workspace} was altered after training",
            "its workspace has been removed: run `dvc repro adp` to train it again",
        )
    return Taught(result["digest"], workspace / "adapter", len(found.rows), found.left_out, result["losses"])


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
    model = model_of(base)
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


def model_card(name: str, recipe: dict[str, Any], source: Path, found: Reading, losses: Sequence[float]) -> str:
    """A model card in Markdown, from results only."""
    left = "".join(f"| left out: {reason} | {times} |\n" for reason, times in found.left_out.items())
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, sft, lora]
---
# adp

LoRA adapter (rank {recipe["rank"]}, alpha {recipe["alpha"]}) fine-tuned on agent trajectories, without rollouts.

| | |
|---|---|
| content hash | {name} |
| trajectories from | {source.name}, SHA-256 {file_digest(source)} |
| trajectories read | {found.read} |
| demonstrations used | {len(found.rows)} |
{left}| tokens read, of which written by the agent | {sum(len(row.ids) for row in found.rows)}, \
{sum(sum(row.mask) for row in found.rows)} |
| epochs, sequences an update, learning rate | {recipe["epochs"]}, {recipe["batch"]}, {recipe["learning_rate"]} |
| loss, first and last update | {losses[0]:.4f}, {losses[-1]:.4f} |
| seed | {recipe["seed"]} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""


def publish_adp(taught: Taught) -> None:
    """Copy the adapter to artifacts/adp/<digest>, and write results/adp: index, an empty ledger, history."""
    folder = Path("artifacts/adp") / taught.digest
    shutil.copytree(taught.folder, folder, dirs_exist_ok=True)
    row = {
        "digest": taught.digest, "path": str(folder), "rollouts": 0, "discarded": 0,
        "demonstrations": taught.demonstrations, "left_out": taught.left_out,
    }  # fmt: skip
    results = Path("results/adp")
    lines = "".join(f"adp,{step},{loss}\n" for step, loss in enumerate(taught.losses, start=1))
    publish_text(results / "history.csv", f"adapter,step,loss\n{lines}")
    publish(results / "ledger.jsonl", [])
    publish_json(results / "index.json", {"adp": row})
