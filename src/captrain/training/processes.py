"""One training in several processes: `accelerate launch`, with DDP, or with FSDP for a base that no single GPU holds.

In a Slurm job of several nodes (`machine.slurm.nodes`) a step of the job launches them on each.

What is trained is the same, whatever the training is (`SharedTraining`): the demonstrations of an update, or groups,
tasks and keys of a step, so that with equal weights the rollouts of a step do not depend on the number of processes.
Each process samples the rollouts that it trains on; where a policy starts servers, the first process samples for all.
Budget, ledger and history are those of the whole step, and known to every process. The adapter is gathered from all and
written by the first. Sums over processes are in another order than within one: in float64 they are rounded alike
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
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import yaml

from captrain.config import Accelerate, Machine
from captrain.errors import InfrastructureError, UserError
from captrain.execution import LENDER, launch, lender_address
from captrain.records import JsonObject, publish_json, publish_text, read_json
from captrain.training import collectives

KEEPER = Path(__file__).parents[1] / "policies" / "keeper.py"
GRACE = 20.0
"""Seconds that processes which are told to end may take."""
TAIL = 20
"""Last lines of the processes' log that are shown."""
ORDER = "job.pkl"
"""Pickled job that the processes are to train."""
SCRATCH = ("checkpoints*", "points", "trained.json")
"""Patterns of files that a workspace need not keep once its result is published."""
LAUNCHER = """trap '' USR2; exec "$0" "$1" "$2" --machine_rank "$SLURM_NODEID" "${@:3}\""""
"""Script of a node's launcher, deaf to the signal by which a job is told of its time limit."""
RESULT = "trained.json"
"""File that rank 0 leaves in the workspace at the end."""


class SharedTraining(Protocol):
    """A training that several processes can share; it is sent to them by pickle."""

    @property
    def name(self) -> str:
        """Name of the adapter, for messages."""
        ...

    @property
    def machine(self) -> Machine:
        """Machine with the layout over processes and GPUs."""
        ...

    def on(self, machine: Machine) -> "SharedTraining":
        """Return the same training with another layout."""
        ...

    def portions(self) -> tuple[int, str]:
        """Number of portions in one step, which are divided among the processes, and the word for them in messages."""
        ...

    def fit(self, workspace: Path) -> JsonObject:
        """Train in this process, with the others if there are any, from the last whole checkpoint in the workspace or
        from nothing; leave the adapter in it, and return the result."""
        ...


def configuration(machine: Machine) -> JsonObject:
    """Write the settings of `accelerate launch`'s configuration file.

    Layers are the units of sharding, and frozen weights lie beside trainable ones within them. The first process reads
    the base, and the others get their parts from it. Precision is that in which the base is loaded: no other is mixed
    in. Of several nodes the first one, where this process is, has the first processes.
    """
    accelerate, nodes = machine.accelerate, machine.nodes
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
        "num_machines": nodes,
        "num_processes": accelerate.processes,
        "machine_rank": 0,
        "main_process_port": 0 if nodes == 1 else _free_port(),
        **({"main_process_ip": socket.gethostname(), "same_network": True} if nodes > 1 else {}),
        "mixed_precision": "no",
        "use_cpu": False,
        **({"fsdp_config": sharding} if accelerate.strategy == "fsdp" else {}),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def fit(training: SharedTraining, workspace: Path) -> JsonObject:
    """Train in this process, or in as many as the training asks for; returns the result.

    Args:
        training: what to train.
        workspace: where; the output of several processes goes to `processes.log` in it.

    Raises:
        UserError: a step does not divide among the processes, there are too few GPUs, or a process died.
        Whatever `UserError` or `InfrastructureError` a process raises first.
        RuntimeError: a process raised anything else; its text is the traceback.
    """
    if training.machine.accelerate.processes == 1:
        return training.fit(workspace)
    training = _over_places(training)
    _check(training)
    config, order = workspace / "accelerate.yaml", workspace / ORDER
    log, failure = workspace / "processes.log", workspace / "failure.pkl"
    publish_text(config, yaml.safe_dump(configuration(training.machine), sort_keys=False))
    order.write_bytes(pickle.dumps(training))
    for path in (*workspace.glob("failure*.pkl"), workspace / RESULT):
        path.unlink(missing_ok=True)
    status = _run(config, order, log, training.machine)
    output = log.read_text(errors="replace")
    # Those that are left when one is killed fail for want of it, and are told to end.
    killed = set(re.findall(r"Signal \d+ \((SIG\w+)\) received by PID", output)) - {"SIGTERM"}
    if failure.exists() and not killed:
        raise pickle.loads(failure.read_bytes())
    if status or not (workspace / RESULT).exists():
        lines = "".join(f"\n    {line}" for line in output.splitlines()[-TAIL:])
        end = f"one was killed ({', '.join(killed)})" if killed else f"they ended with status {status}:{lines}"
        raise UserError(
            f"training {training.name}: of its {training.machine.accelerate.processes} processes {end}",
            f"see {log}; run again to go on from the last checkpoint, with smaller machine.accelerate.rows or more "
            "processes if it was memory",
        )
    return read_json(workspace / RESULT, JsonObject, f"remove {workspace}, and run again")


