"""Writes without end where its answers go."""

import os


def attack(argument):
    while True:
        os.write(3, b"x" * 65536)
