"""Calls sys.exit."""

import sys


def attack(argument):
    sys.exit("goodbye")
