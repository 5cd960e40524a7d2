"""One training in several processes: `accelerate launch`, with DDP, or with FSDP for a base that no single GPU holds.

In a Slurm job of several nodes (`machine.slurm.nodes`) a step of the job launches them on each.

What is trained is the same, whatever the training is: the demonstrations of an update, or groups, tasks and keys of a
step, so that with equal weights the rollouts of a step do not depend on the number of processes. Each process samples
the rollouts that it trains on; where a policy starts servers, the first process samples for all. Budget, ledger and
history are those of the whole step, and known to every process. The adapter is gathered from all and written by the
first. Sums over processes are in another order than within one: in float64 they are rounded alike
(`captrain.models.barrier`), in other types adapters differ as between CPU and GPU.

The processes end when whoever waits for them does, however that comes about; checkpoints remain, and those of other
settings are never gone on from. A `UserError` in a process reaches the caller as if it had been raised there.
"""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from captrain.agents import stop_servers
from captrain.errors import InfrastructureError, UserError
from captrain.models import computes_on_cpu
from captrain.records import JsonObject, publish_json, publish_text, read_json
from captrain.run import Accelerate, Machine, launch
from captrain.training import collectives

KEEPER = Path(__file__).parents[1] / "agents" / "keeper.py"
GRACE = 20.0
"""Seconds that processes which are told to end may take."""
TAIL = 20
"""Last lines of the processes' log that are shown."""
LAUNCHER = """trap '' USR2; exec "$0" "$1" "$2" --machine_rank "$SLURM_NODEID" "${@:3}\""""
"""Script of a node's launcher, deaf to the signal by which a job is told of its time limit."""
RESULT = "trained.json"
"""File that rank 0 leaves in the workspace at the end."""


def configuration(machine: Machine) -> JsonObject:
    """Write the settings of `accelerate launch`'s configuration file.

    Layers are the units of sharding, and frozen weights lie beside trainable ones within them. The first process reads
    the base, and the others get their parts from it. Precision is that in which the base is loaded: no other is mixed
    in. Of several nodes the first one, where this process is, has the first processes.
    """
    accelerate, nodes = machine.accelerate, machine.nodes
    settings: JsonObject = {
        "compute_environment": "LOCAL_MACHINE",
        # "MULTI_GPU" is also what starts processes without GPUs: each finds out for itself.
        "distributed_type": "MULTI_GPU",
        "num_machines": nodes,
        "num_processes": accelerate.processes,
        "machine_rank": 0,
        "main_process_port": 0,
        "mixed_precision": "no",
        "use_cpu": False,
    }
    if nodes > 1:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        settings |= {"main_process_port": port, "main_process_ip": socket.gethostname(), "same_network": True}
    if accelerate.strategy == "fsdp":
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
        settings |= {"distributed_type": "FSDP", "fsdp_config": sharding}
    return settings


def fit(
    name: str,
    machine: Machine,
    portions: tuple[int, str],
    train: Callable[[Machine, Path], JsonObject],
    workspace: Path,
) -> JsonObject:
    """Train in as many processes as the machine asks for, or in those of all places that are free, as far as a step
    divides among them; returns the result.

    Args:
        name: of the adapter, for messages.
        machine: with the layout over processes and GPUs.
        portions: number of portions in one step, which are divided among the processes, and the word for them in
            messages.
        train: called in each process with the layout and the workspace: trains together with the others from the last
            whole checkpoint or from nothing, leaves the adapter in the workspace, and returns the result. Sent by
            pickle.
        workspace: where; the output of the processes goes to `processes.log` in it.

    Raises:
        UserError: a step does not divide among the processes, there are too few GPUs, or a process died.
        Whatever `UserError` or `InfrastructureError` a process raises first.
        RuntimeError: a process raised anything else; its text is the traceback.
    """
    import torch

    # 1. How many processes, and whether the step and the GPUs are enough for them.
    count, word = portions
    shares = [place * machine.accelerate.processes for place in range(1, launch.places(machine) + 1)]
    number = max((share for share in shares if count % share == 0), default=shares[0])
    machine = machine.model_copy(update={"accelerate": machine.accelerate.model_copy(update={"processes": number})})
    if count % number:
        raise UserError(
            f"machine.accelerate.processes = {number} processes cannot share the {word} evenly, which are {count}",
            "choose a number of processes that divides it",
        )
    gpus = not computes_on_cpu(machine.accelerate.precision)
    if gpus and torch.cuda.device_count() < number // machine.nodes:
        raise UserError(
            f"machine.accelerate.processes = {number} on {machine.nodes} nodes, and {torch.cuda.device_count()} GPUs "
            "are visible on this one",
            "choose as many processes as GPUs, or fewer",
        )

    # 2. What they are told, by files in the workspace, and what they say there.
    config, order, log = workspace / "accelerate.yaml", workspace / "job.pkl", workspace / "processes.log"
    failure = workspace / "failure.pkl"
    publish_text(config, yaml.safe_dump(configuration(machine), sort_keys=False))
    order.write_bytes(pickle.dumps((train, machine)))
    for path in (*workspace.glob("failure*.pkl"), workspace / RESULT):
        path.unlink(missing_ok=True)
    status = _run(config, order, log, machine)
    output = log.read_text(errors="replace")
    # Those that are left when one is killed fail for want of it, and are told to end.
    killed = set(re.findall(r"Signal \d+ \((SIG\w+)\) received by PID", output)) - {"SIGTERM"}
    if failure.exists() and not killed:
        raise pickle.loads(failure.read_bytes())
    if status or not (workspace / RESULT).exists():
        lines = "".join(f"\n    {line}" for line in output.splitlines()[-TAIL:])
        end = f"one was killed ({', '.join(killed)})" if killed else f"they ended with status {status}:{lines}"
        raise UserError(
            f"training {name}: of its {number} processes {end}",
            f"see {log}; run again to go on from the last checkpoint, with smaller machine.accelerate.rows or more "
            "processes if it was memory",
        )
    return read_json(workspace / RESULT, JsonObject, f"remove {workspace}, and run again")


