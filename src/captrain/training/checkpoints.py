"""Checkpoints of TRL's trainers that were written whole and of weights that are numbers, and no others. Imported only
where training happens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from captrain.errors import UserError
from captrain.records import publish_text
from captrain.training import collectives

MARK = "history.json"


class Checkpoints(TrainerCallback):
    """Marks a checkpoint as whole by writing the history into it last, and ends a training that diverges before there
    is one of weights that are no numbers.

    Args:
        folder: of the checkpoints.
        history: what is known of the steps so far, as JSON.
    """

    def __init__(self, folder: Path, history: Callable[[], object]) -> None:
        self.folder, self.history = folder, history

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a gradient that is not finite in any of the processes.

        Raises:
            UserError: it is not, in all of them.
        """
        model: nn.Module = kwargs["model"]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        if not all(collectives.together(lambda: all(shard.isfinite().all() for shard in shards))):
            raise UserError(
                f"the gradient of update {state.global_step + 1} in {self.folder} is not finite",
                "train anew with a lower learning rate, or with machine.accelerate.precision=float32, not bfloat16",
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the mark."""
        collectives.together(lambda: None)  # every process has written its part
        if collectives.rank() == 0:
            publish_text(self.folder / f"checkpoint-{state.global_step}" / MARK, json.dumps(self.history()))


def last_checkpoint(folder: Path) -> Path | None:
    """Find the last checkpoint that was written whole, and remove later ones, cut off while they were written."""
    if not folder.exists():
        return None
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        if (path / MARK).exists():
            return path
        shutil.rmtree(path)
    return None
