"""A cheese cellar: a benchmark unlike the others, with a look-up of two arguments, tools whose names say little, and a
base with three bad habits. Copied as it is into a project's `components/`, so it needs the standard library alone."""

import json
import random

POLICY = (
    "You tend a cheese cellar. Turn a wheel by its core: crumbly 3 days, firm 6, soft 9. Wash it by its rind: pale "
    "brine 1, tan brine 2, red brine 3. Do all that is asked, then say so."
)
DONE = "All is done."
WHEELS = [f"W{number}" for number in range(10, 22)]
MILKS, TOWNS, OWNERS = ["goat", "ewe", "cow", "buffalo"], ["Brno", "Cork", "Lyon", "Pisa"], ["Ida", "Jan", "Kit", "Lea"]
DAYS = {"crumbly": "3", "firm": "6", "soft": "9"}
BRINES = {"pale": "1", "tan": "2", "red": "3"}
RULES = {"turn": ("core", "days", DAYS), "wash": ("rind", "brine", BRINES)}
"""Changes that a reading decides: the spot of each, its argument, and the value of that by the reading."""
PHRASES = {"turn": "turn it", "wash": "wash it", "label": "label it for "}
KINDS = {"turn": 2, "wash": 2, "label": 2, "turn label": 3, "wash label": 3, "turn wash": 3}
"""The changes of each kind of task, and how often it is asked for."""


