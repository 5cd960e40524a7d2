"""A harbour master: look-ups of two arguments each, berth and day, berth and tide."""

import json
import random

POLICY = (
    "You run a harbour. Book a berth only where it is free on that day, and deep at that tide when the ship has a "
    "keel. Otherwise queue the ship. End with: All ships are seen to."
)
DONE = "All ships are seen to."
SHIPS = ["Orca", "Petrel", "Gannet", "Skua", "Tern", "Heron"]
BERTHS = [f"B{number}" for number in range(1, 9)]
DAYS = ["Monday", "Tuesday", "Friday", "Sunday"]
TIDES = ["low", "high"]
HULLS = ["flat", "keel"]


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
    tool("berth_calendar", "Is a berth free on a day?", "berth", "day"),
    tool("water_depth", "How deep is a berth at a tide?", "berth", "tide"),
    tool("book", "Book a berth for a ship.", "ship", "berth", "day"),
    tool("queue", "Put a ship into the queue of a day.", "ship", "day"),
]
PARAMETERS = {entry["function"]["name"]: entry["function"]["parameters"]["required"] for entry in TOOLS}


class Watch:
    """One task being played."""

    def __init__(self, data: dict) -> None:
        self.data, self.writes, self.closed, self.turns = data, [], False, 0
        wishes = [
            f"{s['ship']}, {s['hull']}, wants {s['berth']} on {s['day']} at {s['tide']} tide" for s in data["ships"]
        ]
        self.messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": "; ".join(wishes) + "."}]

    def step(self, message: dict) -> tuple[list[dict], bool]:
        """Answer calls with results; words end the episode."""
        self.turns += 1
        replies = [self.result(entry["function"]) for entry in message.get("tool_calls") or []]
        if not replies:
            self.closed = DONE in (message.get("content") or "")
        return replies, not replies or self.turns >= 12

    def result(self, function: dict) -> dict:
        """Run one tool call."""
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        named = {*arguments} if isinstance(arguments, dict) else set()
        answer: dict = {"error": "no such call"}
        if named == {*PARAMETERS.get(name, [0])} and all(isinstance(arguments[key], str) for key in named):
            answer = self.run(name, arguments)
        return {"role": "tool", "name": name, "content": json.dumps(answer)}

    def run(self, name: str, arguments: dict) -> dict:
        """The answer to a call in the right form."""
        if name == "berth_calendar":
            known = self.data["calendar"].get(f"{arguments['berth']} {arguments['day']}")
            return {"state": known} if known else {"error": "not in the books"}
        if name == "water_depth":
            known = self.data["depths"].get(f"{arguments['berth']} {arguments['tide']}")
            return {"water": known} if known else {"error": "not in the books"}
        self.writes.append([name, *(arguments[key] for key in PARAMETERS[name])])
        return {"ok": True}


class Harbour:
    """The benchmark.

    Args:
        taken: share of the berths that are taken on the day asked for.
        shallow: share of the berths that are shallow at the tide asked for.
    """

    name = "harbour"
    tools = TOOLS

    def __init__(self, *, taken: float = 0.35, shallow: float = 0.35) -> None:
        self.taken, self.shallow = taken, shallow

    def tasks(self, split: str, count: int) -> list[dict]:
        """The first `count` tasks of a split."""
        return [
            {"id": f"harbour/{split}/{index:04d}", "split": split, "data": self.make(random.Random(f"{split}-{index}"))}
            for index in range(count)
        ]

    def make(self, rng: random.Random) -> dict:
        """The data of one task."""
        count = rng.choice([1, 1, 2])
        names, berths = rng.sample(SHIPS, count), rng.sample(BERTHS, count)
        ships = [
            {
                "ship": name,
                "hull": rng.choice(HULLS),
                "berth": berth,
                "day": rng.choice(DAYS),
                "tide": rng.choice(TIDES),
            }
            for name, berth in zip(names, berths, strict=True)
        ]
        calendar, depths = {}, {}
        for ship in ships:
            calendar[f"{ship['berth']} {ship['day']}"] = "taken" if rng.random() < self.taken else "free"
            depths[f"{ship['berth']} {ship['tide']}"] = "shallow" if rng.random() < self.shallow else "deep"
        kind = "two ships" if count == 2 else f"one {ships[0]['hull']}"
        return {"kind": kind, "ships": ships, "calendar": calendar, "depths": depths}

    def open(self, task: dict) -> Watch:
        """A task as an episode."""
        return Watch(task["data"])

    def score(self, task: dict, messages: list[dict]) -> dict:
        """The score of recorded messages, which are played again."""
        watch, due = Watch(task["data"]), Watch(task["data"])
        for episode, said in ((watch, messages), (due, self.reference(task))):
            for message in said:
                if message["role"] == "assistant":
                    episode.step(message)
        parts = {"books": float(sorted(watch.writes) == sorted(due.writes)), "closed": float(watch.closed)}
        return {"reward": min(parts.values()), "success": all(parts.values()), "parts": parts}

    def reference(self, task: dict) -> list[dict]:
        """The assistant messages that solve the task."""
        return solution(task["data"], set())


def solution(data: dict, habits: set[str]) -> list[dict]:
    """The messages of a solution, with these habits: "calendar" and "depth" are not looked up, "last" ship is left."""
    messages, ships = [], data["ships"]
    for ship in ships[:1] if "last" in habits else ships:
        free = deep = True
        if "calendar" not in habits:
            messages.append(call("berth_calendar", berth=ship["berth"], day=ship["day"]))
            free = data["calendar"][f"{ship['berth']} {ship['day']}"] == "free"
        if free and ship["hull"] == "keel" and "depth" not in habits:
            messages.append(call("water_depth", berth=ship["berth"], tide=ship["tide"]))
            deep = data["depths"][f"{ship['berth']} {ship['tide']}"] == "deep"
        if free and deep:
            messages.append(call("book", ship=ship["ship"], berth=ship["berth"], day=ship["day"]))
        else:
            messages.append(call("queue", ship=ship["ship"], day=ship["day"]))
    return [*messages, {"role": "assistant", "content": DONE}]


class Demonstrations:
    """Dialogues from which the tiny base learns the harbour, with three bad habits."""

    tools = TOOLS
    phrases = [
        *(POLICY, DONE, ", ", " wants ", " on ", " at ", " tide", "; ", "."),
        *(
            '{"state": "',
            '{"water": "',
            '"}',
            '{"ok": true}',
            '{"error": "no such call"}',
            '{"error": "not in the books"}',
        ),
        *(*SHIPS, *BERTHS, *DAYS, *TIDES, *HULLS, "free", "taken", "deep", "shallow"),
    ]
    habits = {"calendar": 0.4, "depth": 0.5, "last": 0.5}

    def demonstration(self, rng: random.Random) -> tuple[list[dict], list[dict]]:
        """One dialogue: its opening messages, and all after them."""
        data = Harbour().make(rng)
        watch, messages = Watch(data), []
        for action in solution(data, {habit for habit, share in self.habits.items() if rng.random() < share}):
            messages += [action, *watch.step(action)[0]]
        return watch.messages, messages
