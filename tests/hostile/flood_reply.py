"""Answers with more than anybody wants to hear."""


def attack(argument):
    return "x" * (8 << 20)
