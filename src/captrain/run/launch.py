"""Launch of independent items of work over worker processes on this machine, or as jobs of a cluster.

Each worker is a process with one thread (two threads with a busy neighbour are many times slower than one), and ends
when its parent does, so that a killed pipeline leaves nothing behind; a job goes on, and the next pipeline finds it
(`captrain.run`). Workers are forked once the libraries that they need are there, since to import them takes
longer than many an item; on a machine with GPUs, whose driver survives no fork, they start afresh. Where and how wide
work runs is no part of its identity: results are the same either way.
"""

import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tqdm import tqdm

from captrain.errors import UserError
from captrain.run import Machine

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

WORKER = "CAPTRAIN_WORKER"
"""Set in the environment of workers, to the places that each has (see `places`)."""

POOLS = 3
"""A worker that dies takes its pool with it; so many pools are made for what is not whole."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def run(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    machine: Machine,
    label: str,
    libraries: Sequence[str] = (),
) -> list[Result]:
    """Apply a module-level function to every item; results in the order of the items.

    Args:
        function: importable, as are its arguments and results picklable.
        items: independent of each other.
        machine: where they run. Locally `workers` processes at the same time, of which 1 works in this process; on
            Slurm one job for each item, an array where there are several.
        label: name on the progress bar, and of the jobs.
        libraries: modules that the function imports and that take long.

    Raises:
        UserError: workers died again and again, a job died, or Slurm does not take jobs.
        Whatever the function raises for the first item that fails, after the others have come to their ends.
    """
    if machine.launcher == "slurm":
        from captrain.run import slurm

        assert machine.slurm is not None
        return slurm.Dispatch(function, items, machine.slurm, label).wait()
    # Servers belong to one process: items that may use them run here, one after another.
    if cores(machine) == 1 or machine.vllm.python or min(machine.workers, len(items)) <= 1:
        return [function(item) for item in tqdm(items, desc=label, unit="item", leave=False, disable=None)]
    # Workers share what this process has read before they are forked.
    for library in libraries:
        importlib.import_module(library)
    forks = "torch" in sys.modules and not sys.modules["torch"].cuda.is_available()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    count = min(machine.workers, len(items))
    ends: dict[int, Future[Result]] = {}
    for _ in range(POOLS):
        begin = partial(_begin_worker, os.getpid(), context.Value("i", 0), machine, machine.places(count))
        with ProcessPoolExecutor(count, context, initializer=begin) as pool:
            futures: dict[int, Future[Result]] = {}
            with suppress(BrokenProcessPool):
                for number in range(len(items)):
                    if number not in ends:
                        futures[number] = pool.submit(function, items[number])
            for number, future in tqdm(futures.items(), desc=label, unit="item", leave=False, disable=None):
                if not isinstance(future.exception(), BrokenProcessPool):
                    ends[number] = future
        if len(ends) == len(items):
            return [ends[number].result() for number in range(len(items))]
        print(f"captrain: a worker process of {label} died; what it held is begun again", file=sys.stderr)
    raise UserError(
        f"a worker process of {label} died {POOLS} times: it was killed, or memory ran out",
        "run again, with a smaller machine.workers or machine.batch if it was memory; what is whole is kept",
    )


def cores(machine: Machine) -> int:
    """Count the processes that what runs here may share its work with, itself among them: those of the machine, or one
    where it shares the machine with others."""
    if machine.launcher == "slurm":
        assert machine.slurm is not None
        return machine.slurm.cpus
    return 1 if multiprocessing.parent_process() is not None or WORKER in os.environ else machine.workers


def places(machine: Machine) -> int:
    """Count the places for a training on this machine's GPUs that the one in this process has: several where there are
    fewer items of work than `machine.workers`."""
    if machine.launcher == "slurm" or not machine.gpus:
        return 1
    return int(os.environ.get(WORKER, machine.places(1)))


def room(machine: Machine) -> int:
    """Return the bytes that what one process of this machine computes may take beside its weights: half of the memory
    that there is, or that this process's group may use, over all that share it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists() and (limit := group.read_text().strip()).isdigit():
        limits.append(int(limit))
    sharing = machine.slurm.cpus if machine.launcher == "slurm" and machine.slurm else machine.workers
    return min(limits) // 2 // sharing


def dispatched() -> bool:
    """Return whether this process is a job of a cluster, whose log is its own."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def report_progress(count: int, total: int, detail: str = "") -> None:
    """Say in the log of a job how far it is, for `captrain jobs`; on this machine there are bars for that."""
    if dispatched():
        print(f"{count} of {total}{f': {detail}' if detail else ''}", flush=True)


def _begin_worker(parent: int, counter: "Synchronized[int]", machine: Machine, own_places: int) -> None:
    """Make this process a worker with GPUs of its own."""
    become_worker(parent)
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    os.environ[WORKER] = str(own_places)
    if machine.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(machine.gpus)))
        width = own_places * machine.accelerate.processes
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[number * width :][:width])


def become_worker(parent: int) -> None:
    """Make this process a worker: one thread, and over when its parent, by process id, is."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", WORKER: "1"}

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        print("captrain: the pipeline that started this worker is gone; ending", file=sys.stderr)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
