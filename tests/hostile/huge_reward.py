"""Returns a reward beyond the range of floats."""


def attack(argument):
    return "done"


def scored(task, messages):
    return {"reward": 10**400, "success": True, "parts": {}}
