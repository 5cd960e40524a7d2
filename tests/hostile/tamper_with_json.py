"""Replaces functions of the loop that calls it."""

import builtins
import json
import os


def attack(argument):
    json.dumps = lambda *arguments, **more: '{"id": 2, "ok": true, "result": 5}'
    builtins.getattr = builtins.str = builtins.isinstance = lambda *arguments: None
    os.read = lambda *arguments: b""
    return "done"
