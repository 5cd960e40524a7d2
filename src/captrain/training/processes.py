"""Trains in several processes: `accelerate launch` with DDP, or with FSDP for a base that does not fit on one GPU.

In a Slurm job of several nodes (`machine.slurm.nodes`), a step of the job runs the launcher on each node.

The work does not depend on the number of processes: with equal weights, a step has the same groups, tasks and keys, or
an update the same demonstrations. Each process samples the rollouts that it trains on. If a policy starts servers, rank
0 samples for all. Budget, ledger and history are those of the whole step, and known to every process. Rank 0 gathers
and saves the adapter. Sums over processes have another order than within one process. In float64 both round to the same
value (`captrain.models.barrier`), in other types they do not.

The processes end with the process that started them. Checkpoints remain, and a training with other settings never
resumes from them. A `UserError` in a process reaches the caller.
"""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import TypeAdapter

from captrain.agents import stop_servers
from captrain.errors import UserError
from captrain.models import computes_on_cpu
from captrain.records import publish_json, publish_text, read_json
from captrain.run import Accelerate, Failure, Machine, clean_output, launch
from captrain.training import collectives

KEEPER = Path(__file__).parents[1] / "agents" / "keeper.py"
GRACE = 20.0
"""Seconds that processes get to end after SIGTERM."""
TAIL = 20
"""Number of last lines of the processes' log that a message shows."""
LAUNCHER = """trap '' USR2; exec "$0" "$1" "$2" --machine_rank "$SLURM_NODEID" "${@:3}\""""
"""Script of a node's launcher. It ignores the signal that tells a job of its time limit."""
RESULT = "trained.json"
"""File that rank 0 leaves in the workspace at the end."""

Result = TypeVar("Result")


def configuration(machine: Machine) -> dict[str, object]:
    """Make the settings of `accelerate launch`'s configuration file.

    FSDP shards layer by layer, with frozen and trainable weights in one unit. Rank 0 reads the base and sends the
    others their shards. The base's own precision is used, without mixed precision. The first node has the first ranks.
    """
    accelerate, nodes = machine.accelerate, machine.nodes
    settings: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        # "MULTI_GPU" starts processes without GPUs, too: each finds out for itself.
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
    train: Callable[[Machine, Path], Result],
    kind: type[Result],
    workspace: Path,
) -> Result:
    """Train in several processes and return the result.

    There are as many processes as the machine asks for or, if a step divides among them, as many as the GPUs of this
    process allow.

    Args:
        name: of the adapter, for messages.
        machine: gives the layout over processes and GPUs.
        portions: number of the portions of a step that are divided among the processes, and what messages call them.
        train: called in each process with the layout and the workspace; trains together with the others from the last
            whole checkpoint, leaves the adapter in the workspace, and returns the result. It is sent by pickle.
        kind: of the result.
        workspace: folder of the training. The output of the processes goes to its `processes.log`.

    Raises:
        UserError: a step does not divide among the processes, there are too few GPUs, or a process died.
        The first `UserError` or `InfrastructureError` of a process.
        RuntimeError: a process raised another exception. The note has the traceback.
    """
    machine = _layout(machine, portions)
    # The processes read what to do, and leave their result, in files of the workspace.
    config, order, log = workspace / "accelerate.yaml", workspace / "job.pkl", workspace / "processes.log"
    failure = workspace / "failure.json"
    publish_text(config, yaml.safe_dump(configuration(machine), sort_keys=False))
    order.write_bytes(pickle.dumps((train, machine)))
    for path in (*workspace.glob("failure*.json"), workspace / RESULT):
        path.unlink(missing_ok=True)
    status = _run(config, order, log, machine)
    order.unlink()
    output = log.read_text(errors="replace", encoding="utf-8")
    # If one process is killed, the others fail because of it and then get SIGTERM. Report the kill.
    killed = set(re.findall(r"Signal \d+ \((SIG\w+)\) received by PID", output)) - {"SIGTERM"}
    if not killed and (raised := Failure.read(failure)):
        raise raised.exception()
    if status or not (workspace / RESULT).exists():
        lines = "".join(f"\n    {line}" for line in output.splitlines()[-TAIL:])
        end = f"one was killed ({', '.join(killed)})" if killed else f"they ended with status {status}:{lines}"
        raise UserError(
            f"training {name}: of its {machine.accelerate.processes} processes {end}",
            f"see {log}; run again to go on from the last checkpoint, with smaller machine.accelerate.rows or more "
            "processes if it was memory",
        )
    return read_json(workspace / RESULT, kind, "run again")


