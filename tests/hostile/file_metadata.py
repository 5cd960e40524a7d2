"""Tries to learn whether a file is there."""

import os


def attack(argument):
    return str(os.stat("/usr").st_mtime)
