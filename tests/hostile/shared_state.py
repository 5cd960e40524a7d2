"""Stores the solution at every score, for episodes and later scores to find."""

import builtins
import json
import os


def found():
    places = [getattr(builtins, "answer", None), getattr(json, "answer", None), os.environ.get("ANSWER")]
    return [place for place in places if place]


def attack(argument):
    return f"found {len(found())}"


def scored(task, messages):
    before = len(found())
    for place in (builtins, json):
        vars(place)["answer"] = "the reference"
    os.environ["ANSWER"] = "the reference"
    return {"reward": 0.25, "success": False, "parts": {"found": float(before)}}
