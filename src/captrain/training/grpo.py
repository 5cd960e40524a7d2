"""TRL's GRPOTrainer with a policy as its sampler. Imported only where training happens: it needs torch and TRL.

Before each batch of rollouts the adapter is saved in plain PEFT format, in a folder named by its content hash, and the
policy acts with it: in this process, or through servers that load it under that name. What the policy says of its
tokens is what is trained on; its log-probabilities are the old policy's.
"""

import math
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captrain.records import JsonObject, publish_text, read_json

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PrinterCallback, set_seed
from transformers.utils import logging as hf_logging
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from captrain.config import takes
from captrain.contract import Target
from captrain.errors import UserError
from captrain.execution import launch
from captrain.models import (
    CHECKPOINTS,
    DENSE,
    adapter_digest,
    copy_adapter,
    load_module,
    lora_config,
    make_exact,
    share_beginnings,
)
from captrain.policies import Play
from captrain.training import collectives, mismatch, processes
from captrain.training.checkpoints import Checkpoints, last_checkpoint
from captrain.training.groups import Groups, advantages
from captrain.training.jobs import Job, Learner
from captrain.training.model_card import grpo_model_card
from captrain.training.recipe import GRPO

POINTS = "points"
"""In a workspace: the adapter as it was at the points of its job."""


class PolicyTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts come from a policy, token-exact and with the sampler's log-probabilities.

    `history` holds one row a step: step, rollouts, reward, success, informative, discarded, prompt_tokens,
    completion_tokens, errors (rollouts that came to nothing and were played again, beyond the others), places (groups
    of each environment) and what the recipe adds at the end of a step; where hints are given also unhinted, the
    rollouts without one, and unhinted_passed. It is all that later steps depend on besides weights and optimizer.
    """

    history: list[JsonObject]
    """Where a server samples, a row also has the columns of `captrain.training.mismatch`."""
    sampled: torch.Tensor | None = None
    advantages: torch.Tensor
    hinted: torch.Tensor
    stripped = False
    """Whether any rollout of the step had a hint, in whatever process."""
    served = False
    """Whether the sampler is a server, whose log-probabilities are not those of this process."""
    model_tokens: torch.Tensor
    """The tokens by which the two are compared: the model's own, where no hint was read."""
    signal = True
    informative = 1.0
    """Share of the step's rows that teach something, in all processes."""
    sources: torch.Tensor
    """The number of each row's environment."""

    model_card = staticmethod(grpo_model_card)

    def prepare(self, job: Job, temperature: float) -> None:
        """Set how a step is computed. TRL computes every row by itself, prompt and all; on a CPU that is most of the
        time."""
        accelerate = job.machine.accelerate
        assert isinstance(self.model, PeftModel)
        model = self.model.get_base_model()
        assert isinstance(model, PreTrainedModel)
        if accelerate.precision == "float64":
            share_beginnings(model, temperature)
            make_exact(self, job.seed)
        elif accelerate.strategy == "none" and model.config.model_type in DENSE and not torch.cuda.is_available():
            share_beginnings(model, temperature)

    def teaches(self, rewards: Sequence[float]) -> bool:
        """Whether a group of these rewards carries a signal."""
        return max(rewards) - min(rewards) > 1e-6

    def _generate_and_score_completions(self, inputs: list[JsonObject]) -> JsonObject:
        batch = super()._generate_and_score_completions(inputs)
        # TRL's own are made in float32, by kernels that round differently on different CPUs.
        batch["advantages"] = self.advantages.to(batch["advantages"].device)
        batch["sources"] = self.sources
        if self.served:
            self.history[-1] |= self._mismatch(batch)
        self.sampled = None
        self.signal = bool(batch["num_items_in_batch"] > 0)
        # The parts of a batch, in time or over processes, must have equally many rows.
        if self.args.gradient_accumulation_steps == collectives.size() == 1:
            return without_discarded(batch)
        if self.loss_type == "grpo" and self.signal:
            # TRL's mean is over all rows: the loss is linear in the advantages, and this makes it one over those that
            # teach something, as it is where the others are left out.
            batch["advantages"] = batch["advantages"] / self.informative
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # TRL corrects the sampler's against these itself (`use_vllm`).
        if self.sampled is None or self.use_vllm:
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

    def _mismatch(self, batch: JsonObject) -> JsonObject:
        """How far the sampler's log-probabilities are from those of the weights that it sampled with, here."""
        assert self.sampled is not None
        scores = batch.get("old_per_token_logps") if self.use_vllm else None
        if scores is None:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            with torch.no_grad():
                scores, _, _ = super()._get_per_token_logps_and_entropies(
                    self.model, ids, attention, batch["completion_ids"].shape[1], self.args.per_device_train_batch_size
                )
        differences = (scores.cpu().double() - self.sampled)[self.model_tokens]
        return mismatch.summary(collectives.together(lambda: mismatch.moments(differences.tolist())))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One update; none when every group of the batch was constant (momentum alone must not move weights)."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.signal:
            for parameter in model.parameters():
                parameter.grad = None
        return loss


