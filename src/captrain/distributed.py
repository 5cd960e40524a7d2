"""One training in several processes: `accelerate launch`, with DDP, or with FSDP for a base that no single GPU holds.

What is trained is the same: the same groups, tasks and keys, so that with equal weights the rollouts of a step do not
depend on the number of processes. Each process samples the rollouts that it trains on; where a policy starts servers,
the first process samples for all. Budget, ledger and history are those of the whole step, and known to every process.
The adapter is gathered from all and written by the first. Sums over processes are in another order than within one, so
that adapters differ in their last digits, as they do between CPU and GPU.

The processes end when whoever waits for them does, however that comes about; checkpoints remain, and those of other
settings are never gone on from. A `UserError` in a process reaches the caller as if it had been raised there.

    python -m captrain.distributed JOBFILE    one process of a training, as `accelerate launch` starts it
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from captrain.errors import InfrastructureError, UserError
from captrain.machine import Accelerate
from captrain.records import publish_json, publish_text

if TYPE_CHECKING:
    from captrain.adapters import GRPO, Job

KEEPER = Path(__file__).parent / "policies" / "keeper.py"
GRACE = 20.0
"""Seconds that processes which are told to end may take."""
PATIENCE = 24 * 3600
"""Seconds that processes wait for each other: the rollouts of one may take hours. One that dies is noticed at once."""
TAIL = 20
"""Last lines of what the processes said that are shown."""

Value = TypeVar("Value")


def checkpoints(accelerate: Accelerate) -> str:
    """The folder of a training's checkpoints, by the settings that those must agree in which go on from them."""
    if accelerate == Accelerate():
        return "checkpoints"
    rows = "all" if accelerate.rows is None else accelerate.rows
    return f"checkpoints-{accelerate.strategy}-{accelerate.processes}-{accelerate.precision}-{rows}"


def configuration(accelerate: Accelerate) -> dict[str, Any]:
    """What `accelerate launch` is told, as its own configuration file has it.

    Layers are the units of sharding, and frozen weights lie beside trainable ones within them. The first process reads
    the base, and the others get their parts from it. Precision is that in which the base is loaded: no other is mixed
    in.
    """
    sharding = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_use_orig_params": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        # "MULTI_GPU" is also what starts processes without GPUs: each finds out for itself.
        "distributed_type": "FSDP" if accelerate.strategy == "fsdp" else "MULTI_GPU",
        "num_machines": 1,
        "num_processes": accelerate.processes,
        "machine_rank": 0,
        "main_process_port": 0,
        "mixed_precision": "no",
        "use_cpu": False,
        **({"fsdp_config": sharding} if accelerate.strategy == "fsdp" else {}),
    }


def launch(job: "Job", trainer: "GRPO", workspace: Path) -> None:
    """Train in the processes that `job.machine.accelerate` asks for; their result is in the workspace.

    Args:
        job: what to train.
        trainer: the job's, as it was built.
        workspace: of the job; what the processes say goes to `processes.log` in it.

    Raises:
        UserError: groups do not divide among the processes, there are too few GPUs, or a process died.
        Whatever `UserError` or `InfrastructureError` a process raises first.
        RuntimeError: a process raised anything else; its text is the traceback.
    """
    _check(job, trainer)
    config, order = workspace / "accelerate.yaml", workspace / "job.pkl"
    log, failure = workspace / "processes.log", workspace / "failure.pkl"
    publish_text(config, yaml.safe_dump(configuration(job.machine.accelerate), sort_keys=False))
    order.write_bytes(pickle.dumps(job))
    for path in workspace.glob("failure*.pkl"):
        path.unlink()
    status = _run(config, order, log)
    told = log.read_text(errors="replace")
    # Those that are left when one is killed fail for want of it, and are told to end.
    killed = set(re.findall(r"Signal \d+ \((SIG\w+)\) received by PID", told)) - {"SIGTERM"}
    if failure.exists() and not killed:
        raise pickle.loads(failure.read_bytes())
    if status or not (workspace / "result.json").exists():
        lines = "".join(f"\n    {line}" for line in told.splitlines()[-TAIL:])
        how = f"one was killed ({', '.join(killed)})" if killed else f"they ended with status {status}:{lines}"
        raise UserError(
            f"training {job.name}: of its {job.machine.accelerate.processes} processes {how}",
            f"see {log}; run again to go on from the last checkpoint, with smaller machine.accelerate.rows or more "
            "processes if it was memory",
        )


