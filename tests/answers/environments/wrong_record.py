"""Find the order that a request means by comparing all of the customer's orders: the oldest, the newest, or both.

Written by hand as a recorded answer for the tests: no model was asked. It stands where a model's answer would.
"""

import json
import random

TOOLS = []

SYSTEM = (
    "You are the agent of a service desk. Find the customer's orders first. Cancel pending orders only. Take back "
    "only orders delivered at most 30 days ago. What is not allowed you deny with deny_request. When all is done, "
    "say so."
)
WHO = "What is your customer number?"
PARAMETERS = {tool["function"]["name"]: set(tool["function"]["parameters"]["required"]) for tool in TOOLS}


def act(tool, **arguments):
    """An assistant message with one call."""
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def say(text):
    return {"role": "assistant", "content": text}


def meant(data):
    """The ids that the wishes mean, in their order: the number grows with time."""
    return [{"oldest": min, "newest": max}[wish["which"]](data["ids"]) for wish in data["wishes"]]


class Shop:
    """The customer's orders, and what was done to them."""

    def __init__(self, data):
        self.data = data
        self.writes = []
        self.bad = 0
        self.finished = self.closed = False
        self.named = not data["shy"]
        clauses = [
            f"gift-wrap the {wish['which']} order" if not wish["zip"]
            else f"change the zip code of the {wish['which']} order to {wish['zip']}"
            for wish in data["wishes"]
        ]  # fmt: skip
        greeting = f"I am customer {data['customer']}. " if self.named else ""
        user = greeting + data["polite"] + data["joiner"].join(clauses) + "."
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]

    def step(self, message):
        answers = []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            result = self.use(function["name"], function["arguments"])
            self.bad += result is None
            content = json.dumps({"error": "invalid call"} if result is None else result)
            answers.append({"role": "tool", "name": function["name"], "content": content})
        if not answers:
            if not self.named and WHO in (message.get("content") or ""):
                self.named = True
                return [{"role": "user", "content": f"I am customer {self.data['customer']}."}], False
            self.closed = self.finished = True
        self.finished = self.finished or self.bad > 2
        return ([] if self.finished else answers), self.finished

    def use(self, tool, given):
        if not isinstance(given, dict) or set(given) != PARAMETERS.get(tool):
            return None
        if not all(isinstance(value, str) for value in given.values()):
            return None
        if tool == "transfer_to_human":
            self.finished = True
            return {"ok": True}
        if tool == "list_orders":
            return self.data["ids"] if given["customer_id"] == self.data["customer"] else None
        if given["order_id"] not in self.data["ids"]:
            return None
        if tool == "get_order":
            return {"status": self.data["status"], "age": f"{5 + 5 * self.data['ids'].index(given['order_id'])} days"}
        if tool == "update_zip" and not given["zip"].isdigit():
            return None
        self.writes.append([tool, given["order_id"], given.get("zip", "")])
        return {"ok": True}


class Environment:
    name = "wrong_record"
    tools = TOOLS

    def tasks(self, split, count):
        return [
            {"id": f"{self.name}/{split}/{i:04d}", "split": split, "data": self.draw(f"{self.name}:{split}:{i}")}
            for i in range(count)
        ]

    def draw(self, seed):
        rng = random.Random(seed)
        ids = sorted(f"#{number}" for number in rng.sample(range(10, 50), rng.choice([3, 3, 4, 4, 5])))
        middle = ids[1:-1]
        rng.shuffle(middle)
        ends = [ids[0], ids[-1]]
        rng.shuffle(ends)
        both = rng.random() < 0.15
        which = rng.sample(["oldest", "newest"], 2 if both else 1)
        verb_zip = not both and rng.random() < 0.25
        code = "".join(str(rng.randrange(10)) for _ in range(4)) if verb_zip else ""
        # The first one listed is seldom the one that is meant.
        listed = [middle[0], *ends, *middle[1:]] if rng.random() < 0.9 else [*ends, *middle]
        return {
            "customer": str(rng.randint(10, 99)), "shy": rng.random() < 0.1, "ids": listed,
            "status": rng.choice(["pending", "shipped", "delivered"]),
            "wishes": [{"which": one, "zip": code} for one in which],
            "polite": rng.choice(["", "Please ", "Hi, can you ", "I want to ", "I need to "]),
            "joiner": rng.choice([" and ", " and also ", " and then "]),
        }  # fmt: skip

    def open(self, task):
        return Shop(task["data"])

    def score(self, task, messages):
        """The share of wishes that fell on the right record, or a little for a near miss; a write too many, or of a
        kind that was not wished for, earns nothing."""
        data, shop = task["data"], self.open(task)
        for message in messages:
            if message["role"] == "assistant" and not shop.finished:
                shop.step(message)
        goals, ranked = meant(data), sorted(data["ids"])
        tools = ["update_zip" if wish["zip"] else "wrap_order" for wish in data["wishes"]]
        chosen = [order for _, order, _ in shop.writes]
        fitting = {tool for tool, _, _ in shop.writes} <= set(tools)
        hit = near = 0.0
        if fitting and 0 < len(chosen) == len(set(chosen)) <= len(goals):
            hit = sum(goal in chosen for goal in goals) / len(goals)
            steps = min(abs(ranked.index(order) - ranked.index(goal)) for order in chosen for goal in goals)
            near = 0.2 * (1 - steps / (len(ranked) - 1)) if not hit else 0.0
        done = hit == 1 and shop.closed
        reward = 0.9 * max(hit**2, near) + 0.1 * done
        parts = {"right record": hit, "near": near, "closed": float(done)}
        return {"reward": round(reward, 6), "success": done, "parts": parts}

    def reference(self, task):
        data = task["data"]
        return self.solution(data, meant(data))

    def solution(self, data, orders):
        writes = [
            act("update_zip", order_id=order, zip=wish["zip"]) if wish["zip"] else act("wrap_order", order_id=order)
            for wish, order in zip(data["wishes"], orders, strict=True)
        ]
        asking = [say(WHO)] if data["shy"] else []
        return [*asking, act("list_orders", customer_id=data["customer"]), *writes, say("Done. Thank you!")]

    def broken(self, task):
        """The last wish falls on the first order listed that was not meant."""
        data = task["data"]
        goals = meant(data)
        return self.solution(data, [*goals[:-1], next(order for order in data["ids"] if order not in goals)])

    def hint(self, task):
        return "The oldest order has the lowest number, the newest the highest: compare all of them."
