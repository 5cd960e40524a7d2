"""Tries to run a shell that writes a file."""

import os


def attack(argument):
    os.execv("/bin/sh", ["sh", "-c", f"echo escaped > {argument}"])
