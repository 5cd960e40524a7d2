"""Keeper of a server for as long as whoever wants it lives: run by path in an isolated interpreter, standard library
only.

    python -I keeper.py SECONDS COMMAND...

The end of standard input is the order to stop, because it comes whichever way the other side ends. The server and
whatever it has started are one process group: the server is asked to end them, and what is left after so many seconds
is ended; all at once where SIGTERM comes here. The exit status is the server's, 128 and the signal's number where a
signal ended it.
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
        # The server alone, which then ends what it has started: an engine that is asked as well dies under its hands.
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(seconds)
        tell(signal.SIGKILL)

    # Only now: a server would inherit what is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: tell(signal.SIGKILL))
    threading.Thread(target=listen, daemon=True).start()
    status = server.wait()
    tell(signal.SIGKILL)  # what a server that died has left behind
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # At once: a thread that still listens keeps nothing waiting.
    os._exit(keep(float(sys.argv[1]), sys.argv[2:]))
