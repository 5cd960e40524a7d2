"""Prints a gigabyte."""

import os
import sys


def attack(argument):
    line = "x" * (1 << 20)
    for _ in range(256):
        print(line)
        print(line, file=sys.stderr)
        os.write(1, line.encode())
        os.write(2, line.encode())
    return "done"
