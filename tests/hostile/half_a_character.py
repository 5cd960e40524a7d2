"""Answers with half a character (a lone surrogate), which cannot be written to a file."""


def attack(argument):
    return "\ud83d"
