"""Answers with a huge reply."""


def attack(argument):
    return "x" * (8 << 20)
