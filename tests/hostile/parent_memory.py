"""Tries to read its parent's memory by the file system."""

import os


def attack(argument):
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        return str(len(memory.read(1)))
