"""Runs independent items of work in worker processes of this machine, or as jobs of a cluster.

A worker has one thread, because two threads beside a busy neighbour are many times slower. It ends with its parent, so
a killed pipeline leaves nothing behind. A cluster job goes on, and the next pipeline finds it (`captrain.run.slurm`).
Workers are forked after the imports of libraries, which take longer than many items. On GPUs they are spawned, because
the driver does not survive a fork. Results are the same wherever the work runs.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from select import select
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import psutil

from captrain.errors import UserError
from captrain.records import ProgressBar
from captrain.run import Machine
from captrain.run.streams import cleaned

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

WORKER = "CAPTRAIN_WORKER"
"""Environment variable that is set in worker processes. Its value is the worker's `gpu_sets`."""

PIPELINE = "CAPTRAIN_PIPELINE"
"""Environment variable with the id of the process that runs the pipeline."""

SHELLS = ("sh", "dash", "bash", "zsh", "ksh", "fish")
PR_SET_PDEATHSIG = 1
POOLS = 3
"""Most pools of workers per run. If a worker dies, its pool breaks, and a new pool takes the unfinished items."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def run(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    machine: Machine,
    label: str,
    libraries: Sequence[str] = (),
) -> list[Result]:
    """Apply a module-level function to every item; return the results in the order of the items.

    Args:
        function: importable, with picklable arguments and results.
        items: independent of each other.
        machine: where they run: locally in `workers` processes (in this process if that is 1), on Slurm in one job per
            item.
        label: name of the progress bar and of the jobs.
        libraries: slow imports of the function, done before workers are forked.

    Raises:
        UserError: workers died repeatedly, a job died, or Slurm accepts no jobs.
        Any exception of the function for the first failed item, after all other items have finished.
    """
    if machine.launcher == "slurm":
        from captrain.run import slurm

        assert machine.slurm is not None
        return slurm.Dispatch(function, items, machine.slurm, label).wait()
    # Forked workers share these imports.
    for library in libraries:
        _import_library(library)
    # Servers belong to one process: items that may use them run here, one after another.
    if cores(machine) == 1 or machine.vllm.python or min(machine.workers, len(items)) <= 1:
        return [function(item) for item in ProgressBar(items, what=label, unit="part")]
    forks = "torch" in sys.modules and not sys.modules["torch"].cuda.is_available()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    count = min(machine.workers, len(items))
    ends: dict[int, Future[Result]] = {}
    for _ in range(POOLS):
        begin = partial(_begin_worker, os.getpid(), context.Value("i", 0), machine, machine.gpu_sets(count))
        with ProcessPoolExecutor(count, context, initializer=begin) as pool:
            futures: dict[int, Future[Result]] = {}
            try:
                with suppress(BrokenProcessPool):
                    for number in range(len(items)):
                        if number not in ends:
                            futures[number] = pool.submit(function, items[number])
                for number, future in ProgressBar(futures.items(), what=label, unit="part"):
                    if not isinstance(future.exception(), BrokenProcessPool):
                        ends[number] = future
            except KeyboardInterrupt:
                for worker in multiprocessing.active_children():
                    worker.kill()
                raise
        if len(ends) == len(items):
            return [ends[number].result() for number in range(len(items))]
        print(f"captrain: a worker process of {label} died; its items start again", file=sys.stderr)
    raise UserError(
        f"a worker process of {label} died {POOLS} times: it was killed, or memory ran out",
        "run again, with a lower machine.workers or machine.batch if it was memory; finished work is kept",
    )


@cache
def _import_library(name: str) -> None:
    """Import a module without garbage collection, and exclude its half a million objects from later ones.

    accelerate runs a garbage collection before each training, which would be slow otherwise.
    """
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()


def cores(machine: Machine) -> int:
    """Return the number of worker processes that this process may use. It is 1 inside a worker."""
    if machine.launcher == "slurm":
        assert machine.slurm is not None
        return machine.slurm.cpus
    return 1 if multiprocessing.parent_process() is not None or WORKER in os.environ else machine.workers


def gpu_sets(machine: Machine) -> int:
    """Return how many trainings' worth of GPUs this process has. Above 1 if there are fewer items than workers."""
    if machine.launcher == "slurm" or not machine.gpus:
        return 1
    return int(os.environ.get(WORKER, machine.gpu_sets(1)))


def room(machine: Machine) -> int:
    """Return the bytes that one process may use in addition to the model's weights.

    This is half of the memory of the machine or of its control group, divided among all worker processes.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists() and (limit := group.read_text(encoding="utf-8").strip()).isdigit():
        limits.append(int(limit))
    sharing = machine.slurm.cpus if machine.launcher == "slurm" and machine.slurm else machine.workers
    return min(limits) // 2 // sharing


def dispatched() -> bool:
    """Return whether this process is a cluster job."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def _begin_worker(parent: int, counter: "Synchronized[int]", machine: Machine, own_sets: int) -> None:
    """Turn this process into a worker, and assign its share of the GPUs."""
    become_worker(parent)
    sys.stdout, sys.stderr = cleaned(sys.stdout), cleaned(sys.stderr)
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    os.environ[WORKER] = str(own_sets)
    if machine.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(machine.gpus)))
        width = own_sets * machine.accelerate.processes
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[number * width :][:width])


@cache
def end_with_pipeline() -> None:
    """Make this process end when the process that runs the pipeline ends. Further calls change nothing.

    captrain names that process to its stages. For `dvc repro` it is the nearest Python process among the ancestors. It
    may not be the parent: DVC starts a stage through a shell, and some shells (dash) wait for the stage and outlive the
    pipeline.
    """
    if PIPELINE in os.environ:
        Thread(target=_end_after, args=(int(os.environ[PIPELINE]),), daemon=True).start()
        return
    ancestors = psutil.Process().parents()
    for process in ancestors:
        with suppress(psutil.Error):
            if Path(process.exe()).name.startswith("python"):
                Thread(target=_end_after, args=(process.pid,), daemon=True).start()
                return
    # If only DVC's shell is left, DVC ended while this stage imported its libraries.
    if "DVC_STAGE" in os.environ and all(process.pid == 1 or process.name() in SHELLS for process in ancestors):
        os.kill(os.getpid(), signal.SIGTERM)


def end_children() -> None:
    """End all processes that this process started, directly or not."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.terminate()


def _end_after(pid: int) -> None:
    """Wait until a process ends, then end this process."""
    with suppress(ProcessLookupError):  # it has ended already
        select([os.pidfd_open(pid)], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def become_worker(parent: int) -> None:
    """Turn this process into a worker: it uses one thread, ignores Ctrl-C, and is killed when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", WORKER: "1"}
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