def without_discarded(batch: JsonObject) -> JsonObject:
    """The batch without the rows of discarded groups, which cost time and change nothing; at least one row stays."""
    informative = batch["tool_mask"].mul(batch["completion_mask"]).any(1)
    informative[0] |= not informative.any()
    size = len(informative)
    return {
        name: value[informative] if isinstance(value, torch.Tensor) and value.ndim and len(value) == size else value
        for name, value in batch.items()
    }


class Synchronised(VLLMGeneration):
    """In the place of TRL's vLLM, whose weights it would keep up to date."""

    def __init__(self) -> None:
        """Starts nothing."""

    def sync_weights(self) -> None:
        """Nothing: the sampler has saved the adapter."""


def make_trainer(
    recipe: GRPO,
    job: Job,
    policy: Learner,
    targets: Sequence[Target],
    folder: Path,
    kind: type[PolicyTrainer] = PolicyTrainer,
) -> PolicyTrainer:
    """TRL's trainer for one job. A row of its dataset is a group, by number: what is played for it is decided when its
    step is played.

    Args:
        recipe: hyperparameters, and which environment a group is drawn from.
        job: what to train.
        policy: samples; its model is the job's, which is the frozen base.
        targets: the job's environments.
        folder: where checkpoints go, and the adapter that samples.
        kind: of the trainer.

    Raises:
        UserError: the base has no layer of one of the names in `targets`, or no experts, or the adapter to start from
            is another one or of another shape.
        EnvironmentFault: an environment has too few tasks.
    """
    sampler = Sampler(recipe, policy, targets, job, folder / "sampling", folder.parent / POINTS)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    config = _configuration(recipe, job, policy, folder, sampler.steps)
    set_seed(job.seed)
    base = load_module(job.base, job.machine.accelerate.precision)
    lora = lora_config(base, recipe.shape)
    trainer = kind(
        model=base,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": f"group {number}"} for number in range(sampler.steps * recipe.groups_per_step)]
        ),
        processing_class=policy.tokenizer,
        peft_config=lora,
        reward_funcs=[_reward],
        rollout_func=sampler,
    )
    trainer.prepare(job, policy.temperature)
    if job.start is not None:
        model: Any = trainer.model
        copy_adapter(model, job.start)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Checkpoints(folder, lambda: trainer.history))
    trainer.history = []
    trainer.served = takes(job.policy, "machine")
    if recipe.importance_cap is not None:
        # After TRL's constructor, which would start a vLLM of its own; the policy serves each step's adapter itself.
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Synchronised(), -1
    return trainer


def _configuration(recipe: GRPO, job: Job, policy: Learner, folder: Path, steps: int) -> GRPOConfig:
    accelerate = job.machine.accelerate
    share = recipe.step_rollouts // accelerate.processes
    rows = processes.rows_of_pass(accelerate, share)
    config = GRPOConfig(
        output_dir=str(folder),
        seed=job.seed,
        data_seed=job.seed,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=share // rows,
        steps_per_generation=share // rows,
        num_generations=recipe.group_size,
        num_iterations=recipe.epochs,
        max_steps=steps * recipe.epochs,
        shuffle_dataset=False,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        epsilon=recipe.clip,
        epsilon_high=recipe.clip_high,
        beta=0.0,
        loss_type=recipe.loss,
        vllm_importance_sampling_correction=recipe.importance_cap is not None,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=recipe.importance_cap,
        temperature=policy.temperature,
        max_completion_length=policy.max_length,
        bf16=False,
        mask_truncated_completions=False,
        gradient_checkpointing=accelerate.gradient_checkpointing,
        ddp_find_unused_parameters=False,
        ddp_timeout=collectives.PATIENCE,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="steps",
        save_steps=recipe.checkpoint_every * recipe.epochs,
        save_total_limit=2,
    )
    # Of several GPUs one trains; the others are the servers'.
    config._n_gpu = min(config.n_gpu, 1)
    return config


