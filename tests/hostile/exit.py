"""Leaves by the front door."""

import sys


def attack(argument):
    sys.exit("goodbye")
