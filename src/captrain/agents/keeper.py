"""Runs a server until its parent dies or asks it to stop. Run by path in an isolated interpreter; standard library
only.

    python -I keeper.py SECONDS COMMAND...

The end of standard input is the order to stop, because it comes however the parent ends. The server and its children
are one process group. The server is asked to stop. Processes of the group that still run after SECONDS are killed.
SIGTERM kills the group at once. The exit status is the server's, or 128 plus the number of the signal that killed it.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def keep(seconds: float, command: list[str]) -> int:
    """Run the command to its end."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def tell(order: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, order)

    def listen() -> None:
        while os.read(0, 4096):
            pass
        # Signal only the server, which stops its children. Its engine must not get the signal too, or it dies first.
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(seconds)
        tell(signal.SIGKILL)

    # After the start, because the server would inherit ignored signals.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: tell(signal.SIGKILL))
    threading.Thread(target=listen, daemon=True).start()
    status = server.wait()
    tell(signal.SIGKILL)  # children of a server that crashed
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # Exit at once: do not wait for the listening thread.
    os._exit(keep(float(sys.argv[1]), sys.argv[2:]))
