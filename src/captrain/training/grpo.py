"""One adapter by GRPO: TRL's trainer with a policy as its sampler, from its last checkpoint to the published result.

Imported only where training happens: it needs torch and TRL.
"""

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, set_seed
from transformers.utils import logging as hf_logging
from trl.trainer.grpo_config import GRPOConfig

from captrain.config import takes
from captrain.contract import Target
from captrain.errors import UserError
from captrain.models import CHECKPOINTS, adapter_digest, copy_adapter, load_module, lora_config
from captrain.records import JsonObject, publish_text, read_json
from captrain.training import collectives, processes
from captrain.training.checkpoints import Checkpoints, last_checkpoint
from captrain.training.jobs import Job, Learner
from captrain.training.recipe import GRPO
from captrain.training.sampler import Sampler
from captrain.training.trainer import PolicyTrainer, Synchronised

POINTS = "points"
"""Folder of a workspace with the adapter as it was at the points of its job."""


def make_trainer(
    recipe: GRPO,
    job: Job,
    policy: Learner,
    targets: Sequence[Target],
    folder: Path,
    kind: type[PolicyTrainer] = PolicyTrainer,
) -> PolicyTrainer:
    """Build TRL's trainer for one job. A row of its dataset is a group, by number: what is played for it is decided
    when its step is played.

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