def _over_places(training: SharedTraining) -> SharedTraining:
    """Give a training the processes of all places that it has, as far as its step divides among them."""
    machine, [count, _] = training.machine, training.portions()
    shares = [place * machine.accelerate.processes for place in range(1, launch.places(machine) + 1)]
    most = max((processes for processes in shares if count % processes == 0), default=shares[0])
    accelerate = machine.accelerate.model_copy(update={"processes": most})
    return training.on(machine.model_copy(update={"accelerate": accelerate}))


def _check(training: SharedTraining) -> None:
    import torch

    processes = training.machine.accelerate.processes
    count, portions = training.portions()
    if count % processes:
        raise UserError(
            f"machine.accelerate.processes = {processes} processes cannot share the {portions} evenly, which are "
            f"{count}",
            "choose a number of processes that divides it",
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < processes // training.machine.nodes:
        raise UserError(
            f"machine.accelerate.processes = {processes} on {training.machine.nodes} nodes, and "
            f"{torch.cuda.device_count()} GPUs are visible on this one",
            "choose as many processes as GPUs, or fewer",
        )


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
    """Run the processes and return the status that they end with. Servers are this process's, or its lender's."""
    command = [
        *(sys.executable, "-I", str(KEEPER), str(GRACE), *_on_each_node(machine)),
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)),
        *("-m", "captrain.training.processes", str(order)),
    ]
    with log.open("wb") as output:
        # A job that is told of its time limit tells itself: its processes have nothing to do with that signal.
        running = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=output,
            env=os.environ | ({LENDER: lender_address()} if machine.vllm.python else {}),
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        )
    assert running.stdin is not None
    try:
        return running.wait()
    finally:
        running.stdin.close()
        running.wait()


def _on_each_node(machine: Machine) -> list[str]:
    """Make what starts a launcher on each node of this job, which it tells its number among them; nothing on one."""
    if machine.nodes == 1:
        return []
    nodes = str(machine.nodes)
    options = ("--overlap", "--kill-on-bad-exit=1", "--unbuffered", "--ntasks-per-node=1", "--relative=0")
    return ["srun", *options, f"--nodes={nodes}", f"--ntasks={nodes}", "bash", "-c", LAUNCHER]


# Each of the processes, as `accelerate launch` starts it: python -m captrain.training.processes JOBFILE


def share(order: Path) -> None:
    """Run as one process of a training.

    Args:
        order: the pickled training, in its workspace.
    """
    from torch import distributed

    training: SharedTraining = pickle.loads(order.read_bytes())
    if training.machine.accelerate.strategy == "fsdp":
        _shard_on_cpu()
    result = training.fit(order.parent)
    if collectives.rank() == 0:
        publish_json(order.parent / RESULT, result)
    distributed.destroy_process_group()


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


def main() -> None:
    """Run a process, and leave the error that it cannot mend in the workspace."""
    launch.become_worker(os.getppid())
    order = Path(sys.argv[1])
    try:
        share(order)
    except Exception as error:
        expected = isinstance(error, UserError | InfrastructureError)
        aside = order.with_name(f"failure-{collectives.rank()}.pkl")
        aside.write_bytes(pickle.dumps(error if expected else RuntimeError(traceback.format_exc())))
        # Of several the first: the end of one process makes others fail.
        with suppress(FileExistsError):
            os.link(aside, order.with_name("failure.pkl"))
        # At once: others wait for nothing that is still to come.
        os._exit(2)


if __name__ == "__main__":
    main()
