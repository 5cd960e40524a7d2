"""Tries to list a folder."""

import os


def attack(argument):
    return str(os.listdir("/"))
