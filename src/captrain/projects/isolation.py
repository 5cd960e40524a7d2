"""Code of others in a process of its own: what ends that process, or lets nobody interrupt it, ends nothing else."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

from captrain.errors import UserError

Result = TypeVar("Result")
State = TypeVar("State")
Announce = Callable[[State], None]
POLL = 0.1


class ProcessLost(Exception, Generic[State]):
    """The process ended before its work did, or had to be ended: how, and what was announced last, if anything was."""

    def __init__(self, text: str, state: State | None) -> None:
        super().__init__(text)
        self.state = state


def in_own_process(work: Callable[[Announce[State]], Result], patience: float) -> Result:
    """Run work in a process of its own and return its result. Whatever that process started ends with it.

    Args:
        work: gets a function that announces what it is at.
        patience: seconds until the first announcement, between two, and to the result.

    Raises:
        ProcessLost: the process ended by itself, or let its patience pass.
        UserError: the work raised it.
    """
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(far, work))
    process.start()
    far.close()
    try:
        state, latest = None, time.monotonic() + patience
        while time.monotonic() < latest:
            # Asked first: what it sent before it ended is there then.
            is_over = not process.is_alive()
            if not near.poll(0 if is_over else POLL):
                if is_over:
                    break
                continue
            try:
                kind, content = near.recv()
            except EOFError:
                process.join(patience)
                break
            if kind == "result":
                return content
            if kind == "error":
                raise content
            state, latest = content, time.monotonic() + patience
        raise ProcessLost(_ending(process, patience), state)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.ident or 0, signal.SIGKILL)
        process.kill()
        process.join()
        near.close()


def _ending(process: BaseProcess, patience: float) -> str:
    status = process.exitcode
    if status is None:
        return f"did not return within {patience:g} s, and let nobody interrupt it"
    return f"ended the process ({f'signal {-status}' if status < 0 else f'exit status {status}'})"


def _serve(connection: Connection, work: Callable[[Announce[State]], Result]) -> None:
    os.setsid()
    try:
        outcome = ("result", work(lambda state: connection.send(("state", state))))
    except UserError as error:
        outcome = ("error", error)
    connection.send(outcome)
