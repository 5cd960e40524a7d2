"""Answers with half a character, which cannot be written to a file."""


def attack(argument):
    return "\ud83d"
