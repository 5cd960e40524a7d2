"""Shared by the trainers of GRPO and of fine-tuning: TRL's arguments, and training from the last checkpoint."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from captrain.models import computes_on_cpu
from captrain.records import ProgressBar
from captrain.run import Machine
from captrain.training import collectives, processes, trackers
from captrain.training.checkpoints import Checkpoints
from captrain.training.jobs import StepRecord

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def arguments(
    kind: type[Arguments], name: str, machine: Machine, workspace: Path, seed: int, rows: int, **settings: Any
) -> Arguments:
    """Make a trainer's arguments, and seed everything.

    Args:
        kind: TRL's class of the arguments.
        name: of the adapter.
        machine: with the layout over processes and GPUs.
        workspace: named by the digest of what decides the adapter.
        seed: run seed.
        rows: rollouts or demonstrations per update, over all processes.
        **settings: further arguments.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accelerate = machine.accelerate
    share = rows // accelerate.processes
    part = processes.rows_of_pass(accelerate, share)
    options = kind(
        output_dir=str(workspace / collectives.checkpoints(accelerate)),
        run_name=f"{name}-{workspace.name[:8]}",
        seed=seed,
        data_seed=seed,
        use_cpu=computes_on_cpu(accelerate.precision),
        per_device_train_batch_size=part,
        gradient_accumulation_steps=share // part,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=accelerate.gradient_checkpointing,
        ddp_find_unused_parameters=False,
        ddp_timeout=collectives.PATIENCE,
        report_to=[],  # see `captrain.training.trackers`
        project=os.environ.get("TRACKIO_PROJECT", trackers.PROJECT),
        disable_tqdm=True,
        save_strategy="steps",
        save_total_limit=2,
        **settings,
    )
    # Train on one of the visible GPUs; the others belong to servers.
    options._n_gpu = min(options.n_gpu, 1)
    if accelerate.strategy == "fsdp" and options.use_cpu:
        # accelerate 1.15 reads the FSDP plugin only for processes with GPUs, but torch can also shard over gloo.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    set_seed(seed)
    return options


class Progress(TrainerCallback):
    """Shows the updates of a training, with the reward of the last step if it has rewards.

    Args:
        name: of the adapter.
        history: returns the steps so far; None if the trainer has none.
    """

    def __init__(self, name: str, history: Callable[[], list[StepRecord] | None]) -> None:
        self.name, self.history = name, history

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin at the update that the training resumes from."""
        # Standard error of several processes goes to a file; standard output goes to the job's log.
        self.bar = ProgressBar(
            what=self.name, total=state.max_steps, initial=state.global_step, unit="update", stream=sys.stdout
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Count an update."""
        if steps := self.history():
            remark = f"mean reward {steps[-1].reward:.3f}, pass rate {steps[-1].success:.3f}"
            self.bar.set_postfix_str(remark, refresh=False)
        self.bar.update()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Remove the bar."""
        self.bar.close()


def train(
    name: str, trainer: Trainer, machine: Machine, last: Path | None, history: Callable[[], list[StepRecord] | None]
) -> None:
    """Train to the end.

    Args:
        name: of the adapter.
        trainer: not yet trained.
        machine: names the trackers.
        last: the checkpoint to resume from; None: train from the start.
        history: returns the steps so far, for the checkpoints.
    """
    trainer.remove_callback(PrinterCallback)
    if collectives.rank() == 0:
        trainer.add_callback(Progress(name, history))
    trainer.add_callback(Checkpoints(Path(str(trainer.args.output_dir)), history))
    if machine.report_to and collectives.rank() == 0:
        trackers.attach(trainer, [*machine.report_to])
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
