"""TRL's GRPOTrainer with our engine as its sampler. Imported only where training happens: it needs torch and TRL."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
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

from captrain.adapters import GRPO, LINEAR, Job
from captrain.contract import Target
from captrain.errors import UserError
from captrain.policies import Play
from captrain.policies.local import LocalPolicy, merge
from captrain.records import Task


class Trainer(GRPOTrainer):
    """GRPOTrainer whose rollouts come from the engine, token-exact and with the sampler's log-probabilities.

    `history` holds one row a step: step, rollouts, reward, success, informative, discarded, prompt_tokens,
    completion_tokens.
    """

    history: list[dict[str, float]]
    sampled: torch.Tensor | None = None
    signal = True

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.sampled = None
        self.signal = bool(batch["num_items_in_batch"] > 0)
        return without_discarded(batch)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # While a batch is made, TRL asks for the old policy's log-probabilities: the sampler has them exactly.
        if self.sampled is not None:
            return self.sampled, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

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
        path = self.folder / f"checkpoint-{state.global_step}" / "history.json"
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(self.trainer.history))
        aside.replace(path)


def make_trainer(
    recipe: GRPO, job: Job, policy: LocalPolicy, target: Target, tasks: list[Task], folder: Path
) -> Trainer:
    """TRL's trainer for one job.

    Args:
        recipe: hyperparameters.
        job: what to train.
        policy: samples; its model is the frozen base.
        target: where.
        tasks: one per group, in order.
        folder: where checkpoints go.
    """
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    steps = job.rollouts // recipe.step_rollouts
    config = GRPOConfig(
        output_dir=str(folder), seed=job.seed, data_seed=job.seed, use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=recipe.step_rollouts, gradient_accumulation_steps=1, steps_per_generation=1,
        num_generations=recipe.group_size, num_iterations=recipe.epochs, max_steps=steps * recipe.epochs,
        shuffle_dataset=False, learning_rate=recipe.learning_rate, lr_scheduler_type="constant", adam_beta2=0.95,
        weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch", epsilon=recipe.clip, beta=0.0, loss_type="dapo",
        scale_rewards="group", temperature=policy.temperature, max_completion_length=policy.room, bf16=False,
        gradient_checkpointing=False, mask_truncated_completions=False, report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="steps", save_steps=recipe.checkpoint_every * recipe.epochs,
        save_total_limit=2,
    )  # fmt: skip
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=0.0, target_modules=LINEAR, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    marks = Checkpoints(folder)
    set_seed(job.seed)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(job.base, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
        processing_class=policy.tokenizer,
        peft_config=lora,
        callbacks=[marks],
        reward_funcs=[_reward],
        rollout_func=Sampler(recipe, policy, target, {task.id: task for task in tasks}, job),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.history = []
    marks.trainer = trainer
    return trainer


def _reward(completions: list[Any], environment_reward: list[float | None], **_: Any) -> list[float | None]:
    return environment_reward


class Sampler:
    """TRL's `rollout_func`: plays the batch's tasks with the current adapter and scores them."""

    def __init__(self, recipe: GRPO, policy: LocalPolicy, target: Target, tasks: dict[str, Task], job: Job) -> None:
        self.recipe, self.policy, self.target, self.tasks, self.job = recipe, policy, target, tasks, job

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Play one batch: `prompts` are task ids, each `group_size` times in a row."""
        size = self.recipe.group_size
        weights = {
            name: tensor.detach() for name, tensor in get_peft_model_state_dict(trainer.model).items()
        }  # fmt: skip
        decoder = self.policy.decoder_of(merge(self.policy.state, weights, self.recipe.alpha / self.recipe.rank))
        tasks = [self.tasks[name] for name in prompts]
        keys = [f"{self.job.seed}/{task.id}/{index % size}" for index, task in enumerate(tasks)]
        episodes = [self.target.open(task, key) for task, key in zip(tasks, keys, strict=True)]
        plays = [Play(key, episode) for key, episode in zip(keys, episodes, strict=True)]
        for start in range(0, len(plays), self.policy.batch):
            self.policy.play_with(decoder, plays[start : start + self.policy.batch])
        if broken := next((play for play in plays if play.error), None):
            raise UserError(
                f"training {self.job.name}: rollout {broken.key} ended in an infrastructure error ({broken.error})",
                "mend its cause and run again: training goes on from its last checkpoint",
            )
        scores = [self.target.score(task, play.messages) for task, play in zip(tasks, plays, strict=True)]
        for episode in episodes:
            episode.close()
        rewards = [score.reward for score in scores]
        groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        informative = [max(group) - min(group) > 1e-6 for group in groups]
        opening = [play.mask.index(1) for play in plays]
        written = sum(sum(play.mask) for play in plays)
        trainer.history.append({
            "step": len(trainer.history) + 1,
            "rollouts": len(plays) * (len(trainer.history) + 1),
            "reward": round(sum(rewards) / len(rewards), 6),
            "success": round(sum(score.success for score in scores) / len(scores), 6),
            "informative": round(sum(informative) / len(informative), 6),
            "discarded": informative.count(False) * size,
            "prompt_tokens": sum(len(play.mask) for play in plays) - written,
            "completion_tokens": written,
        })  # fmt: skip
        completions = [play.logprobs[start:] for play, start in zip(plays, opening, strict=True)]
        width = max(len(row) for row in completions)
        trainer.sampled = torch.tensor([row + [0.0] * (width - len(row)) for row in completions])
        return {
            "prompt_ids": [play.token_ids[:start] for play, start in zip(plays, opening, strict=True)],
            "completion_ids": [play.token_ids[start:] for play, start in zip(plays, opening, strict=True)],
            "logprobs": completions,
            "env_mask": [
                play.mask[start:] if informative[index // size] else [0] * (len(play.mask) - start)
                for index, (play, start) in enumerate(zip(plays, opening, strict=True))
            ],
            "environment_reward": rewards,
        }