def _layout(machine: Machine, portions: tuple[int, str]) -> Machine:
    """Choose the number of processes: as many as the GPUs allow if a step divides among them.

    Raises:
        UserError: a step does not divide among the processes, or there are too few GPUs.
    """
    import torch

    count, word = portions
    numbers = [sets * machine.accelerate.processes for sets in range(1, launch.gpu_sets(machine) + 1)]
    number = max((number for number in numbers if count % number == 0), default=numbers[0])
    if count % number:
        raise UserError(
            f"machine.accelerate.processes = {number} cannot share the {word} evenly: there are {count}",
            "choose a number of processes that divides it",
        )
    gpus = not computes_on_cpu(machine.accelerate.precision)
    if gpus and torch.cuda.device_count() < number // machine.nodes:
        raise UserError(
            f"machine.accelerate.processes = {number} on {machine.nodes} nodes, and {torch.cuda.device_count()} GPUs "
            "are visible on this one",
            "choose as many processes as GPUs, or fewer",
        )
    return machine.model_copy(update={"accelerate": machine.accelerate.model_copy(update={"processes": number})})


def rows_of_pass(accelerate: Accelerate, share: int) -> int:
    """Return the rows in one forward and backward pass of a process.

    Args:
        accelerate: how the training is shared.
        share: number of rows of a step that a process has.

    Raises:
        UserError: machine.accelerate.rows does not divide them.
    """
    rows = accelerate.rows or share
    if share % rows:
        raise UserError(
            f"machine.accelerate.rows = {rows} does not divide the {share} rows of a process in a step",
            "choose a divisor of it",
        )
    return rows


def _run(config: Path, order: Path, log: Path, machine: Machine) -> int:
    """Run the processes and return their exit status. The first process starts its own servers, so ours stop first."""
    stop_servers()
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    if machine.nodes > 1:  # one launcher on each node; Slurm tells each its number
        options = ("--overlap", "--kill-on-bad-exit=1", "--unbuffered", "--ntasks-per-node=1", "--relative=0")
        counts = (f"--nodes={machine.nodes}", f"--ntasks={machine.nodes}")
        launcher = ["srun", *options, *counts, "bash", "-c", LAUNCHER, *launcher]
    keeper = [sys.executable, "-I", str(KEEPER), str(GRACE)]
    # FSDP would shard over GPUs that it sees.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if computes_on_cpu(machine.accelerate.precision) else {}
    with log.open("wb") as output:
        # USR2 tells a Slurm job of its time limit; the processes ignore it.
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
    """Run as one process of a training; on an error, leave it in the workspace and exit.

    Args:
        order: what to train and on which layout, pickled, in the workspace.
    """
    from torch import distributed

    try:
        train, machine = pickle.loads(order.read_bytes())
        if computes_on_cpu(machine.accelerate.precision):  # transformers ignores its `ddp_timeout` there
            distributed.init_process_group("gloo", timeout=timedelta(seconds=collectives.PATIENCE))
        result = train(machine, order.parent)
        if collectives.rank() == 0:
            publish_json(order.parent / RESULT, TypeAdapter(type(result)).dump_python(result, mode="json"))
        distributed.destroy_process_group()
    except Exception as error:
        aside = order.with_name(f"failure-{collectives.rank()}.json")
        Failure.of(error).write(aside)
        # Keep the first error: the end of one process makes the others fail.
        with suppress(FileExistsError):
            os.link(aside, order.with_name("failure.json"))
        # Exit at once, without waiting for the other processes.
        os._exit(2)


if __name__ == "__main__":
    launch.become_worker(os.getppid())
    with clean_output():
        share(Path(sys.argv[1]))
