"""Keeps complete checkpoints of TRL's trainers, with finite weights and digests of all files. Imported only where
training happens.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from captrain.errors import UserError
from captrain.records import Record, folder_digests, publish_bytes, remains, sealed
from captrain.training import collectives
from captrain.training.jobs import StepRecord

MARK = "history.json"
"""File that is written last into a checkpoint. A checkpoint without it is incomplete."""
POINTS = "points"
"""Folder in the workspace with the adapters at the points of a training, each named by the number of rollouts."""


class Mark(Record):
    """Description of a checkpoint.

    Args:
        workspace: name of the workspace that it belongs to.
        files: digests of its files.
        points: digests of the files of earlier points.
        history: the steps so far; None if the trainer has none.
    """

    workspace: str
    files: dict[str, str]
    points: dict[str, str]
    history: list[StepRecord] | None


class Checkpoints(TrainerCallback):
    """Callback that marks complete checkpoints, and ends a training whose gradient is not finite.

    Args:
        folder: of the checkpoints.
        history: returns the steps so far; written into the mark.
    """

    def __init__(self, folder: Path, history: Callable[[], list[StepRecord] | None]) -> None:
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
        """Write the mark after every process has written its part."""
        collectives.together(lambda: None)
        if collectives.rank() == 0:
            path = self.folder / f"checkpoint-{state.global_step}" / MARK
            points = folder_digests(self.folder.parent / POINTS)
            mark = Mark(
                workspace=self.folder.parent.name,
                files=folder_digests(path.parent),
                points=points,
                history=self.history(),
            )
            publish_bytes(path, sealed(path, mark.model_dump_json()))


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete, unaltered checkpoint, and remove the later ones."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        fault = _fault(path)
        if not fault:
            return path
        if (path / MARK).exists():
            print(f"{path} was altered ({fault}): training goes on from the checkpoint before", file=sys.stderr)
        shutil.rmtree(path)
    return None


def read_mark(checkpoint: Path) -> Mark | None:
    """Read the mark of a checkpoint; None if it is missing or altered."""
    return next(iter(remains(checkpoint / MARK, Mark)), None)


def _fault(checkpoint: Path) -> str:
    """Return what differs from the mark of a checkpoint; "" if nothing does."""
    mark, workspace = read_mark(checkpoint), checkpoint.parent.parent
    if mark is None:
        return MARK
    if mark.workspace != workspace.name:
        return f"it is of {mark.workspace}"
    found = folder_digests(checkpoint)
    found.pop(MARK)
    points = folder_digests(workspace / POINTS)
    differing = {name for name in {*mark.files, *found} if mark.files.get(name) != found.get(name)}
    differing |= {f"{POINTS}/{name}" for name, content in mark.points.items() if points.get(name) != content}
    return ", ".join(sorted(differing))
