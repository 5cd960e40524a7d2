"""Tries to write a file at the path it is given."""


def attack(argument):
    with open(argument, "w") as file:
        file.write("escaped")
    return "escaped"
