"""Omitted operation and wrong argument: Both in the same task. Carries out every operation of a request before closing. Gives a call the values that the request, the records and the policy ask for.

Written by the template synthesizer; do not edit.
"""

import json
import random
from typing import Literal

Message = dict
MIXES = {
    "single": {"check": 0.2, "pick": 0.2, "steps": 0.2, "copy": 0.2, "status": 0.1, "human": 0.1},
    "mixed": {
        "check": 0.11,
        "pick": 0.11,
        "steps": 0.11,
        "copy": 0.11,
        "check+pick": 0.08,
        "pick+copy": 0.08,
        "steps+copy": 0.08,
        "steps+check": 0.08,
        "status": 0.12,
        "human": 0.12,
    },
    "rare": {"check": 0.075, "pick": 0.075, "steps": 0.075, "copy": 0.075, "status": 0.35, "human": 0.35},
    "compound": {
        "check+pick": 0.15,
        "pick+copy": 0.15,
        "steps+copy": 0.15,
        "steps+check": 0.15,
        "steps+pick": 0.1,
        "check+pick+copy": 0.1,
        "status": 0.1,
        "human": 0.1,
    },
}
"""Task mixes, fixed in advance: kind -> share. 20% easy in `single`, 24% in `mixed`, 70% in `rare`, 20% in
`compound`, where every other task demands two capabilities or more."""

ORDER_IDS = [f"#{number}" for number in range(10, 50)]
STATUSES = ["pending", "shipped", "delivered"]
AGES = [f"{days} days" for days in range(5, 65, 5)]
RETURN_WINDOW = 30
OPENINGS = ["", "Please ", "Hi, can you ", "I want to ", "I need to "]
JOINERS = [" and ", " and also ", " and then "]
PHRASES = {"cancel": "cancel ", "return": "return ", "wrap": "gift-wrap ", "zip": "change the zip code of "}
TOOL_OF = {"cancel": "cancel_order", "return": "return_order", "wrap": "wrap_order", "zip": "update_zip"}
ASK = "What is your customer number?"
CLOSING = "Done."
STATUS_ANSWER = "The status is "
THANKS = " Thank you!"
POLICY = (
    "You are the agent of a service desk. Find the customer's orders first. Cancel pending orders only. Take back "
    "only orders delivered at most 30 days ago. What is not allowed you deny with deny_request. When all is done, "
    "say so."
)
MAX_TURNS = 14
MAX_ERRORS = 2


def _tool(name: str, description: str, **parameters: str) -> dict:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


ORDER = "The order, such as #12."
TOOLS = [
    _tool("list_orders", "List the ids of a customer's orders.", customer_id="The customer's number."),
    _tool("get_order", "Status and age of an order.", order_id=ORDER),
    _tool("cancel_order", "Cancel an order.", order_id=ORDER),
    _tool("return_order", "Take an order back.", order_id=ORDER),
    _tool("wrap_order", "Gift-wrap an order.", order_id=ORDER),
    _tool("update_zip", "Change the zip code of an order.", order_id=ORDER, zip="The new zip code."),
    _tool("deny_request", "Deny what was asked for an order.", order_id=ORDER),
    _tool("transfer_to_human", "Hand the customer over to a human."),
]
ARGUMENTS = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
WRITES = {"cancel_order", "return_order", "wrap_order", "update_zip", "deny_request"}


def allowed(verb: str, order: dict) -> bool:
    """Whether the desk's policy allows the operation on the order."""
    if verb == "cancel":
        return order["status"] == "pending"
    if verb == "return":
        return order["status"] == "delivered" and int(order["age"].split()[0]) <= RETURN_WINDOW
    return True


def make_allowed(rng: random.Random, order: dict, verb: str, permitted: bool) -> None:
    """Change the order so that the policy allows the operation, or does not."""
    if verb == "cancel":
        order["status"] = "pending" if permitted else rng.choice(["shipped", "delivered"])
    elif verb == "return":
        within = [age for age in AGES if int(age.split()[0]) <= RETURN_WINDOW]
        order["status"] = "delivered"
        order["age"] = rng.choice(within if permitted else [age for age in AGES if age not in within])
        if not permitted and rng.random() < 0.5:
            order["status"] = rng.choice(["pending", "shipped"])


