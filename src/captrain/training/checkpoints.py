"""Whole checkpoints of TRL's trainers, with finite weights. Imported only where training happens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from captrain.errors import UserError
from captrain.records import publish_text
from captrain.training import collectives

MARK = "history.json"
"""File that is written last into a checkpoint: a checkpoint without it is not whole."""


class Checkpoints(TrainerCallback):
    """Marks whole checkpoints, and ends a training whose gradient is not finite.

    Args:
        folder: of the checkpoints.
        history: returns the steps so far, as JSON; written into the mark.
    """

    def __init__(self, folder: Path, history: Callable[[], object]) -> None:
        self.folder, self.history = folder, history

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Check the gradient.

        Raises:
            UserError: it is not finite in some process; raised in all of them.
        """
        model = cast(nn.Module, kwargs["model"])
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        if not all(collectives.together(lambda: all(shard.isfinite().all() for shard in shards))):
            raise UserError(
                f"the gradient of update {state.global_step + 1} in {self.folder} is not finite",
                "train again with a lower learning rate, or with machine.accelerate.precision=float32, not bfloat16",
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the mark, once every process has written its part."""
        collectives.together(lambda: None)
        if collectives.rank() == 0:
            publish_text(self.folder / f"checkpoint-{state.global_step}" / MARK, json.dumps(self.history()))


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last whole checkpoint, and remove later ones, which were cut off."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        if (path / MARK).exists():
            return path
        shutil.rmtree(path)
    return None
