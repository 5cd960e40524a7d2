"""Duplicates every file descriptor, and reads from them."""

import os


def attack(argument):
    found = []
    for number in range(4, 64):
        try:
            os.read(number, 1)
            found.append(number)
        except OSError:
            continue
    copies = []
    try:
        while True:
            copies.append(os.dup(3))
    except OSError:
        return f"found {len(found)}"
