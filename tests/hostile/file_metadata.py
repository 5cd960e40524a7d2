"""Tries to find out whether a file exists."""

import os


def attack(argument):
    return str(os.stat("/usr").st_mtime)
