"""TRL's GRPOTrainer with a policy as its sampler. Imported only where training happens: it needs torch and TRL.

Before each batch of rollouts the adapter is saved in plain PEFT format, in a folder named by its content hash, and the
policy acts with it: in this process, or through servers that load it under that name. What the policy says of its
tokens is what is trained on; its log-probabilities are the old policy's.
"""

import json
import os
import shutil
import warnings
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

from captrain import launch
from captrain.adapters import GRPO, LINEAR, Job, Learner, adapter_digest, settle
from captrain.contract import Target
from captrain.errors import EnvironmentFault, UserError
from captrain.policies import Play, model_of
from captrain.records import Score, Task, digest

AGAIN = 2
"""Further attempts at a rollout that came to nothing; each is counted as an error, and none as a score."""


class Trainer(GRPOTrainer):
    """GRPOTrainer whose rollouts come from a policy, token-exact and with the sampler's log-probabilities.

    `history` holds one row a step: step, rollouts, reward, success, informative, discarded, prompt_tokens,
    completion_tokens, errors (rollouts that came to nothing and were played again, beyond the others); where hints are
    given also unhinted, the rollouts without one, and unhinted_passed.
    """

    history: list[dict[str, float]]
    sampled: torch.Tensor | None = None
    hinted: torch.Tensor
    signal = True

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.sampled = None
        self.signal = bool(batch["num_items_in_batch"] > 0)
        return without_discarded(batch)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.sampled is None:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        # While a batch is made, TRL asks for the old policy's log-probabilities: the sampler has them exactly, but
        # for the rows that it sampled under another prompt than the one trained on. The weights are still its own.
        old = self.sampled
        if self.hinted.any():
            stripped, _, _ = super()._get_per_token_logps_and_entropies(
                model, input_ids[self.hinted], attention_mask[self.hinted], *args, **kwargs
            )
            old[self.hinted] = stripped.to(old)
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
        path = self.folder / f"checkpoint-{state.global_step}" / "history.json"
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(self.trainer.history))
        aside.replace(path)


def make_trainer(recipe: GRPO, job: Job, policy: Learner, target: Target, tasks: list[Task], folder: Path) -> Trainer:
    """TRL's trainer for one job.

    Args:
        recipe: hyperparameters.
        job: what to train.
        policy: samples; its model is the job's, which is the frozen base.
        target: where.
        tasks: one per group, in order.
        folder: where checkpoints go, and the adapter that samples.
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
    # Of several GPUs one trains; the others are the servers'.
    config._n_gpu = min(config.n_gpu, 1)
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=0.0, target_modules=LINEAR, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    marks, model = Checkpoints(folder), model_of(job.base)
    set_seed(job.seed)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model.source, revision=model.revision, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
        processing_class=policy.tokenizer,
        peft_config=lora,
        callbacks=[marks],
        reward_funcs=[_reward],
        rollout_func=Sampler(recipe, policy, target, {task.id: task for task in tasks}, job, folder / "sampling"),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.history = []
    marks.trainer = trainer
    return trainer


def _reward(completions: list[Any], environment_reward: list[float | None], **_: Any) -> list[float | None]:
    return environment_reward


class Sampler:
    """TRL's `rollout_func`: plays the batch's tasks with the current adapter and scores them."""

    def __init__(
        self, recipe: GRPO, policy: Learner, target: Target, tasks: dict[str, Task], job: Job, folder: Path
    ) -> None:  # fmt: skip
        self.recipe, self.policy, self.target, self.tasks, self.job = recipe, policy, target, tasks, job
        self.folder = folder

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Play one batch: `prompts` are task ids, each `group_size` times in a row.

        Hints are stripped: the prompts returned are the unhinted ones.
        """
        size = self.recipe.group_size
        tasks = [self.tasks[name] for name in prompts]
        keys = [f"{self.job.seed}/{task.id}/{index % size}" for index, task in enumerate(tasks)]
        hints = [self._hint(task, key) for task, key in zip(tasks, keys, strict=True)]
        played, errors = self._played(str(self._saved(trainer)), tasks, keys, hints)
        plays, scores = [play for play, _ in played], [score for _, score in played]
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
            "prompt_tokens": sum(play.prompt_tokens for play in plays),
            "completion_tokens": written,
            "errors": errors,
            **self._unhinted(hints, scores),
        })  # fmt: skip
        step, steps = trainer.history[-1], self.job.rollouts // self.recipe.step_rollouts
        launch.progress(step["step"], steps, f"mean reward {step['reward']:.3f}, pass rate {step['success']:.3f}")
        completions = [play.logprobs[start:] for play, start in zip(plays, opening, strict=True)]
        width = max(len(row) for row in completions)
        trainer.sampled = torch.tensor([row + [0.0] * (width - len(row)) for row in completions])
        trainer.hinted = torch.tensor([hint != "" for hint in hints])
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

    def _saved(self, trainer: Any) -> Path:
        """The adapter as it is now, in a folder named by its content; the one before is removed."""
        aside = self.folder / "new"
        shutil.rmtree(self.folder, ignore_errors=True)
        trainer.model.save_pretrained(aside)
        settle(aside, self.job.base, self.policy.digest)
        return aside.rename(self.folder / adapter_digest(aside)).resolve()

    def _played(
        self, adapter: str, tasks: list[Task], keys: list[str], hints: list[str]
    ) -> tuple[list[tuple[Play, Score]], int]:  # fmt: skip
        """Every rollout with its score, in order, and how many attempts at one came to nothing before."""
        done: dict[int, tuple[Play, Score]] = {}
        left, errors = list(range(len(tasks))), 0
        for attempt in range(AGAIN + 1):
            # A key of its own, because a rollout that was read anew as other tokens would be so again.
            again = f"/again/{attempt}" if attempt else ""
            episodes = {at: self.target.open(tasks[at], keys[at]) for at in left}
            plays = {at: Play(f"{keys[at]}{again}", episodes[at], adapter, hints[at]) for at in left}
            place = {id(play): at for at, play in plays.items()}
            for play in self.policy.play([*plays.values()]):
                at = place[id(play)]
                if play.mask and not (play.error or play.retokenised):
                    done[at] = play, self.target.score(tasks[at], play.messages)
                episodes[at].close()
            left = [at for at in left if at not in done]
            if not left:
                break
            errors += len(left)
            if attempt == AGAIN:
                raise self._fruitless(plays[left[0]])
        return [done[at] for at in range(len(tasks))], errors

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

    @property
    def _hinting(self) -> bool:
        return self.recipe.hints > 0 and hasattr(self.target.environment, "hint")

    def _hint(self, task: Task, key: str) -> str:
        """The hint that a rollout reads, "" for none: drawn by its key, so that it does not depend on the batch."""
        if not self._hinting or int(digest("hint", key), 16) / 16**16 >= self.recipe.hints:
            return ""
        environment: Any = self.target.environment
        hint = self.target._call("hint", task.id, lambda: environment.hint(task.model_dump()))
        if not isinstance(hint, str):
            raise EnvironmentFault(
                f"environment {self.target.name} ({self.target.source}) gave {hint!r:.40} as the hint of {task.id}",
                "return text from hint(task)",
            )
        return hint

    def _unhinted(self, hints: list[str], scores: list[Score]) -> dict[str, int]:
        """How many rollouts of a step had no hint, and how many of these passed; nothing where hints are not given."""
        alone = [score.success for hint, score in zip(hints, scores, strict=True) if not hint]
        return {"unhinted": len(alone), "unhinted_passed": sum(alone)} if self._hinting else {}
