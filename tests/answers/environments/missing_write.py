"""Carry out every operation of a request: two or three changes to named orders, each once, before closing.

Written by hand as a recorded answer for the tests: no model was asked. It stands where a model's answer would.
"""

import json
import random

TOOLS = []

PROMPT = (
    "You are the agent of a service desk. Find the customer's orders first. Cancel pending orders only. Take back "
    "only orders delivered at most 30 days ago. What is not allowed you deny with deny_request. When all is done, "
    "say so."
)
QUESTION = "What is your customer number?"


class Visit:
    """One visit of a customer with several changes in mind."""

    def __init__(self, data):
        self.data = data
        self.done = []
        self.mistakes = self.turns = 0
        self.ended = self.told = False
        self.identified = data["identified"]
        parts = [
            f"gift-wrap order {order}" if tool == "wrap_order" else f"change the zip code of order {order} to {code}"
            for tool, order, code in data["changes"]
        ]
        text = parts[0] + "".join(joiner + part for joiner, part in zip(data["joiners"], parts[1:], strict=True))
        start = f"I am customer {data['customer']}. " if self.identified else ""
        self.messages = [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": f"{start}{data['start']}{text}."},
        ]

    def step(self, message):
        self.turns += 1
        calls = message.get("tool_calls")
        if calls:
            replies = [self.reply(call["function"]) for call in calls]
        elif not self.identified and QUESTION in (message.get("content") or ""):
            self.identified = True
            replies = [{"role": "user", "content": f"I am customer {self.data['customer']}."}]
        else:
            self.told = self.ended = True
            replies = []
        if self.mistakes > 2 or self.turns > 11:
            self.ended = True
        return ([] if self.ended else replies), self.ended

    def reply(self, function):
        result = self.perform(function["name"], function["arguments"])
        if result is None:
            self.mistakes += 1
            result = {"error": "invalid call"}
        return {"role": "tool", "name": function["name"], "content": json.dumps(result)}

    def perform(self, name, arguments):
        schema = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
        if name not in schema or not isinstance(arguments, dict) or sorted(arguments) != sorted(schema[name]):
            return None
        if name == "transfer_to_human":
            self.ended = True
            return {"ok": True}
        orders = self.data["orders"]
        if name == "list_orders":
            return list(orders) if arguments["customer_id"] == self.data["customer"] else None
        order = arguments["order_id"]
        if not isinstance(order, str) or order not in orders:
            return None
        if name == "get_order":
            return dict(orders[order])
        if name == "update_zip" and not str(arguments["zip"]).isdigit():
            return None
        self.done.append((name, order))
        return {"ok": True}


class Environment:
    name = "missing_write"
    tools = TOOLS

    def tasks(self, split, count):
        return [
            {"id": f"{self.name}/{split}/{number}", "split": split, "data": self.invent(split, number)}
            for number in range(count)
        ]

    def invent(self, split, number):
        rng = random.Random(f"{self.name}|{split}|{number}")
        ids = [f"#{one}" for one in rng.sample(range(10, 50), rng.randint(3, 5))]
        statuses = ["pending", "shipped", "delivered"]
        orders = {one: {"status": rng.choice(statuses), "age": f"{rng.randint(1, 12) * 5} days"} for one in ids}
        tool, count = rng.choice([("wrap_order", 2), ("wrap_order", 3), ("wrap_order", 3), ("update_zip", 2)])
        codes = [f"{rng.randrange(10000):04d}" if tool == "update_zip" else "" for _ in range(count)]
        return {
            "customer": str(rng.randint(10, 99)),
            "identified": rng.random() < 0.9,
            "orders": orders,
            "changes": [[tool, one, code] for one, code in zip(rng.sample(ids, count), codes, strict=True)],
            "start": rng.choice(["", "Please ", "Hi, can you ", "I want to ", "I need to "]),
            "joiners": [rng.choice([" and ", " and also ", " and then "]) for _ in range(count - 1)],
        }

    def open(self, task):
        return Visit(task["data"])

    def score(self, task, messages):
        """The share of the changes made, squared, so that the last one pays most; which digits a zip code has is
        another capability's matter. Whatever nobody asked for, a change made twice included, costs half each."""
        visit = self.open(task)
        for message in messages:
            if message["role"] == "assistant" and not visit.ended:
                visit.step(message)
        wanted = [(tool, order) for tool, order, _ in task["data"]["changes"]]
        made = sum(change in visit.done for change in wanted)
        stray = len(visit.done) - made
        share = made / len(wanted)
        complete = share == 1 and not stray and visit.told
        reward = 0.9 * share**2 * (0.25**stray) + 0.1 * complete
        parts = {"share": round(share, 6), "stray": float(stray), "complete": float(complete)}
        return {"reward": round(reward, 6), "success": complete, "parts": parts}

    def reference(self, task):
        data = task["data"]
        messages = [] if data["identified"] else [{"role": "assistant", "content": QUESTION}]
        messages.append(self.calling("list_orders", {"customer_id": data["customer"]}))
        for tool, order, code in data["changes"]:
            messages.append(self.calling(tool, {"order_id": order, **({"zip": code} if code else {})}))
        return [*messages, {"role": "assistant", "content": "Done."}]

    def broken(self, task):
        """Closes with the last change left out."""
        *before, _, closing = self.reference(task)
        return [*before, closing]

    def hint(self, task):
        return "Carry out every change that was asked for before you close."

    def calling(self, name, arguments):
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
