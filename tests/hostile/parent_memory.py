"""Tries to read its parent's memory through /proc."""

import os


def attack(argument):
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        return str(len(memory.read(1)))
