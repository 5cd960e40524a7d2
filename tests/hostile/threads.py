"""Tries to start a thread."""

import threading


def attack(argument):
    threading.Thread(target=print).start()
    return "started"
