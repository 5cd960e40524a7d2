"""Tries to write a file."""


def attack(argument):
    with open(argument, "w") as file:
        file.write("escaped")
    return "escaped"
