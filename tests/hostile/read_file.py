"""Tries to read a file."""


def attack(argument):
    with open("/etc/passwd") as file:
        return file.read()
