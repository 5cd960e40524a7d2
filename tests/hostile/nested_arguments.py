"""Answers with hundreds of brackets: a parser survives them, but writing them again may fail."""


def attack(argument):
    nested = []
    for _ in range(300):
        nested = [nested]
    return nested