def make_orders(rng: random.Random, count: int) -> list[dict]:
    """Random orders with distinct ids."""
    return [
        {"id": order_id, "status": rng.choice(STATUSES), "age": rng.choice(AGES)}
        for order_id in rng.sample(ORDER_IDS, count)
    ]


def extreme(orders: list[dict], selector: str) -> dict:
    """The oldest order (lowest id) or the newest (highest id)."""
    return (min if selector == "oldest" else max)(orders, key=lambda order: order["id"])


def make_data(rng: random.Random, kind: str, requests: list[tuple], eligible: float, zip_digits: int = 4) -> dict:
    """Data of a task with operations.

    Args:
        rng: source of all choices.
        kind: name of the task kind.
        requests: (verb, by) pairs; verb cancel|return|wrap|zip, by "id" (the order is named) or "extreme" (the oldest
            or newest order is asked for).
        eligible: share of cancel and return targets that the policy allows.
        zip_digits: length of a zip code.
    """
    orders = make_orders(rng, rng.randint(3, 5))
    selectors = rng.sample(["oldest", "newest"], sum(by == "extreme" for _, by in requests))
    reserved = [extreme(orders, selector)["id"] for selector in selectors]
    free = [order["id"] for order in orders if order["id"] not in reserved]
    rng.shuffle(free)
    operations, clauses = [], []
    for verb, by in requests:
        selector = selectors.pop(0) if by == "extreme" else ""
        order_id = extreme(orders, selector)["id"] if selector else free.pop()
        order = next(order for order in orders if order["id"] == order_id)
        make_allowed(rng, order, verb, rng.random() < eligible)
        digits = "".join(str(rng.randrange(10)) for _ in range(zip_digits)) if verb == "zip" else ""
        operations.append({"verb": verb, "selector": selector, "order": order_id, "zip": digits})
        subject = f"the {selector} order" if selector else f"order {order_id}"
        clauses.append(PHRASES[verb] + subject + (f" to {digits}" if digits else ""))
    request = clauses[0] + "".join(rng.choice(JOINERS) + clause for clause in clauses[1:])
    return _data(rng, kind, orders, operations=operations, request=rng.choice(OPENINGS) + request + ".")


def _data(rng: random.Random, kind: str, orders: list[dict], **more: object) -> dict:
    base = {"kind": kind, "customer": str(rng.randint(10, 99)), "orders": orders, "operations": [], "question": ""}
    return {**base, "human": False, "anonymous": rng.random() < 0.1, **more}


def make_kind(rng: random.Random, kind: str, eligible: float) -> dict:
    """Data of a task of a kind of `MIXES`."""
    if kind == "status":
        orders = make_orders(rng, rng.randint(3, 5))
        order_id = rng.choice(orders)["id"]
        return _data(rng, kind, orders, question=order_id, request=f"What is the status of order {order_id}?")
    if kind == "human":
        request = rng.choice(OPENINGS[1:]) + "speak with a human."
        return _data(rng, kind, make_orders(rng, 3), human=True, request=request, anonymous=False)
    refund = lambda: rng.choice(["cancel", "return"])  # noqa: E731
    operations = {
        "check": lambda: [(refund(), "id")],
        "pick": lambda: [("wrap", "extreme")],
        "steps": lambda: [("wrap", "id")] * 3,
        "copy": lambda: [("zip", "id")],
        "check+pick": lambda: [(refund(), "extreme")],
        "pick+copy": lambda: [("zip", "extreme")],
        "steps+copy": lambda: [("zip", "id")] * 2,
        "steps+check": lambda: [(refund(), "id"), (refund(), "id")],
        "steps+pick": lambda: [("wrap", "extreme")] * 2,
        "check+pick+copy": lambda: [(refund(), "extreme"), ("zip", "id")],
    }[kind]()
    return make_data(rng, kind, operations, eligible)


def expected_writes(data: dict) -> list[tuple]:
    """The (tool, order, zip) writes that the policy asks for."""
    by_id = {order["id"]: order for order in data["orders"]}
    return [
        (TOOL_OF[op["verb"]] if allowed(op["verb"], by_id[op["order"]]) else "deny_request", op["order"], op["zip"])
        for op in data["operations"]
    ]


