"""Answers with malformed messages."""


def attack(argument):
    return {"not": "text"}
