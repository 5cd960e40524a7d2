"""Scores with what is not a number."""


def attack(argument):
    return "done"


def scored(task, messages):
    return {"reward": float("nan"), "success": True, "parts": {}}
