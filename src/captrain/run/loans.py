"""Loans and locks: what processes share without doing one piece of work twice.

A worker names a context manager of a module and its arguments; the process that it belongs to enters it, and the worker
gets what it yields. The connection is the loan: what was entered is left when the worker gives it back, and when the
worker ends, however that comes about, so that nobody waits for one that is gone. The address is in the environment of
the workers and of what they start; where there is none, a process enters the resource itself.

A lock on a file is let go when the process that holds it ends, however that comes about, so that none outlives a kill;
it holds on all nodes that share the file.
"""

import fcntl
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TypeVar

from captrain.errors import InfrastructureError, UserError

LENDER = "CAPTRAIN_LENDER"
"""Variable that holds the address at which workers borrow."""
BACKLOG = 64
"""Workers that may wait to be heard."""

Value = TypeVar("Value")

_listeners: dict[int, Listener] = {}
"""Listener of this process by its id: a fork has none of its own."""
_lock = threading.Lock()


def lender_address() -> str:
    """Return the address at which the processes that this one starts borrow: where it does itself, or here."""
    if inherited := os.environ.get(LENDER):
        return inherited
    with _lock:
        listener = _listeners.get(os.getpid())
        if listener is None:
            listener = _listeners[os.getpid()] = Listener(family="AF_UNIX", backlog=BACKLOG)
            threading.Thread(target=_listen, args=(listener,), daemon=True).start()
        return str(listener.address)


@contextmanager
def borrowed(
    resource: Callable[..., AbstractContextManager[Value]], *arguments: object, patience: float
) -> Iterator[Value]:
    """Enter a resource in the process that lends, or here where there is none.

    Args:
        resource: function of a module.
        *arguments: its arguments; they and what it yields are picklable.
        patience: seconds until the lender must have entered it.

    Raises:
        InfrastructureError: the lender is gone, or does not answer in time.
        Whatever `UserError` or `InfrastructureError` the resource raises as it is entered.
    """
    address = os.environ.get(LENDER)
    if address is None:
        with resource(*arguments) as value:
            yield value
        return
    try:
        connection = Client(address, family="AF_UNIX")
    except OSError as error:
        raise InfrastructureError(f"the process that lends {resource.__name__} is gone ({error})") from None
    with connection:
        try:
            connection.send((resource, arguments))
            if not connection.poll(patience):
                raise InfrastructureError(f"{resource.__name__} was not lent within {patience:g} seconds")
            value, refusal = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise InfrastructureError(f"the process that lends {resource.__name__} is gone ({error!r})") from None
        if refusal is not None:
            raise refusal
        try:
            yield value
        finally:
            # Said, because what this process has forked holds the connection, too.
            with suppress(OSError):
                connection.send(None)


def _listen(listener: Listener) -> None:
    while True:
        connection = listener.accept()
        threading.Thread(target=_lend, args=(connection,), daemon=True).start()


def _lend(connection: Connection) -> None:
    """Serve one loan from its beginning to its end."""
    with connection, suppress(EOFError, ConnectionError):
        resource, arguments = connection.recv()
        try:
            with resource(*arguments) as value:
                connection.send((value, None))
                with suppress(EOFError, ConnectionError):
                    connection.recv()
        except Exception as error:
            is_for_the_worker = isinstance(error, UserError | InfrastructureError)
            connection.send((None, error if is_for_the_worker else RuntimeError(traceback.format_exc())))


@contextmanager
def exclusive(path: Path, wait: bool = True) -> Iterator[int]:
    """Hold the lock that a file stands for.

    Args:
        path: of the file, which is made where there is none, and stays. Its time of change says when it was locked
            last.
        wait: whether to wait for another process that holds it.

    Yields:
        The file descriptor: a child process that inherits it holds the lock as long as it lives.

    Raises:
        BlockingIOError: another process holds it, and that is not to be waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file.fileno()
