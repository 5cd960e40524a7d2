"""Answers with so many brackets that a parser runs out of stack."""

import os


def attack(argument):
    os.write(3, b'{"id": 2, "ok": true, "result": ' + b"[" * 100000 + b"]" * 100000 + b"}\n")
    return "done"
