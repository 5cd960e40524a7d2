"""Digests after each optimizer step: weights and moments in the type in which they are trained.

Saved files are rounded to float32, which hides differences in the last bits of float64 for hundreds of steps.

    python steps.py WORDS [...]  runs `python WORDS [...]` and writes the digests
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from support.warm import become
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = Path(".cache/steps.txt")
"""One line per step, in the order in which the stages ran; below the project's folder."""


def record() -> None:
    """Write a digest after every optimizer step from now on."""
    register_optimizer_step_post_hook(_write)


def _write(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    whole, moved = hashlib.sha256(), 0
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        averages = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        moved += sum(int(average.count_nonzero()) for average in averages)
        for tensor in (parameter.detach(), *averages):
            whole.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    STEPS.parent.mkdir(exist_ok=True)
    with STEPS.open("a", encoding="utf-8") as file:
        file.write(f"{type(optimizer).__name__} {whole.hexdigest()} {moved}\n")


if __name__ == "__main__":
    record()
    become(sys.argv[1:])