class DeskEpisode:
    """One customer at the desk: tools over the orders, and a scripted user."""

    def __init__(self, data: dict) -> None:
        self.data = data
        self.orders = {order["id"]: dict(order) for order in data["orders"]}
        self.writes: list[tuple] = []
        self.looked_up: list[str] = []
        self.answers: list[str] = []
        self.transferred = False
        self.over = False
        self.errors = 0
        self.turns = 0
        self.introduced = not data["anonymous"]
        opening = f"I am customer {data['customer']}. " if self.introduced else ""
        self.messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": opening + data["request"]}]

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """Answer an assistant message with tool results, or with the user's reply to a message without calls."""
        self.turns += 1
        replies = [self._call(call["function"]) for call in message.get("tool_calls") or []]
        if not replies:
            replies = self._hear(message.get("content") or "")
        if self.errors > MAX_ERRORS or self.turns >= MAX_TURNS:
            self.over = True
        return ([] if self.over else replies), self.over

    def _hear(self, text: str) -> list[Message]:
        if not self.introduced and ASK in text:
            self.introduced = True
            return [{"role": "user", "content": f"I am customer {self.data['customer']}."}]
        self.answers.append(text)
        self.over = True
        return []

    def _call(self, function: dict) -> Message:
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        result = None
        if isinstance(arguments, dict) and name in ARGUMENTS and set(ARGUMENTS[name]) == set(arguments):
            usable = all(isinstance(value, str) for value in arguments.values())
            result = self._run(name, arguments) if usable else None
        if result is None:
            self.errors += 1
            result = {"error": "invalid call"}
        return {"role": "tool", "name": name, "content": json.dumps(result)}

    def _run(self, name: str, arguments: dict) -> object:
        if name == "transfer_to_human":
            self.transferred = self.over = True
            return {"ok": True}
        if name == "list_orders":
            return list(self.orders) if arguments["customer_id"] == self.data["customer"] else None
        order_id = arguments["order_id"]
        if order_id not in self.orders:
            return None
        if name == "get_order":
            self.looked_up.append(order_id)
            return {"status": self.orders[order_id]["status"], "age": self.orders[order_id]["age"]}
        zip_code = arguments.get("zip", "")
        if name == "update_zip" and not zip_code.isdigit():
            return None
        self.writes.append((name, order_id, zip_code))
        return {"ok": True}

    def parts(self) -> dict[str, float]:
        """Named score parts, each 0 or 1: database, information, closing."""
        data, text = self.data, " ".join(self.answers)
        informed = not data["question"] or [status for status in STATUSES if status in text] == [
            self.orders[data["question"]]["status"]
        ]
        closed = self.transferred and not self.answers if data["human"] else bool(self.answers) and not self.transferred
        # A write once made stays made: comparing all writes as a multiset fails duplicates and extras alike.
        right = sorted(self.writes) == sorted(expected_writes(data))
        return {"database": float(right), "information": float(informed), "closing": float(closed)}


def reference_calls(data: dict) -> list[Message]:
    """The assistant messages that solve a task by the book."""

    def call(name: str, *values: str) -> Message:
        function = {"name": name, "arguments": dict(zip(ARGUMENTS[name], values, strict=True))}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    if data["human"]:
        return [call("transfer_to_human")]
    messages = [{"role": "assistant", "content": ASK}] if data["anonymous"] else []
    messages.append(call("list_orders", data["customer"]))
    answer = CLOSING
    if data["question"]:
        messages.append(call("get_order", data["question"]))
        answer = STATUS_ANSWER + next(o["status"] for o in data["orders"] if o["id"] == data["question"]) + "."
    for operation, (tool, order_id, zip_code) in zip(data["operations"], expected_writes(data), strict=True):
        if operation["verb"] in ("cancel", "return"):
            messages.append(call("get_order", order_id))
        messages.append(call(tool, order_id, *([zip_code] if zip_code else [])))
    return [*messages, {"role": "assistant", "content": answer + THANKS}]