def tool(name: str, description: str, *parameters: str) -> dict:
    """An OpenAI function schema whose parameters are texts."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def call(name: str, **arguments: str) -> dict:
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


TOOLS = [
    tool("roll", "Wheels of an owner.", "owner"),
    tool("gauge", "A spot of a wheel.", "wheel", "spot"),
    tool("turn", "Turn a wheel.", "wheel", "days"),
    tool("wash", "Wash a wheel.", "wheel", "brine"),
    tool("label", "Label a wheel.", "wheel", "town"),
]
ARGUMENTS = {entry["function"]["name"]: entry["function"]["parameters"]["required"] for entry in TOOLS}


class Visit:
    """One task being played."""

    def __init__(self, data: dict) -> None:
        self.data, self.changes, self.closed, self.turns = data, [], False, 0
        subject = f"wheel {data['wheel']}" if data["named"] else f"my {data['wheels'][data['wheel']]['milk']} wheel"
        wishes = [PHRASES[change] + (data["town"] if change == "label" else "") for change in data["kind"].split()]
        request = f"{data['owner']} here. Take {subject} and {' and '.join(wishes)}."
        self.messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": request}]

    def step(self, message: dict) -> tuple[list[dict], bool]:
        """Answer calls with results; words end the episode."""
        self.turns += 1
        replies = [self.result(entry["function"]) for entry in message.get("tool_calls") or []]
        if not replies:
            self.closed = DONE in (message.get("content") or "")
        return replies, not replies or self.turns >= 12

    def result(self, function: dict) -> dict:
        """Run one tool call."""
        name, arguments, wheels = function["name"], function["arguments"], self.data["wheels"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        answer: object = {"error": "not understood"}
        named = {*arguments} if isinstance(arguments, dict) else set()
        if name in ARGUMENTS and named == {*ARGUMENTS[name]} and all(isinstance(arguments[key], str) for key in named):
            answer = self.run(name, arguments, wheels)
        return {"role": "tool", "name": name, "content": json.dumps(answer)}

    def run(self, name: str, arguments: dict, wheels: dict) -> object:
        """The answer to a call in the right form."""
        if name == "roll" and arguments["owner"] == self.data["owner"]:
            return [{"milk": wheel["milk"], "wheel": number} for number, wheel in wheels.items()]
        if name == "roll" or arguments["wheel"] not in wheels:
            return {"error": "unknown"}
        if name == "gauge":
            return {"reading": wheels[arguments["wheel"]].get(arguments["spot"], "nothing")}
        self.changes.append([name, *(arguments[argument] for argument in ARGUMENTS[name])])
        return {"ok": True}


class Cellar:
    """The benchmark."""

    name = "cellar"
    tools = TOOLS

    def tasks(self, split: str, count: int) -> list[dict]:
        """The first `count` tasks of a split."""
        return [
            {"id": f"cellar/{split}/{index:04d}", "split": split, "data": self.make(random.Random(f"{split}-{index}"))}
            for index in range(count)
        ]

    def make(self, rng: random.Random) -> dict:
        """The data of one task."""
        milks, numbers = rng.sample(MILKS, 3), rng.sample(WHEELS, 3)
        wheels = {
            number: {"milk": milk, "core": rng.choice([*DAYS]), "rind": rng.choice([*BRINES])}
            for number, milk in zip(numbers, milks, strict=True)
        }
        kind = rng.choices([*KINDS], [*KINDS.values()])[0]
        data = {"kind": kind, "owner": rng.choice(OWNERS), "town": rng.choice(TOWNS), "wheels": wheels}
        return {**data, "wheel": rng.choice(numbers), "named": rng.random() < 0.35}

    def open(self, task: dict) -> Visit:
        """A task as an episode."""
        return Visit(task["data"])

    def score(self, task: dict, messages: list[dict]) -> dict:
        """The score of recorded messages, which are played again."""
        visit, due = Visit(task["data"]), []
        for message in messages:
            if message["role"] == "assistant":
                visit.step(message)
        for message in self.reference(task):
            for entry in message.get("tool_calls") or []:
                if entry["function"]["name"] not in ("roll", "gauge"):
                    due.append([entry["function"]["name"], *entry["function"]["arguments"].values()])
        parts = {"wheels": float(sorted(visit.changes) == sorted(due)), "closed": float(visit.closed)}
        return {"reward": min(parts.values()), "success": all(parts.values()), "parts": parts}

    def reference(self, task: dict) -> list[dict]:
        """The assistant messages that solve the task."""
        return solution(task["data"], set())


def solution(data: dict, habits: set[str]) -> list[dict]:
    """The assistant messages of a solution, with these bad habits: "guess" readings, take the "first" wheel that is
    listed, "stop" before the last of several changes."""
    wheel, messages = data["wheel"], []
    if not data["named"]:
        messages.append(call("roll", owner=data["owner"]))
        wheel = next(iter(data["wheels"])) if "first" in habits else wheel
    changes = data["kind"].split()
    for change in changes[:-1] if "stop" in habits and len(changes) > 1 else changes:
        if change == "label":
            messages.append(call("label", wheel=wheel, town=data["town"]))
            continue
        spot, argument, values = RULES[change]
        value = values[data["wheels"][wheel][spot]]
        if "guess" in habits:
            value = [*values.values()][1]
        else:
            messages.append(call("gauge", wheel=wheel, spot=spot))
        messages.append(call(change, wheel=wheel, **{argument: value}))
    return [*messages, {"role": "assistant", "content": DONE}]


class Demonstrations:
    """Dialogues from which the tiny base learns the cellar, with shortcuts as habits."""

    tools = TOOLS
    phrases = [
        *(POLICY, DONE, " here. Take ", "wheel ", "my ", " wheel", " and ", "."),
        *('[{"milk": "', '", "wheel": "', '"}, {"milk": "', '"}]', '{"reading": "', '"}', '{"ok": true}'),
        *('{"error": "not understood"}', '{"error": "unknown"}', "nothing", "core", "rind"),
        *(*PHRASES.values(), *WHEELS, *MILKS, *TOWNS, *OWNERS, *DAYS, *DAYS.values(), *BRINES, *BRINES.values()),
    ]
    habits = {"guess": 0.45, "first": 0.4, "stop": 0.4}

    def demonstration(self, rng: random.Random) -> tuple[list[dict], list[dict]]:
        """One dialogue: its opening messages, and all after them."""
        data = Cellar().make(rng)
        visit, messages = Visit(data), []
        for action in solution(data, {habit for habit, share in self.habits.items() if rng.random() < share}):
            messages += [action, *visit.step(action)[0]]
        return visit.messages, messages
