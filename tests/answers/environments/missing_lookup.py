"""Look at an order before it is cancelled or taken back, and decide by what was seen.

Written by hand as a recorded answer for the tests: no model was asked. It stands where a model's answer would.
"""

import json
import random

TOOLS = []

POLICY = (
    "You are the agent of a service desk. Find the customer's orders first. Cancel pending orders only. Take back "
    "only orders delivered at most 30 days ago. What is not allowed you deny with deny_request. When all is done, "
    "say so."
)
WRITES = ("cancel_order", "return_order", "wrap_order", "update_zip", "deny_request")
ASKING = "What is your customer number?"


def right_tool(wish, order):
    """The write that the rules ask for."""
    if wish == "cancel":
        return "cancel_order" if order["status"] == "pending" else "deny_request"
    recent = int(order["age"].split()[0]) <= 30
    return "return_order" if order["status"] == "delivered" and recent else "deny_request"


class Conversation:
    """A customer who wishes to cancel or return one named order, or two."""

    def __init__(self, data):
        self.data = data
        self.seen, self.written = [], []
        self.closed = self.over = False
        self.refused = self.turns = 0
        self.known = data["introduced"]
        opening = f"I am customer {data['customer']}. " if self.known else ""
        clauses = [f"{wish} order {order}" for wish, order in data["wishes"]]
        request = f"{data['opening']}{data['joiner'].join(clauses)}."
        self.messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": opening + request}]

    def step(self, message):
        self.turns += 1
        calls = message.get("tool_calls") or []
        replies = [self.tool(call) for call in calls] if calls else self.user(message.get("content") or "")
        self.over = self.over or self.refused > 2 or self.turns >= 12
        return ([] if self.over else replies), self.over

    def user(self, text):
        if not self.known and ASKING in text:
            self.known = True
            return [{"role": "user", "content": f"I am customer {self.data['customer']}."}]
        self.closed = self.over = True
        return []

    def tool(self, call):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        result = self.run(name, arguments)
        if result is None:
            self.refused += 1
            result = {"error": "invalid call"}
        return {"role": "tool", "name": name, "content": json.dumps(result)}

    def run(self, name, arguments):
        """What a tool returns; None where it does not accept the call."""
        known = next((tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name), None)
        if known is None or not isinstance(arguments, dict) or set(arguments) != set(known["required"]):
            return None
        if name == "transfer_to_human":
            self.over = True
            return {"ok": True}
        if name == "list_orders":
            mine = arguments["customer_id"] == self.data["customer"]
            return [order["id"] for order in self.data["orders"]] if mine else None
        found = [order for order in self.data["orders"] if order["id"] == arguments["order_id"]]
        if not found:
            return None
        if name == "get_order":
            self.seen.append(found[0]["id"])
            return {"status": found[0]["status"], "age": found[0]["age"]}
        self.written.append((name, found[0]["id"], found[0]["id"] in self.seen))
        return {"ok": True}


class Environment:
    name = "missing_lookup"
    tools = TOOLS

    def tasks(self, split, count):
        made = [self.make(random.Random(f"{self.name}:{i}:{split}")) for i in range(count)]
        return [{"id": f"{self.name}/{split}/{i}", "split": split, "data": data} for i, data in enumerate(made)]

    def make(self, rng):
        orders = [
            {
                "id": f"#{number}",
                "status": rng.choice(["pending", "shipped", "delivered"]),
                "age": f"{rng.randrange(5, 65, 5)} days",
            }
            for number in rng.sample(range(10, 50), rng.randint(3, 5))
        ]
        wishes = []
        for asked in rng.sample(orders, rng.choice([1, 1, 1, 2])):
            wish = rng.choice(["cancel", "return"])
            wishes.append([wish, asked["id"]])
            # Four in ten are allowed: a guess is right less often than not.
            if rng.random() < 0.4:
                asked["status"] = "pending" if wish == "cancel" else "delivered"
                if wish == "return":
                    asked["age"] = f"{rng.randrange(5, 35, 5)} days"
            elif right_tool(wish, asked) != "deny_request":
                asked["status"] = "shipped"
        return {
            "customer": str(rng.randint(10, 99)), "introduced": rng.random() < 0.9, "orders": orders, "wishes": wishes,
            "opening": rng.choice(["", "Please ", "Hi, can you ", "I want to ", "I need to "]),
            "joiner": rng.choice([" and ", " and also ", " and then "]),
        }  # fmt: skip

    def open(self, task):
        return Conversation(task["data"])

    def score(self, task, messages):
        """For each wish a part for one write on its order, more for a look before that, all for the right decision on
        what was seen: one without a look is a guess. The mean is squared, so that the last look pays most."""
        data, played = task["data"], self.open(task)
        for message in messages:
            if message["role"] == "assistant" and not played.over:
                played.step(message)
        wanted = self.right(data)
        stray = [order for _, order, _ in played.written if order not in wanted]
        shown = {"single": 0.0, "looked": 0.0, "decided": 0.0}
        for order, tool in wanted.items():
            written = [(name, seen) for name, place, seen in played.written if place == order]
            single = len(written) == 1 and not stray
            looked = single and written[0][1]
            decided = looked and written[0][0] == tool
            for part, value in (("single", single), ("looked", looked), ("decided", decided)):
                shown[part] += value / len(wanted)
        closed = shown["decided"] == 1 and played.closed
        skill = 0.45 * shown["single"] + 0.2 * shown["looked"] + 0.35 * shown["decided"]
        reward = 1.0 if closed else 0.9 * skill**2
        return {"reward": round(reward, 6), "success": closed, "parts": {**shown, "closed": float(closed)}}

    def right(self, data):
        """The right write for each order that is asked for."""
        orders = {order["id"]: order for order in data["orders"]}
        return {asked: right_tool(wish, orders[asked]) for wish, asked in data["wishes"]}

    def reference(self, task):
        data = task["data"]
        messages = [] if data["introduced"] else [{"role": "assistant", "content": ASKING}]
        messages.append(self.call("list_orders", customer_id=data["customer"]))
        for order, tool in self.right(data).items():
            messages += [self.call("get_order", order_id=order), self.call(tool, order_id=order)]
        return [*messages, {"role": "assistant", "content": "Done."}]

    def broken(self, task):
        """The same writes, the last one without a look."""
        *before, _, write, closing = self.reference(task)
        return [*before, write, closing]

    def hint(self, task):
        return "Look an order up before you cancel it or take it back."

    def call(self, tool, **arguments):
        function = {"name": tool, "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
