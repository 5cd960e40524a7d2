"""Runs a server until its parent dies or asks it to stop. Run by path in an isolated interpreter; standard library
only.

    python -I keeper.py SECONDS COMMAND...

The end of standard input is the signal to stop, because it comes no matter how the parent ends. The server and its
children form one process group. First the server is asked to stop. After SECONDS, the rest of the group is killed.
SIGTERM kills the group at once. The exit status is the server's, or 128 plus the number of the signal that killed it.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def keep(seconds: float, command: list[str]) -> int:
    """Run the command until it ends or is stopped. Return its exit status."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def tell(order: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, order)

    def listen() -> None:
        while os.read(0, 4096):
            pass
        # Signal only the server. It stops its engine processes itself; signalled directly, they would die too early.
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(seconds)
        tell(signal.SIGKILL)

    # Set handlers only after the server has started, because it would inherit ignored signals.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: tell(signal.SIGKILL))
    threading.Thread(target=listen, daemon=True).start()
    status = server.wait()
    tell(signal.SIGKILL)  # kill the remaining children of a server that crashed
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # Exit at once: do not wait for the listening thread.
    os._exit(keep(float(sys.argv[1]), sys.argv[2:]))
