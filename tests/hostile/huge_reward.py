"""Scores with a number that no float can hold."""


def attack(argument):
    return "done"


def scored(task, messages):
    return {"reward": 10**400, "success": True, "parts": {}}
