"""Answers with calls of no function."""


def attack(argument):
    return {"not": "text"}
