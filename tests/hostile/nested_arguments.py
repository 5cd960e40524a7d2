"""Answers with some hundred brackets: a reader survives them, and who writes them again may not."""


def attack(argument):
    nested = []
    for _ in range(300):
        nested = [nested]
    return nested