def rows_of_pass(accelerate: Accelerate, share: int) -> int:
    """Return the rows in one forward and backward pass of a process.

    Args:
        accelerate: how the training is shared.
        share: rows that a process has of a step.

    Raises:
        UserError: machine.accelerate.rows does not divide them.
    """
    rows = accelerate.rows or share
    if share % rows:
        raise UserError(
            f"machine.accelerate.rows = {rows} does not divide the {share} rows that a process has of a step",
            "choose a divisor of it",
        )
    return rows


def _run(config: Path, order: Path, log: Path, machine: Machine) -> int:
    """Run the processes and return their exit status. The first process starts its own servers, so ours stop first."""
    stop_servers()
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    if machine.nodes > 1:  # a launcher on each node of this job, which Slurm tells its number among them
        options = ("--overlap", "--kill-on-bad-exit=1", "--unbuffered", "--ntasks-per-node=1", "--relative=0")
        counts = (f"--nodes={machine.nodes}", f"--ntasks={machine.nodes}")
        launcher = ["srun", *options, *counts, "bash", "-c", LAUNCHER, *launcher]
    keeper = [sys.executable, "-I", str(KEEPER), str(GRACE)]
    # FSDP would shard over GPUs that it sees.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if computes_on_cpu(machine.accelerate.precision) else {}
    with log.open("wb") as output:
        # A job that is told of its time limit tells itself: its processes have nothing to do with that signal.
        running = subprocess.Popen(
            [*keeper, *launcher, "-m", "captrain.training.processes", str(order)],
            stdin=subprocess.PIPE,
            stderr=output,
            env=os.environ | hidden,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        )
    assert running.stdin is not None
    try:
        return running.wait()
    finally:
        running.stdin.close()
        running.wait()


# Each of the processes, as `accelerate launch` starts it: python -m captrain.training.processes JOBFILE


def share(order: Path) -> None:
    """Run as one process of a training; leaves the error that it cannot mend in the workspace.

    Args:
        order: what to train and on which layout, pickled, in the workspace.
    """
    from torch import distributed

    try:
        train, machine = pickle.loads(order.read_bytes())
        if computes_on_cpu(machine.accelerate.precision):  # where transformers passes its `ddp_timeout` over
            distributed.init_process_group("gloo", timeout=timedelta(seconds=collectives.PATIENCE))
        if machine.accelerate.strategy == "fsdp":
            _shard_on_cpu()
        result = train(machine, order.parent)
        if collectives.rank() == 0:
            publish_json(order.parent / RESULT, result)
        distributed.destroy_process_group()
    except Exception as error:
        expected = isinstance(error, UserError | InfrastructureError)
        aside = order.with_name(f"failure-{collectives.rank()}.pkl")
        aside.write_bytes(pickle.dumps(error if expected else RuntimeError(traceback.format_exc())))
        # Of several the first: the end of one process makes others fail.
        with suppress(FileExistsError):
            os.link(aside, order.with_name("failure.pkl"))
        # At once: others wait for nothing that is still to come.
        os._exit(2)


def _shard_on_cpu() -> None:
    """Let accelerate take FSDP where there is no GPU: torch shards over gloo as well, but accelerate's state passes
    the plugin over."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    initialise = AcceleratorState.__init__

    def initialise_on_cpu(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        initialise(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = initialise_on_cpu


if __name__ == "__main__":
    launch.become_worker(os.getppid())
    share(Path(sys.argv[1]))
