"""Tries to become a shell that writes a file at the path it is given."""

import os


def attack(argument):
    os.execv("/bin/sh", ["sh", "-c", f"echo escaped > {argument}"])