class ServiceDesk:
    """The benchmark.

    Args:
        mix: one of `MIXES`; decides how often each kind of task is asked.
    """

    tools = TOOLS
    eligible = 0.15
    """Share of cancellations and returns that the policy allows: low, so that an unchecked write is seldom right."""

    def __init__(self, *, mix: Literal["single", "mixed", "rare", "compound"] = "mixed") -> None:
        self.mix = mix
        self.name = f"servicedesk-{mix}"

    def tasks(self, split: str, count: int) -> list[dict]:
        """The first `count` tasks of a split."""
        return [
            {"id": f"{self.name}/{split}/{i:05d}", "split": split, "data": self.make(split, i)} for i in range(count)
        ]

    def make(self, split: str, index: int) -> dict:
        """Data of one task."""
        rng = random.Random(f"{self.name}-{split}-{index}")
        kind = rng.choices(list(MIXES[self.mix]), list(MIXES[self.mix].values()))[0]
        return make_kind(rng, kind, self.eligible)

    def open(self, task: dict) -> DeskEpisode:
        """Open a task as an episode."""
        return DeskEpisode(task["data"])

    def replay(self, task: dict, messages: list[Message]) -> DeskEpisode:
        """Play the recorded assistant messages again: what the tools said is recomputed, not believed."""
        episode = self.open(task)
        for message in messages:
            if message["role"] == "assistant" and not episode.over:
                episode.step(message)
        return episode

    def score(self, task: dict, messages: list[Message]) -> dict:
        """1 if every part holds, else 0."""
        parts = self.replay(task, messages).parts()
        success = min(parts.values()) == 1.0
        return {"reward": float(success), "success": success, "parts": parts}

    def reference(self, task: dict) -> list[Message]:
        """The assistant messages that solve a task by the book."""
        return reference_calls(task["data"])


DIFFICULTY = 0


def last_write(messages: list[Message]) -> dict:
    """The last write among the messages, to be changed in its place."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    return [function for function in calls if function["name"] in WRITES][-1]


class Trainee(ServiceDesk):
    """The desk narrowed to one capability. A subclass says which operations are wanted, and how well they were done."""

    def __init__(self) -> None:
        pass

    def requests(self, rng: random.Random) -> dict:
        """Arguments of `make_data`: wanted operations, share of eligible targets, zip digits."""
        raise NotImplementedError

    def skill(self, episode: DeskEpisode, expected: list[tuple]) -> float:
        """How much of the capability the episode showed, in [0, 1]."""
        raise NotImplementedError

    def broken(self, task: dict) -> list[Message]:
        """The reference solution with just the capability's step broken."""
        raise NotImplementedError

    def hint(self, task: dict) -> str:
        """What the capability comes to in this task."""
        raise NotImplementedError

    def make(self, split: str, index: int) -> dict:
        """Data of one task; another difficulty, other tasks."""
        rng = random.Random(f"{self.name}-{DIFFICULTY}-{split}-{index}")
        return make_data(rng, self.name, **self.requests(rng))

    def score(self, task: dict, messages: list[Message]) -> dict:
        """Half for the capability (0.9 skill, 0.1 a proper closing), half for exact success: partial credit alone
        is gamed by extra writes, success alone gives no spread within a group."""
        episode = self.replay(task, messages)
        parts = episode.parts()
        skill = self.skill(episode, expected_writes(task["data"]))
        success = min(parts.values()) == 1.0
        reward = 0.45 * skill + 0.05 * parts["closing"] + 0.5 * success
        return {"reward": reward, "success": success, "parts": {**parts, "skill": skill}}


def near(orders: list, written: str, meant: str) -> float:
    """1 for the record that was meant, less than half for another, by the distance in rank."""
    ranked = sorted(orders)
    distance = abs(ranked.index(written) - ranked.index(meant)) / (len(ranked) - 1)
    return 1.0 if distance == 0 else 0.4 * (1 - distance)


def in_place(written: str, digits: str) -> float:
    """Share of the digits in place."""
    return sum(a == b for a, b in zip(written, digits)) / len(digits) * (len(written) == len(digits))


def judged(episode: DeskEpisode, write: tuple, verb: str) -> float:
    """A third for having looked at the order written to, two thirds for having decided by what it says."""
    looked = write[1] in episode.looked_up
    right = TOOL_OF[verb] if allowed(verb, episode.orders[write[1]]) else "deny_request"
    return (looked + 2 * (write[0] == right)) / 3


