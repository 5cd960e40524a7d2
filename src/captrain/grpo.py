"""TRL's GRPOTrainer with a policy as its sampler. Imported only where training happens: it needs torch and TRL.

Before each batch of rollouts the adapter is saved in plain PEFT format, in a folder named by its content hash, and the
policy acts with it: in this process, or through servers that load it under that name. What the policy says of its
tokens is what is trained on; its log-probabilities are the old policy's.
"""

import json
import math
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as hf_logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from captrain import distributed, launch
from captrain.adapters import GRPO, Job, Learner, Played, Step, adapter_digest, settle
from captrain.components import REMEDY, alternatives, takes
from captrain.contract import Target
from captrain.errors import EnvironmentFault, UserError
from captrain.policies import Play, model_of
from captrain.records import Score, Task, digest

AGAIN = 2
"""Further attempts at a rollout that came to nothing; each is counted as an error, and none as a score."""


class Trainer(GRPOTrainer):
    """GRPOTrainer whose rollouts come from a policy, token-exact and with the sampler's log-probabilities.

    `history` holds one row a step: step, rollouts, reward, success, informative, discarded, prompt_tokens,
    completion_tokens, errors (rollouts that came to nothing and were played again, beyond the others), places (groups
    of each place) and what the recipe notes; where hints are given also unhinted, the rollouts without one, and
    unhinted_passed. It is all that later steps depend on besides weights and optimizer.
    """

    history: list[dict[str, Any]]
    sampled: torch.Tensor | None = None
    hinted: torch.Tensor
    stripped = False
    """Whether any rollout of the step had a hint, in whatever process."""
    signal = True

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.sampled = None
        self.signal = bool(batch["num_items_in_batch"] > 0)
        # The parts of a batch, in time or over processes, must have equally many rows.
        whole = self.args.gradient_accumulation_steps == distributed.size() == 1
        return without_discarded(batch) if whole else batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.sampled is None:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        # While a batch is made, TRL asks for the old policy's log-probabilities: the sampler has them exactly, but
        # for the rows that it sampled under another prompt than the one trained on. The weights are still its own.
        old, hinted = self.sampled.to(input_ids.device), self.hinted.to(input_ids.device)
        if self.stripped:
            rows = hinted.clone()
            rows[0] |= not rows.any()  # a forward pass of a model that is shared is everybody's
            stripped, _, _ = super()._get_per_token_logps_and_entropies(
                model, input_ids[rows], attention_mask[rows], *args, **kwargs
            )
            old[hinted] = stripped[hinted[rows]].to(old)
        return old, None, None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One update; none when every group of the batch was constant (momentum alone must not move weights)."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.signal:
            for parameter in model.parameters():
                parameter.grad = None
        return loss