def _check(job: "Job", trainer: "GRPO") -> None:
    import torch

    processes = job.machine.accelerate.processes
    if trainer.groups_per_step % processes:
        raise UserError(
            f"machine.accelerate.processes = {processes} processes cannot share the trainer.groups_per_step = "
            f"{trainer.groups_per_step} groups of a step evenly",
            "choose a number of processes that divides it",
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < processes:
        raise UserError(
            f"machine.accelerate.processes = {processes}, and {torch.cuda.device_count()} GPUs are visible",
            "choose as many processes as GPUs, or fewer",
        )


def _run(config: Path, order: Path, log: Path) -> int:
    """The status that the processes end with."""
    command = [
        *(sys.executable, "-I", str(KEEPER), str(GRACE)),
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)),
        *("-m", "captrain.distributed", str(order)),
    ]
    with log.open("wb") as said:
        # A job that is told of its time limit tells itself: its processes have nothing to do with that signal.
        running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=said, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        )  # fmt: skip
    assert running.stdin is not None
    try:
        return running.wait()
    finally:
        running.stdin.close()
        running.wait()


def size() -> int:
    """Processes of this training."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    from torch import distributed

    return distributed.get_rank() if size() > 1 else 0


def together(function: Callable[[], Value]) -> list[Value]:
    """Call a function in every process, each its own; what it gives in each, in the order of their numbers.

    Raises:
        Whatever `UserError` or `InfrastructureError` it raises in the first process where it does, in all of them.
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
    return [one for one, _ in parts]


def once(function: Callable[[], Value]) -> Value:
    """Call a function in the first process alone; what it gives, in all of them.

    Raises:
        See `together`.
    """
    values: list[Any] = together(lambda: function() if rank() == 0 else None)
    return values[0]


def train(order: Path) -> None:
    """Be one process of a training.

    Args:
        order: the pickled job, in its workspace.
    """
    from torch import distributed

    from captrain.policies import load_policy
    from captrain.spec import build

    job: Job = pickle.loads(order.read_bytes())
    if job.machine.accelerate.strategy == "fsdp":
        _shard_on_cpu()
    policy = load_policy(job.policy, job.base, job.machine)
    targets = [place.target(job.machine) for place in job.places]
    result = build(job.trainer).fit(job, policy, targets, order.parent)
    if rank() == 0:
        publish_json(order.parent / "result.json", result)
    distributed.destroy_process_group()


def _shard_on_cpu() -> None:
    """Let accelerate take FSDP where there is no GPU: torch shards over gloo as well, but accelerate's state passes
    the plugin over."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = make


def main() -> None:
    """Entry point of a process: leave what it cannot mend in the workspace."""
    from captrain import launch

    launch.prepare(os.getppid())
    order = Path(sys.argv[1])
    try:
        train(order)
    except Exception as error:
        known = isinstance(error, UserError | InfrastructureError)
        aside = order.with_name(f"failure-{rank()}.pkl")
        aside.write_bytes(pickle.dumps(error if known else RuntimeError(traceback.format_exc())))
        # Of several the first: the end of one process makes others fail.
        with suppress(FileExistsError):
            os.link(aside, order.with_name("failure.pkl"))
        # At once: nothing that others wait for is left to be said.
        os._exit(2)


if __name__ == "__main__":
    main()
