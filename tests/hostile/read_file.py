"""Tries to read a file."""


def attack(argument):
    with open("/etc/passwd", encoding="utf-8") as file:
        return file.read()
