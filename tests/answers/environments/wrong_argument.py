"""Copy a new zip code from the request into the call, every digit in its place.

Written by hand as a recorded answer for the tests: no model was asked. It stands where a model's answer would.
"""

import json
import random

TOOLS = []

RULES = (
    "You are the agent of a service desk. Find the customer's orders first. Cancel pending orders only. Take back "
    "only orders delivered at most 30 days ago. What is not allowed you deny with deny_request. When all is done, "
    "say so."
)
NUMBER_PLEASE = "What is your customer number?"


def tool_message(name, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Move:
    """A customer has moved, and says where to."""

    def __init__(self, data):
        self.data = data
        self.updates, self.others = [], 0
        self.errors = self.turns = 0
        self.over = self.said = False
        self.anonymous = data["anonymous"]
        who = "" if self.anonymous else f"I am customer {data['customer']}. "
        what = f"{data['ask']}change the zip code of order {data['order']} to {data['zip']}."
        self.messages = [{"role": "system", "content": RULES}, {"role": "user", "content": who + what}]

    def step(self, message):
        self.turns += 1
        if not message.get("tool_calls"):
            if self.anonymous and NUMBER_PLEASE in (message.get("content") or ""):
                self.anonymous = False
                return [{"role": "user", "content": f"I am customer {self.data['customer']}."}], False
            self.said = self.over = True
            return [], True
        results = [(call["function"]["name"], self.result(call["function"])) for call in message["tool_calls"]]
        self.over = self.over or self.errors > 2 or self.turns > 9
        replies = [{"role": "tool", "name": name, "content": json.dumps(result)} for name, result in results]
        return ([] if self.over else replies), self.over

    def result(self, function):
        try:
            return self.apply(function["name"], **function["arguments"])
        except (AttributeError, KeyError, TypeError, ValueError):
            self.errors += 1
            return {"error": "invalid call"}

    def apply(self, tool, **given):
        [schema] = [one["function"]["parameters"] for one in TOOLS if one["function"]["name"] == tool]
        if set(given) != set(schema["required"]):
            raise ValueError(tool)
        if tool == "transfer_to_human":
            self.over = True
            return {"ok": True}
        if tool == "list_orders":
            if given["customer_id"] != self.data["customer"]:
                raise KeyError(tool)
            return list(self.data["orders"])
        order = self.data["orders"][given["order_id"]]
        if tool == "get_order":
            return order
        if tool == "update_zip":
            if not given["zip"].isdigit():
                raise ValueError(tool)
            self.updates.append((given["order_id"], given["zip"]))
        else:
            self.others += 1
        return {"ok": True}


class Environment:
    name = "wrong_argument"
    tools = TOOLS

    def tasks(self, split, count):
        return [
            {"id": f"{self.name}/{split}/{i:03d}", "split": split, "data": self.data(split, i)} for i in range(count)
        ]

    def data(self, split, i):
        rng = random.Random(f"{split}-{self.name}-{i}")
        orders = {}
        for number in rng.sample(range(10, 50), rng.randint(3, 5)):
            status = rng.choice(["pending", "shipped", "delivered"])
            orders[f"#{number}"] = {"status": status, "age": f"{rng.randrange(5, 65, 5)} days"}
        # Neighbours differ: two digits that change places always show.
        digits = rng.sample("0123456789", rng.choice([3, 4, 4, 4]))
        return {
            "customer": str(rng.randint(10, 99)), "anonymous": rng.random() < 0.1, "orders": orders,
            "order": rng.choice(list(orders)), "zip": "".join(digits),
            "ask": rng.choice(["", "Please ", "Hi, can you ", "I want to ", "I need to "]),
        }  # fmt: skip

    def open(self, task):
        return Move(task["data"])

    def score(self, task, messages):
        """The share of digits in place, squared, in the one update of the order named."""
        data, move = task["data"], self.open(task)
        for message in messages:
            if message["role"] == "assistant" and not move.over:
                move.step(message)
        exact = 0.0
        if len(move.updates) == 1 and not move.others and move.updates[0][0] == data["order"]:
            given = move.updates[0][1]
            same = sum(a == b for a, b in zip(given, data["zip"], strict=False))
            exact = (same / max(len(given), len(data["zip"]))) ** 2
        closed = exact == 1 and move.said
        parts = {"digits": round(exact, 6), "closed": float(closed)}
        return {"reward": round(0.9 * exact + 0.1 * closed, 6), "success": closed, "parts": parts}

    def reference(self, task, code=""):
        data = task["data"]
        asking = [{"role": "assistant", "content": NUMBER_PLEASE}] if data["anonymous"] else []
        return [
            *asking,
            tool_message("list_orders", customer_id=data["customer"]),
            tool_message("update_zip", order_id=data["order"], zip=code or data["zip"]),
            {"role": "assistant", "content": "Done. Thank you!"},
        ]

    def broken(self, task):
        """The last two digits change places."""
        code = task["data"]["zip"]
        return self.reference(task, code[:-2] + code[-1] + code[-2])

    def hint(self, task):
        return "Copy zip codes digit by digit."
