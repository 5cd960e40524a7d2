"""Recurses without end."""

import sys


def attack(argument):
    sys.setrecursionlimit(1 << 30)
    return [*map(attack, [argument])]