def _reward(completions: object, environment_reward: list[float | None], **_: object) -> list[float | None]:
    return environment_reward


@dataclass(frozen=True)
class TrainingRow:
    """A rollout as it is trained on, by the number of its environment. Its own reward is None beyond the budget, and
    nothing is learnt where its group is not informative."""

    environment: int
    play: Play
    informative: bool
    reward: float | None
    advantage: float
    hinted: bool


class Sampler:
    """TRL's `rollout_func`: plays the batch's groups with the current adapter and scores them."""

    def __init__(
        self, recipe: GRPO, policy: Learner, targets: Sequence[Target], job: Job, folder: Path, points: Path
    ) -> None:
        self.recipe, self.policy, self.job, self.folder, self.points = recipe, policy, job, folder, points
        self.steps = math.ceil(job.rollouts / recipe.step_rollouts)
        self.groups = Groups(recipe, policy, targets, job)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Play one batch: `prompts` name groups by number ("group 17"), each `group_size` times in a row.

        Hints are stripped: the prompts returned are the unhinted ones. Where the budget ends within the batch, the rows
        beyond it are not played: they repeat the first one without its reward and with nothing to learn from.

        Where several processes train, each has its own prompts. What all of them play is known to each, so that the
        history is that of the whole step; what is returned is for a process's own prompts.
        """
        assert isinstance(trainer, PolicyTrainer)
        size, history = self.recipe.group_size, trainer.history
        before = history[-1]["rollouts"] if history else 0
        names = [name for part in collectives.together(lambda: prompts) for name in part]
        groups = [int(name.split()[1]) for name in names[::size]]
        plan = self.groups.plan(groups, history)[: self.job.rollouts - before]
        adapter = self._save_adapter(trainer)
        self._keep(adapter, [step["rollouts"] for step in history])
        plays, errors = self.groups.play(str(adapter), plan, len(prompts))
        rewards = [scored.score.reward for scored in plays]
        by_group = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        informative = [trainer.teaches(group) for group in by_group]
        scores = [scored.score for scored in plays]
        step = {
            "step": len(history) + 1,
            "rollouts": before + len(plays),
            "reward": round(sum(rewards) / len(rewards), 6),
            "success": round(sum(score.success for score in scores) / len(scores), 6),
            "informative": round(sum(informative) / len(informative), 6),
            "discarded": sum(len(group) for group, signal in zip(by_group, informative, strict=True) if not signal),
            "prompt_tokens": sum(scored.play.prompt_tokens for scored in plays),
            "completion_tokens": sum(sum(scored.play.mask) for scored in plays),
            "errors": errors,
            "places": Counter(self.job.environments[rollout.environment].name for rollout in plan[::size]),
            **self.groups.unhinted(plan, scores),
            **({"rerendered": sum(scored.play.rerendered for scored in plays)} if trainer.served else {}),
        }
        history.append(step)
        if collectives.rank() == 0:
            message = f"mean reward {step['reward']:.3f}, pass rate {step['success']:.3f}"
            launch.report_progress(step["step"], self.steps, message)
        gains = [advantage for group in by_group for advantage in advantages(group)]
        rows = [
            TrainingRow(rollout.environment, scored.play, informative[index // size], reward, gain, rollout.hint != "")
            for index, (scored, reward, gain, rollout) in enumerate(zip(plays, rewards, gains, plan, strict=True))
        ]
        rows += (len(names) - len(rows)) * [TrainingRow(0, plays[0].play, False, None, 0.0, False)]
        trainer.stripped = any(row.hinted for row in rows)
        trainer.informative = sum(row.informative for row in rows) / len(rows)
        start = collectives.rank() * len(prompts)
        return self._batch(trainer, rows[start : start + len(prompts)])

    def _batch(self, trainer: PolicyTrainer, rows: Sequence[TrainingRow]) -> dict[str, list[Any]]:
        """Rows as TRL takes them; the trainer gets what it would compute itself."""
        plays = [row.play for row in rows]
        opening = [play.mask.index(1) for play in plays]
        completions = [play.logprobs[start:] for play, start in zip(plays, opening, strict=True)]
        masks = [row.play.mask if row.informative else [0] * len(row.play.mask) for row in rows]
        width = max(len(row) for row in completions)
        sampled = [row + [0.0] * (width - len(row)) for row in completions]
        trainer.sampled = torch.tensor(sampled, dtype=torch.float64)
        trainer.advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
        trainer.hinted = torch.tensor([row.hinted for row in rows])
        trainer.sources = torch.tensor([row.environment for row in rows])
        compared = [
            row.play.mask[start:] if row.reward is not None and not row.hinted else []
            for row, start in zip(rows, opening, strict=True)
        ]
        trainer.model_tokens = torch.tensor([mask + [0] * (width - len(mask)) for mask in compared]).bool()
        return {
            "prompt_ids": [play.token_ids[:start] for play, start in zip(plays, opening, strict=True)],
            "completion_ids": [play.token_ids[start:] for play, start in zip(plays, opening, strict=True)],
            # TRL takes what is not known for what needs no correction: it must not correct for a hint.
            "logprobs": [
                [math.nan] * len(scores) if row.hinted and trainer.use_vllm else scores
                for row, scores in zip(rows, completions, strict=True)
            ],
            "env_mask": [mask[start:] for mask, start in zip(masks, opening, strict=True)],
            "environment_reward": [row.reward for row in rows],
        }

    def _save_adapter(self, trainer: PolicyTrainer) -> Path:
        """The adapter as it is now, in a folder named by its content; the one before is removed."""
        aside = self.folder / "new"
        collectives.once(lambda: shutil.rmtree(self.folder, ignore_errors=True))
        collectives.save(trainer.model, aside, self.job.base, self.policy.digest)
        return collectives.once(lambda: aside.rename(self.folder / adapter_digest(aside)).resolve())

    def _keep(self, adapter: Path, counts: Sequence[int]) -> None:
        """Keep the adapter where a point of the job lies in the step that is over.

        Args:
            adapter: its folder.
            counts: rollouts that were played by the end of each step.
        """
        before, now = [0, 0, *counts][-2:]
        if any(before < mark <= now for mark in self.job.marks):
            collectives.once(lambda: shutil.copytree(adapter, self.points / str(now), dirs_exist_ok=True))


def fit(
    recipe: GRPO,
    job: Job,
    policy: Learner,
    targets: Sequence[Target],
    workspace: Path,
    kind: type[PolicyTrainer] = PolicyTrainer,
) -> JsonObject:
    """Train from the last whole checkpoint in the workspace (or from nothing); leave the adapter in
    `workspace/adapter`, and return the fields of `Trained` but name and folder. Checkpoints stay: they are needed until
    the result is published. Where several processes train, all of them call this. The arguments are those of
    `make_trainer`."""
    if job.rollouts < 1:
        raise UserError(
            f"{job.name}: there are {job.rollouts} rollouts to train with",
            "raise adapters.rollouts: diagnosis and calibration have spent what there was",
        )
    checkpoints = workspace / collectives.checkpoints(job.machine.accelerate)
    trainer: Any = make_trainer(recipe, job, policy, targets, checkpoints, kind)
    last = collectives.once(lambda: last_checkpoint(checkpoints))
    if last is not None:
        remedy = f"remove {last}: training goes on from the one before"
        trainer.history = read_json(last / "history.json", list[JsonObject], remedy)
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    folder = workspace / "adapter"
    collectives.save(trainer.model, folder, job.base, policy.digest)
    steps = trainer.history
    counts = ("discarded", "prompt_tokens", "completion_tokens", "errors")
    total = {key: sum(step[key] for step in steps) for key in counts}
    rows = [{key: value for key, value in step.items() if key not in total} for step in steps]
    points = sorted((workspace / POINTS).glob("*"), key=lambda path: int(path.name))
    result = {"digest": adapter_digest(folder), "rollouts": steps[-1]["rollouts"], **total, "history": rows}
    result[CHECKPOINTS] = {path.name: adapter_digest(path) for path in points}
    if collectives.rank() == 0:
        publish_text(folder / "README.md", kind.model_card(job, recipe, targets, result))
        for path in points:
            shutil.copytree(path, folder / CHECKPOINTS / path.name)
    return result
