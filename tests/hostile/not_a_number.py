"""Returns a reward of NaN."""


def attack(argument):
    return "done"


def scored(task, messages):
    return {"reward": float("nan"), "success": True, "parts": {}}
