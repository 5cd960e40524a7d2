"""Collective operations over the processes of one training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from captrain.errors import InfrastructureError, UserError
from captrain.models import save_adapter
from captrain.run import Accelerate

PATIENCE = 24 * 3600
"""Timeout of collective operations in seconds: one process may wait hours for the rollouts of another. A process that
dies is noticed at once."""

Value = TypeVar("Value")


def checkpoints(accelerate: Accelerate) -> str:
    """Name the checkpoint folder by the settings that a resumed training must share."""
    if accelerate == Accelerate():
        return "checkpoints"
    rows = "all" if accelerate.rows is None else accelerate.rows
    return f"checkpoints-{accelerate.strategy}-{accelerate.processes}-{accelerate.precision}-{rows}"


def size() -> int:
    """Return the number of processes in this training."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0 on."""
    from torch import distributed

    return distributed.get_rank() if size() > 1 else 0


def together(function: Callable[[], Value]) -> list[Value]:
    """Call a function in every process; return the values of all, in rank order.

    Raises:
        The first process's `UserError` or `InfrastructureError`, in all processes.
    """
    from torch import distributed

    if size() == 1:
        return [function()]
    value: Any = None
    error: Exception | None = None
    try:
        value = function()
    except (UserError, InfrastructureError) as raised:
        error = raised
    parts: list[Any] = [None] * size()
    distributed.all_gather_object(parts, (value, error))
    for _, raised in parts:
        if raised is not None:
            raise raised
    return [part for part, _ in parts]


def once(function: Callable[[], Value]) -> Value:
    """Call a function in rank 0; return its value in all processes. Raises as `together`."""
    values: list[Any] = together(lambda: function() if rank() == 0 else None)
    return values[0]


def save(model: Any, folder: Path, base: Path, policy: str) -> None:
    """Save the adapter of a PEFT model in plain PEFT format. Every process must call this, because each may hold a part
    of the weights.

    Args:
        model: as it is trained, sharded or not.
        folder: of the adapter; replaced.
        base: see `save_adapter`.
        policy: see `save_adapter`.
    """
    # `full_tensor` gathers the shards of a tensor; it is collective, so all processes go through the same order.
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    once(lambda: save_adapter(model, folder, base, policy, whole))
