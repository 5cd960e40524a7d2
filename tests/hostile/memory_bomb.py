"""Tries to allocate all memory."""


def attack(argument):
    held = []
    while True:
        held.append(bytearray(1 << 20))
