"""Exits at once, without an answer."""

import os


def attack(argument):
    os._exit(0)