def without_discarded(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch without the rows of discarded groups, which cost time and change nothing; at least one row stays."""
    kept = batch["tool_mask"].mul(batch["completion_mask"]).any(1)
    kept[0] |= not kept.any()
    size = len(kept)
    return {
        name: value[kept] if isinstance(value, torch.Tensor) and value.ndim and len(value) == size else value
        for name, value in batch.items()
    }


class Checkpoints(TrainerCallback):
    """Marks a checkpoint as whole by writing the history into it last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Trainer | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the mark."""
        assert self.trainer is not None
        distributed.together(lambda: None)  # every process has written its part
        if distributed.rank() == 0:
            path = self.folder / f"checkpoint-{state.global_step}" / "history.json"
            aside = path.with_suffix(".tmp")
            aside.write_text(json.dumps(self.trainer.history))
            aside.replace(path)


def make_trainer(recipe: GRPO, job: Job, policy: Learner, targets: Sequence[Target], folder: Path) -> Trainer:
    """TRL's trainer for one job. A row of its dataset is a group, by number: what is played for it is decided when its
    step is played.

    Args:
        recipe: hyperparameters, and which place a group is drawn from.
        job: what to train.
        policy: samples; its model is the job's, which is the frozen base.
        targets: the job's places.
        folder: where checkpoints go, and the adapter that samples.

    Raises:
        UserError: the base has no layer of one of the names in `targets`.
        EnvironmentFault: a place has too few tasks.
    """
    sampler = Sampler(recipe, policy, targets, job, folder / "sampling")
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    accelerate = job.machine.accelerate
    share = recipe.step_rollouts // accelerate.processes
    rows = accelerate.rows or share
    if share % rows:
        raise UserError(
            f"machine.accelerate.rows = {rows} does not divide the {share} rollouts that a process has of a step",
            "choose a divisor of it",
        )
    config = GRPOConfig(
        output_dir=str(folder), seed=job.seed, data_seed=job.seed, use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=rows, gradient_accumulation_steps=share // rows,
        steps_per_generation=share // rows,
        num_generations=recipe.group_size, num_iterations=recipe.epochs, max_steps=sampler.steps * recipe.epochs,
        shuffle_dataset=False, learning_rate=recipe.learning_rate, lr_scheduler_type="constant", adam_beta2=0.95,
        weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch", epsilon=recipe.clip, beta=0.0, loss_type="dapo",
        scale_rewards="group" if recipe.scale is None else "none", temperature=policy.temperature,
        max_completion_length=policy.room, bf16=False, mask_truncated_completions=False,
        gradient_checkpointing=accelerate.gradient_checkpointing, ddp_find_unused_parameters=False,
        ddp_timeout=distributed.PATIENCE,
        report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="steps",
        save_steps=recipe.checkpoint_every * recipe.epochs, save_total_limit=2,
    )  # fmt: skip
    # Of several GPUs one trains; the others are the servers'.
    config._n_gpu = min(config.n_gpu, 1)
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=0.0, target_modules=recipe.targets, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    marks, model = Checkpoints(folder), model_of(job.base)
    set_seed(job.seed)
    precision = getattr(torch, accelerate.precision)
    base = AutoModelForCausalLM.from_pretrained(model.source, revision=model.revision, dtype=precision)
    linear = {name.rpartition(".")[2] for name, part in base.named_modules() if isinstance(part, torch.nn.Linear)}
    if unknown := [name for name in recipe.targets if name.rpartition(".")[2] not in linear]:
        raise UserError(
            f"trainer.targets: the base has no linear layer {unknown[0]}{_fused(base)}",
            f"{REMEDY}; {alternatives(unknown[0], sorted(linear))}",
        )
    trainer = Trainer(
        model=base,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": f"group {number}"} for number in range(sampler.steps * recipe.groups_per_step)]
        ),
        processing_class=policy.tokenizer,
        peft_config=lora,
        callbacks=[marks],
        reward_funcs=[_reward],
        rollout_func=sampler,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.history = []
    marks.trainer = trainer
    return trainer


def save(model: Any, folder: Path, base: Path, policy: str) -> None:
    """Leave the adapter of a PEFT model in a folder, in plain PEFT format. Every process must call this, for each may
    hold a part of the weights.

    Args:
        model: as it is trained, shared or not.
        folder: of the adapter; replaced.
        base: see `settle`.
        policy: see `settle`.
    """
    # Tensors of a shared model give their whole values; full_tensor is collective, so that the order must be one.
    state = {name: one for name, one in model.state_dict().items() if ".lora_" in name}
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}

    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, state_dict=whole)
        settle(folder, base, policy)

    distributed.once(write)


def _fused(base: Any) -> str:
    """What to say of a mixture whose experts are no linear layers."""
    fused = [name.rpartition(".")[2] for name, one in base.named_parameters() if "expert" in name and one.ndim == 3]
    return f" (those of its experts are one tensor, {fused[0]}, and take no low-rank weights)" if fused else ""


def _reward(completions: list[Any], environment_reward: list[float | None], **_: Any) -> list[float | None]:
    return environment_reward


@dataclass(frozen=True)
class Wanted:
    """A rollout to be played: the number of its place, its task, its number in the group, its key and its hint."""

    place: int
    task: Task
    trial: int
    key: str
    hint: str


class Sampler:
    """TRL's `rollout_func`: plays the batch's groups with the current adapter and scores them."""

    def __init__(
        self, recipe: GRPO, policy: Learner, targets: Sequence[Target], job: Job, folder: Path
    ) -> None:  # fmt: skip
        self.recipe, self.policy, self.targets, self.job, self.folder = recipe, policy, targets, job, folder
        self.steps = math.ceil(job.rollouts / recipe.step_rollouts)
        # An even share of each place at once, so that one with too few tasks shows before anything is spent.
        share = math.ceil(math.ceil(job.rollouts / recipe.group_size) / len(targets))
        self.tasks: list[list[Task]] = [[] for _ in targets]
        for place in range(len(targets)):
            self._task(place, min(share, self._most(place)) - 1)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Play one batch: `prompts` name groups by number ("group 17"), each `group_size` times in a row.

        Hints are stripped: the prompts returned are the unhinted ones. Where the budget ends within the batch, the rows
        beyond it are not played: they repeat the first one without its reward and with nothing to learn from.

        Where several processes train, each has its own prompts. What all of them play is known to each, so that the
        history is that of the whole step; what is returned is for a process's own prompts.
        """
        size, history = self.recipe.group_size, trainer.history
        spent = history[-1]["rollouts"] if history else 0
        asked = [name for names in distributed.together(lambda: prompts) for name in names]
        groups = [int(name.split()[1]) for name in asked[::size]]
        wanted = self._wanted(groups, history)[: self.job.rollouts - spent]
        played, errors = self._shared(str(self._saved(trainer)), wanted, len(prompts))
        plays, scores = [one.play for one in played], [one.score for one in played]
        rewards = [self.recipe.reward(self.job, one.place, one.score) for one in played]
        earned = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        informative = [max(group) - min(group) > 1e-6 for group in earned]
        written = sum(sum(play.mask) for play in plays)
        trainer.history.append({
            "step": len(history) + 1,
            "rollouts": spent + len(plays),
            "reward": round(sum(rewards) / len(rewards), 6),
            "success": round(sum(score.success for score in scores) / len(scores), 6),
            "informative": round(sum(informative) / len(informative), 6),
            "discarded": sum(len(group) for group, kept in zip(earned, informative, strict=True) if not kept),
            "prompt_tokens": sum(play.prompt_tokens for play in plays),
            "completion_tokens": written,
            "errors": errors,
            "places": Counter(self.job.places[one.place].name for one in wanted[::size]),
            **self._unhinted(wanted, scores),
            **distributed.once(lambda: self.recipe.noted(self.job, played)),
        })  # fmt: skip
        step = trainer.history[-1]
        said = f"mean reward {step['reward']:.3f}, pass rate {step['success']:.3f}"
        if distributed.rank() == 0:
            launch.progress(step["step"], self.steps, said)
        learnt = [play.mask if informative[at // size] else [0] * len(play.mask) for at, play in enumerate(plays)]
        beyond = len(asked) - len(plays)
        plays += beyond * plays[:1]
        learnt += beyond * [[0] * len(plays[0].mask)]
        hinted = [one.hint != "" for one in wanted] + beyond * [False]
        scale = self.recipe.scale or 1.0
        earnings = [reward / scale for reward in rewards] + beyond * [None]
        trainer.stripped = any(hinted)
        start = distributed.rank() * len(prompts)
        own = slice(start, start + len(prompts))
        plays, learnt = plays[own], learnt[own]
        opening = [play.mask.index(1) for play in plays]
        completions = [play.logprobs[start:] for play, start in zip(plays, opening, strict=True)]
        width = max(len(row) for row in completions)
        trainer.sampled = torch.tensor([row + [0.0] * (width - len(row)) for row in completions])
        trainer.hinted = torch.tensor(hinted[own])
        return {
            "prompt_ids": [play.token_ids[:start] for play, start in zip(plays, opening, strict=True)],
            "completion_ids": [play.token_ids[start:] for play, start in zip(plays, opening, strict=True)],
            "logprobs": completions,
            "env_mask": [mask[start:] for mask, start in zip(learnt, opening, strict=True)],
            "environment_reward": earnings[own],
        }

    def _wanted(self, groups: Sequence[int], history: Sequence[Step]) -> list[Wanted]:
        """The rollouts of a step, in order."""
        used = Counter[str]()
        for step in history:
            used.update(step["places"])
        wanted: list[Wanted] = []
        for group in groups:
            place = self.recipe.place(self.job, group, history)
            name = self.job.places[place].name
            turn, at = divmod(used[name], self._most(place))
            task = self._task(place, at)
            used[name] += 1
            # Environments may call their tasks alike.
            within = f"{name}/{task.id}" if len(self.targets) > 1 else task.id
            for trial in range(turn * self.recipe.group_size, (turn + 1) * self.recipe.group_size):
                key = f"{self.job.seed}/{within}/{trial}"
                wanted.append(Wanted(place, task, trial, key, self._hint(self.targets[place], task, key)))
        return wanted

    def _most(self, place: int) -> int:
        """Training tasks that a place has, after which they are used again; no end where the environment names none."""
        target, skip = self.targets[place], self.job.places[place].skip
        size = target.size("training")
        if size is not None and size <= skip:
            raise UserError(
                f"training {self.job.name}: calibration has spent all {size} training tasks of {target.name}",
                "lower environments.groups, or train in another environment",
            )
        return sys.maxsize if size is None else size - skip

    def _task(self, place: int, at: int) -> Task:
        """A training task of a place, by its number among those that are for training."""
        if at >= len(self.tasks[place]):
            skip = self.job.places[place].skip
            self.tasks[place] = self.targets[place].tasks("training", skip + at + 1)[skip:]
        return self.tasks[place][at]

    def _saved(self, trainer: Any) -> Path:
        """The adapter as it is now, in a folder named by its content; the one before is removed."""
        aside = self.folder / "new"
        distributed.once(lambda: shutil.rmtree(self.folder, ignore_errors=True))
        save(trainer.model, aside, self.job.base, self.policy.digest)
        return distributed.once(lambda: aside.rename(self.folder / adapter_digest(aside)).resolve())

    def _shared(self, adapter: str, wanted: Sequence[Wanted], rows: int) -> tuple[list[Played], int]:
        """`_played`, by all processes together: each plays its own rows, or the first all of them where a policy starts
        servers, which belong to one process."""
        if distributed.size() == 1:
            return self._played(adapter, wanted)
        start = distributed.rank() * rows
        own = slice(start, start + rows)
        if takes(self.job.policy, "machine"):
            own = slice(None) if distributed.rank() == 0 else slice(0)

        def play() -> tuple[list[tuple[Play, Score]], int]:
            played, errors = self._played(adapter, wanted[own]) if wanted[own] else ([], 0)
            for one in played:
                del one.play.episode  # it is over, and of this process alone
            return [(one.play, one.score) for one in played], errors

        parts = distributed.together(play)
        plays = [one for part, _ in parts for one in part]
        played = [
            Played(one.place, self.targets[one.place], one.task, one.trial, play, score)
            for one, (play, score) in zip(wanted, plays, strict=True)
        ]
        return played, sum(errors for _, errors in parts)

    def _played(self, adapter: str, wanted: Sequence[Wanted]) -> tuple[list[Played], int]:
        """Every rollout with its score, in order, and how many attempts at one came to nothing before."""
        done: dict[int, Played] = {}
        left, errors = list(range(len(wanted))), 0
        for attempt in range(AGAIN + 1):
            # A key of its own, because a rollout that was read anew as other tokens would be so again.
            again = f"/again/{attempt}" if attempt else ""
            episodes = {at: self.targets[wanted[at].place].open(wanted[at].task, wanted[at].key) for at in left}
            plays = {at: Play(f"{wanted[at].key}{again}", episodes[at], adapter, wanted[at].hint) for at in left}
            places = {id(play): at for at, play in plays.items()}
            for play in self.policy.play([*plays.values()]):
                at = places[id(play)]
                if play.mask and not (play.error or play.retokenised):
                    one, target = wanted[at], self.targets[wanted[at].place]
                    score = target.score(one.task, play.messages)
                    done[at] = Played(one.place, target, one.task, one.trial, play, score)
                episodes[at].close()
            left = [at for at in left if at not in done]
            if not left:
                break
            errors += len(left)
            if attempt == AGAIN:
                raise self._fruitless(plays[left[0]])
        return [done[at] for at in range(len(wanted))], errors

    def _fruitless(self, play: Play) -> UserError:
        if play.error:
            return UserError(
                f"training {self.job.name}: rollout {play.key} ended in an infrastructure error ({play.error})",
                "mend its cause and run again: training goes on from its last checkpoint",
            )
        if not play.retokenised:
            return UserError(
                f"training {self.job.name}: the model has no room for the prompt of rollout {play.key}",
                "serve it with a longer context (--max-model-len in machine.vllm.arguments)",
            )
        return UserError(
            f"training {self.job.name}: rollout {play.key} is not token-exact and cannot be trained on "
            f"({play.retokenised})",
            "choose a model whose chat template renders earlier turns as the model wrote them, or policy=local",
        )

    def _hinting(self, target: Target) -> bool:
        return self.recipe.hints > 0 and hasattr(target.environment, "hint")

    def _hint(self, target: Target, task: Task, key: str) -> str:
        """The hint that a rollout reads, "" for none: drawn by its key, so that it does not depend on the batch."""
        if not self._hinting(target) or int(digest("hint", key), 16) / 16**16 >= self.recipe.hints:
            return ""
        environment: Any = target.environment
        hint = target._call("hint", task.id, lambda: environment.hint(task.model_dump()))
        if not isinstance(hint, str):
            raise EnvironmentFault(
                f"environment {target.name} ({target.source}) gave {hint!r:.40} as the hint of {task.id}",
                "return text from hint(task)",
            )
        return hint

    def _unhinted(self, wanted: Sequence[Wanted], scores: Sequence[Score]) -> dict[str, int]:
        """How many rollouts of a step had no hint, and how many of these passed; nothing where hints are not given."""
        alone = [score.success for one, score in zip(wanted, scores, strict=True) if not one.hint]
        given = any(self._hinting(target) for target in self.targets)
        return {"unhinted": len(alone), "unhinted_passed": sum(alone)} if given else {}


def model_card(job: Job, trainer: GRPO, targets: Sequence[Target], result: dict[str, Any]) -> str:
    """A model card in Markdown, from results only."""
    first, last = result["history"][0], result["history"][-1]
    # A hinted rollout says little of what the adapter can do by itself.
    hinted = (
        f"| share of rollouts with a hint | {trainer.hints} |\n| passed of those without, first and last step "
        f"| {first['unhinted_passed']} of {first['unhinted']}, {last['unhinted_passed']} of {last['unhinted']} |\n"
        if "unhinted" in last
        else ""
    )
    several = len(targets) > 1
    groups = Counter[str]()
    for step in result["history"]:
        groups.update(step["places"])
    drawn = ", ".join(f"{place.name} {groups[place.name]}" for place in job.places)
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, grpo, lora]
---
# {job.name}

LoRA adapter (rank {trainer.rank}, alpha {trainer.alpha}) trained with GRPO in the \
{"environments" if several else "environment"} {", ".join(f"`{target.name}`" for target in targets)}.

| | |
|---|---|
| content hash | {result["digest"]} |
| environment {"fingerprints" if several else "fingerprint"} | {", ".join(one.fingerprint for one in targets)} |
{f"| groups of each environment | {drawn} |{chr(10)}" if several else ""}\
| rollouts (of which in discarded constant groups) | {result["rollouts"]} ({result["discarded"]}) |
| group size, groups per step, epochs | {trainer.group_size}, {trainer.groups_per_step}, {trainer.epochs} |
| learning rate, clip | {trainer.learning_rate}, {trainer.clip} |
| mean reward, first and last step | {first["reward"]:.3f}, {last["reward"]:.3f} |
| pass rate in its environment, first and last step | {first["success"]:.3f}, {last["success"]:.3f} |
{hinted}| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""