def finished(episode: DeskEpisode, asked: set) -> float:
    """Share of the (tool, order) pairs asked for that were written, one alternative each, less 0.2 for each stray
    write."""
    orders = {order_id for _, order_id in asked}
    done = len({order_id for tool, order_id, _ in episode.writes if (tool, order_id) in asked})
    return max(0.0, done / len(orders) - 0.2 * (len(episode.writes) - done))


def mean(values: list) -> float:
    """The mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def decided_wrongly(messages: list[Message], data: dict) -> list[Message]:
    """The last cancellation or return decided against what the record says."""
    operation = [one for one in data["operations"] if one["verb"] in ("cancel", "return")][-1]
    written = write_on(messages, operation["order"])
    written["name"] = TOOL_OF[operation["verb"]] if written["name"] == "deny_request" else "deny_request"
    return messages


def copied_wrongly(messages: list[Message], data: dict) -> list[Message]:
    """The last digit of the last zip code wrong."""
    operation = [one for one in data["operations"] if one["zip"]][-1]
    written = write_on(messages, operation["order"])["arguments"]
    written["zip"] = written["zip"][:-1] + str((int(written["zip"][-1]) + 1) % 10)
    return messages


def picked_wrongly(messages: list[Message], data: dict) -> list[Message]:
    """The last order that is not named taken for another, which nothing was asked for."""
    operation = [one for one in data["operations"] if one["selector"]][-1]
    asked = [one["order"] for one in data["operations"]]
    others = sorted(order["id"] for order in data["orders"] if order["id"] not in asked)
    taken = others[-1 if operation["selector"] == "oldest" else 0]
    write_on(messages, operation["order"])["arguments"]["order_id"] = taken
    return messages


def left_out(messages: list[Message], data: dict) -> list[Message]:
    """The last write left out."""
    *done, _, closing = messages
    return [*done, closing]


def write_on(messages: list[Message], order_id: str) -> dict:
    """The write on an order among the messages, to be changed in its place."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    return [one for one in calls if one["name"] in WRITES and one["arguments"]["order_id"] == order_id][-1]


class Pair(Trainee):
    """Two capabilities in every task. The skill is the product of theirs: a sum would pay for one without the other,
    and agents settle for that. More writes than were asked for earn nothing."""

    breaks: tuple
    """What breaks the one step in the reference's messages, and what the other."""

    def skills(self, episode: DeskEpisode, expected: list[tuple]) -> tuple[float, float]:
        """How much of either capability the episode showed, in [0, 1]."""
        raise NotImplementedError

    def skill(self, episode: DeskEpisode, expected: list[tuple]) -> float:
        """The product of both."""
        first, second = self.skills(episode, expected)
        return first * second * (len(episode.writes) <= len(expected))

    def broken(self, task: dict) -> list[Message]:
        """One of the two steps broken: in some tasks the one, in some the other."""
        break_step = self.breaks[int(task["data"]["customer"]) % 2]
        return break_step(self.reference(task), task["data"])


class Environment(Pair):
    """New zip codes for two named orders in one request: both of them, every digit in its place."""

    name = "missing_write+wrong_argument"
    breaks = (copied_wrongly, left_out)

    def requests(self, rng: random.Random) -> dict:
        return {"requests": [("zip", "id")] * 2, "eligible": 1.0}

    def skills(self, episode: DeskEpisode, expected: list[tuple]) -> tuple[float, float]:
        """The digits of what was written; and how much of what was asked for was."""
        digits = {order_id: code for _, order_id, code in expected}
        written = [(order_id, code) for tool, order_id, code in episode.writes if tool == "update_zip"]
        copied = mean([in_place(code, digits[order_id]) for order_id, code in written if order_id in digits])
        return copied, finished(episode, {write[:2] for write in expected})

    def hint(self, task: dict) -> str:
        """Which orders, and the digits one by one."""
        codes = [f"{one['order']}: {', '.join(one['zip'])}" for one in task["data"]["operations"]]
        return f"There are {len(codes)} new zip codes, digit by digit: {'; '.join(codes)}."
