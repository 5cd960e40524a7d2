# pyright: reportMissingImports=false
"""A toy benchmark that speaks the worker protocol and misbehaves on command. Pure standard library.

A customer at a till names amounts one by one and leaves; the right answer is their sum. `!word argument` in a message
of the agent is a command for `misbehave`, and so is a task named `!word`. CONTRACT_IMPORT names a command to run at
import.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from functools import wraps
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "captrain" / "benchmarks" / "workers"))

from worker_loop import BadRequest, protect, serve

REPLIES = protect()
TASKS = {f"till/{i}": [1 + i % 7, 1 + i % 5, 1 + i % 3] for i in range(64)}
AMOUNT = {"type": "object", "properties": {"amount": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": AMOUNT}}
EPISODES = {}
ASKED = 0


def misbehave(command):
    word, _, argument = command.lstrip("!").partition(" ")
    if word == "die":
        print("Aargh.", file=sys.stderr, flush=True)
        os._exit(3)
    elif word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "hang":
        time.sleep(600)
    elif word == "late":
        time.sleep(float(argument))
    elif word == "print":
        print("a stray line")
        os.write(1, b"a line past Python\n")
    elif word == "flood":
        for _ in range(2000):
            print("x" * 1000, file=sys.stderr)
    elif word == "garbage":
        os.write(REPLIES.fileno(), b"Downloading: 100%|####|\n")
    elif word == "truncate":
        os.write(REPLIES.fileno(), b'{"id": %d, "ok": true, "resu' % ASKED)
        os._exit(0)
    elif word == "twice":
        os.write(REPLIES.fileno(), json.dumps({"id": ASKED, "ok": True, "result": {"twice": True}}).encode() + b"\n")
    elif word == "ahead":
        os.write(REPLIES.fileno(), json.dumps({"id": ASKED + 7, "ok": True, "result": {}}).encode() + b"\n")
    elif word == "raise":
        raise LookupError("the drawer is stuck")
    elif word == "exit":
        sys.exit("usage: till [-h]")
    elif word == "interrupt":
        raise KeyboardInterrupt
    elif word == "read":
        sys.stdin.read()
    elif word == "import":
        __import__("a_module_that_is_not_there")


class Episode:
    def __init__(self, task_id, seed, user):
        self.amounts, self.user = list(TASKS[task_id]), user
        random.Random(seed).shuffle(self.amounts)
        self.total, self.done = 0, False
        self.turn = "user"

    def seen(self, messages):
        while self.turn == "user" and self.user == "scripted" and not self.done:
            messages = messages + self.hear({"role": "user", "content": self.wish()})
        shown = {"turn": None if self.done else self.turn, "messages": messages, "done": self.done}
        shown["termination"] = "user_stop" if self.done else None
        if shown["turn"] == "user":
            shown["user_messages"] = [{"role": "system", "content": f"Say: {self.wish()}"}]
        return shown

    def wish(self):
        return f"Please add {self.amounts[0]}." if self.amounts else "STOP"

    def hear(self, message):
        """The user speaks."""
        self.amounts, self.turn = self.amounts[1:], "agent"
        self.done = message["content"] == "STOP"
        return [message]

    def act(self, message):
        """The agent acts."""
        if message["content"].startswith("!"):
            misbehave(message["content"])
        results = []
        for call in message.get("tool_calls") or []:
            self.total += call["function"]["arguments"]["amount"]
            results.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": str(self.total)})
        self.turn = "agent" if results or message["content"].startswith("!") else "user"
        return results


def hello():
    """Answer the first request with name and protocol."""
    return {"version": "1", "data": {}}


def list_tasks():
    """All tasks."""
    return {"tasks": list(TASKS)}


def reset(task_id, seed=0, user="scripted"):
    """Open an episode."""
    if task_id.startswith("!"):
        misbehave(task_id)
    if task_id not in TASKS:
        raise BadRequest(f"there is no task {task_id!r}")
    name = f"{os.getpid()}/{ASKED}"
    EPISODES[name] = Episode(task_id, seed, user)
    return {"episode": name, "pid": os.getpid(), "system": "You are at the till.", "tools": [ADD],
            **EPISODES[name].seen([])}  # fmt: skip


def step(episode, role, message):
    """Process a message of the agent or the user."""
    one = EPISODES[episode]
    return one.seen(one.act(message) if role == "agent" else one.hear(message))


def evaluate(task_id, messages):
    """Score the record: is the total right when the user leaves?"""
    totals = [int(message["content"]) for message in messages if message["role"] == "tool"]
    right = bool(totals) and totals[-1] == sum(TASKS[task_id]) and messages[-1]["content"] == "STOP"
    return {"reward": float(right), "success": right, "parts": {"sum": float(right)}}


def close(episode):
    """Drop an episode."""
    EPISODES.pop(episode, None)
    return {}


def stats():
    """Open episodes and memory."""
    return {
        "pid": os.getpid(), "episodes": len(EPISODES),
        "maxrss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def environ():
    """The process's environment."""
    return {"environ": dict(os.environ)}


def say(what):
    """Return a value that JSON cannot represent, or barely."""
    return {"nan": float("nan"), "set": {1}, "surrogate": "caf\udce9", "large": "x" * 1_000_000}[what]


def do(command, padding=""):
    """Misbehave outside of any episode."""
    misbehave(command)
    return {"pid": os.getpid()}


def counted(operation):
    """Count requests from 1, as the pool numbers them."""

    @wraps(operation)
    def run(**arguments):
        global ASKED
        ASKED += 1
        return operation(**arguments)

    return run


misbehave(os.environ.get("CONTRACT_IMPORT", ""))
if __name__ == "__main__":
    operations = (hello, list_tasks, reset, step, evaluate, close, stats, environ, say, do)
    serve(map(counted, operations), REPLIES)
