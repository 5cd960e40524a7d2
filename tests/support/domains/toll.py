"""A toll booth: every task has the same structure, one look-up and one charge by what it shows."""

import json
import random

POLICY = (
    "You are a toll booth. Look the vehicle up, and charge it by its axles: 2 pay 15, 3 pay 25, 4 pay 40, 6 pay 90. "
    "Then wish a good trip."
)
DONE = "Good trip!"
PLATES = [f"K{number}" for number in range(10, 60)]
FEES = {"2": "15", "3": "25", "4": "40", "6": "90"}


def tool(name: str, description: str, *parameters: str) -> dict:
    """An OpenAI function schema whose parameters are texts."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def call(name: str, **arguments: str) -> dict:
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


TOOLS = [tool("vehicle", "The axles of a vehicle.", "plate"), tool("charge", "Charge a vehicle.", "plate", "fee")]


class Passage:
    """One task being played."""

    def __init__(self, data: dict) -> None:
        self.data, self.charges, self.closed, self.turns = data, [], False, 0
        request = f"{data['plate']} is at the gate."
        self.messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": request}]

    def step(self, message: dict) -> tuple[list[dict], bool]:
        """Answer calls with results; words end the episode."""
        self.turns += 1
        replies = [self.result(entry["function"]) for entry in message.get("tool_calls") or []]
        if not replies:
            self.closed = DONE in (message.get("content") or "")
        return replies, not replies or self.turns >= 6

    def result(self, function: dict) -> dict:
        """Run one tool call."""
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = None
        arguments = arguments if isinstance(arguments, dict) else {}
        plate, fee, answer = arguments.get("plate"), arguments.get("fee"), {"error": "what?"}
        if name == "vehicle" and plate == self.data["plate"] and len(arguments) == 1:
            answer = {"axles": self.data["axles"]}
        elif name == "charge" and isinstance(plate, str) and isinstance(fee, str) and len(arguments) == 2:
            self.charges.append([plate, fee])
            answer = {"ok": True}
        return {"role": "tool", "name": name, "content": json.dumps(answer)}


class Toll:
    """The benchmark."""

    name = "toll"
    tools = TOOLS

    def tasks(self, split: str, count: int) -> list[dict]:
        """The first `count` tasks of a split."""
        return [
            {"id": f"toll/{split}/{index:04d}", "split": split, "data": self.make(random.Random(f"{split}-{index}"))}
            for index in range(count)
        ]

    def make(self, rng: random.Random) -> dict:
        """The data of one task."""
        return {"plate": rng.choice(PLATES), "axles": rng.choice([*FEES])}

    def open(self, task: dict) -> Passage:
        """A task as an episode."""
        return Passage(task["data"])

    def score(self, task: dict, messages: list[dict]) -> dict:
        """The score of recorded messages, which are played again."""
        passage, data = Passage(task["data"]), task["data"]
        for message in messages:
            if message["role"] == "assistant":
                passage.step(message)
        charged = passage.charges == [[data["plate"], FEES[data["axles"]]]]
        parts = {"charge": float(charged), "closed": float(passage.closed)}
        return {"reward": min(parts.values()), "success": all(parts.values()), "parts": parts}

    def reference(self, task: dict) -> list[dict]:
        """The assistant messages that solve the task."""
        return solution(task["data"], "")


def solution(data: dict, habit: str) -> list[dict]:
    """The messages of a solution; with the habit "guess" without the look-up, with "long" six axles pay as four."""
    seen = "2" if habit == "guess" else data["axles"]
    fee = FEES["4"] if habit == "long" and seen == "6" else FEES[seen]
    look_up = [] if habit == "guess" else [call("vehicle", plate=data["plate"])]
    return [*look_up, call("charge", plate=data["plate"], fee=fee), {"role": "assistant", "content": DONE}]


class Demonstrations:
    """Dialogues from which the tiny base learns the booth, with two bad habits."""

    tools = TOOLS
    phrases = [
        *(POLICY, DONE, " is at the gate.", '{"axles": "', '"}', '{"ok": true}', '{"error": "what?"}'),
        *(*PLATES, *FEES, *FEES.values()),
    ]

    def demonstration(self, rng: random.Random) -> tuple[list[dict], list[dict]]:
        """One dialogue: its opening messages, and all after them."""
        data = Toll().make(rng)
        passage, messages = Passage(data), []
        for action in solution(data, rng.choices(["", "guess", "long"], [0.4, 0.4, 0.2])[0]):
            messages += [action, *passage.step(action)[0]]
        return passage.messages, messages
