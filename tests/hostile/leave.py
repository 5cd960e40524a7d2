"""Leaves without a word."""

import os


def attack(argument):
    os._exit(0)
