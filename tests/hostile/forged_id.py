"""Answers a request that nobody made."""

import os


def attack(argument):
    os.write(3, b'{"id": 77, "ok": true, "result": [[], true]}\n')
    return "done"
