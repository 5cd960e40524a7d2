"""Tries to write a file."""


def attack(argument):
    with open(argument, "w", encoding="utf-8") as file:
        file.write("escaped")
    return "escaped"
