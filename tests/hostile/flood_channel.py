"""Writes without end to its reply channel."""

import os


def attack(argument):
    while True:
        os.write(3, b"x" * 65536)
