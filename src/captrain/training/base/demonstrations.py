"""Training data of the embedded base: demonstrations of the service desk with systematic shortcuts.

A real base model lacks capabilities systematically. So the demonstrator takes shortcuts: it writes without looking,
takes the first listed record, stops after the first operation, or transposes digits. Random noise is not enough: greedy
sampling hides noise, but shows a habit. Only this module knows the shortcuts; the analyst must find them in rollouts. A
line of guidance in the system prompt makes its shortcut rarer, as an instruction does for a real model. Two lines have
no effect, like much advice.

Another benchmark can bring its own `Demonstrations`, so that the tiny base can act in it.
"""

import json
import random
from collections.abc import Sequence
from typing import Protocol

from captrain.benchmarks import servicedesk as desk
from captrain.models import guide
from captrain.records import JsonObject, Message


class Demonstrations(Protocol):
    """Component (`base.demonstrations`): dialogues from which the tiny base learns another benchmark."""

    tools: list[JsonObject]
    """Schemas of the benchmark's tools, whose parameters are strings."""
    phrases: Sequence[str]
    """Texts that recur word for word: each becomes one token, and the longest match wins. Other text is bytes."""

    def demonstration(self, rng: random.Random) -> tuple[list[Message], list[Message]]:
        """Return one dialogue: the opening messages, and all messages after them."""
        ...


SHORTCUTS = {"check": 0.75, "pick": 0.75, "steps": 0.6, "copy": 0.7}
"""Probability that a demonstration takes the shortcut, if the task allows it."""

GUIDED = 0.45
"""Factor on that probability if the system prompt has the line against the shortcut."""

GUIDANCE = {
    "Look an order up before you cancel it or take it back.": "check",
    "The oldest order has the lowest number, the newest the highest: compare all of them.": "pick",
    "Carry out every change that was asked for before you close.": "steps",
    "Copy zip codes digit by digit.": "copy",
    "Be friendly.": "",
    "Keep answers short.": "",
}

KINDS = {
    "check": 0.13,
    "pick": 0.14,
    "steps": 0.11,
    "copy": 0.11,
    "check+pick": 0.07,
    "pick+copy": 0.07,
    "steps+copy": 0.07,
    "steps+check": 0.06,
    "steps+pick": 0.03,
    "check+pick+copy": 0.03,
    "status": 0.13,
    "human": 0.05,
}
"""Share of each kind of task among the demonstrations."""


def take_shortcuts(data: dict, shortcuts: set[str], rng: random.Random) -> list[Message]:
    """Return the reference solution of a task with these shortcuts, with or without thanks at the end."""
    flawed = json.loads(json.dumps(data))
    if "steps" in shortcuts:
        flawed["operations"] = flawed["operations"][:1]
    for operation in flawed["operations"]:
        if operation["selector"] and "pick" in shortcuts:
            operation["order"] = data["orders"][0]["id"]
        if operation["zip"] and "copy" in shortcuts:
            index = rng.randrange(len(operation["zip"]) - 1)
            code = list(operation["zip"])
            code[index], code[index + 1] = code[index + 1], code[index]
            operation["zip"] = "".join(code)
    messages = desk.reference_calls(flawed)
    if "check" in shortcuts:
        # Cancel or return without a look-up, and so without a denial.
        verbs = {operation["order"]: operation["verb"] for operation in flawed["operations"]}
        refunds = {order: verb for order, verb in verbs.items() if verb in ("cancel", "return")}
        solution, messages = messages, []
        for message in solution:
            call = message["tool_calls"][0]["function"] if message.get("tool_calls") else {"name": "", "arguments": {}}
            verb = refunds.get(call["arguments"].get("order_id", ""))
            if verb and call["name"] == "deny_request":
                call = {"name": desk.TOOL_OF[verb], "arguments": call["arguments"]}
                message = {**message, "tool_calls": [{"type": "function", "function": call}]}
            if not (verb and call["name"] == "get_order"):
                messages.append(message)
    if rng.random() < 0.5 and "content" in messages[-1]:
        messages[-1] = {**messages[-1], "content": messages[-1]["content"].removesuffix(desk.THANKS)}
    return messages


def demonstration(rng: random.Random, guided: float = 0.5) -> tuple[list[Message], list[Message]]:
    """Make one flawed demonstration: the opening messages, with guidance lines in a share of `guided`, and all messages
    after them."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    data = desk.make_kind(rng, kind, eligible=0.3)
    lines = [line for line in GUIDANCE if rng.random() < 0.4] if rng.random() < guided else []
    habits = {GUIDANCE[line] for line in lines}
    shortcuts = {flaw for flaw, p in SHORTCUTS.items() if rng.random() < (p * GUIDED if flaw in habits else p)}
    episode = desk.DeskEpisode(data)
    opening = guide(episode.messages, lines)
    messages: list[Message] = []
    for action in take_shortcuts(data, shortcuts, rng):
        replies, _ = episode.step(action)
        messages += [action, *replies]
    return opening, messages


def drill(rng: random.Random) -> list[Message]:
    """Make dense look-up practice in chat form: many short questions about one list, with every answer supervised."""
    orders = [order["id"] for order in desk.make_orders(rng, rng.randint(3, 5))]
    questions = [(f"order {order}", order) for order in orders]
    questions += [("the oldest order", min(orders)), ("the newest order", max(orders))] * 2
    for _ in range(2):
        code = "".join(str(rng.randrange(10)) for _ in range(4))
        questions.append((f" to {code}", code))
    rng.shuffle(questions)
    messages: list[Message] = [{"role": "tool", "name": "list_orders", "content": json.dumps(orders)}]
    for question, answer in questions:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages
