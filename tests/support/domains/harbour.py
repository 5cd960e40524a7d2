"""A harbour master: look-ups of two arguments each, berth and day, berth and tide."""

import random

from .domain import Dialogues, Domain, Episode, call, end, tool

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

TOOLS = [
    tool("berth_calendar", "Is a berth free on a day?", "berth", "day"),
    tool("water_depth", "How deep is a berth at a tide?", "berth", "tide"),
    tool("book", "Book a berth for a ship.", "ship", "berth", "day"),
    tool("queue", "Put a ship into the queue of a day.", "ship", "day"),
]


class Watch(Episode):
    """One task being played."""

    policy, done, tools, turns = POLICY, DONE, TOOLS, 12

    def run(self, name: str, arguments: dict) -> dict:
        """The answer to a call in the right form."""
        if name == "berth_calendar":
            known = self.data["calendar"].get(f"{arguments['berth']} {arguments['day']}")
            return {"state": known} if known else {"error": "not in the books"}
        if name == "water_depth":
            known = self.data["depths"].get(f"{arguments['berth']} {arguments['tide']}")
            return {"water": known} if known else {"error": "not in the books"}
        return self.write(name, arguments)


class Harbour(Domain):
    """The benchmark.

    Args:
        taken: share of the berths that are taken on the day asked for.
        shallow: share of the berths that are shallow at the tide asked for.
    """

    name, tools = "harbour", TOOLS

    def __init__(self, *, taken: float = 0.35, shallow: float = 0.35) -> None:
        self.taken, self.shallow = taken, shallow

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

    def episode(self, data: dict) -> Watch:
        """Begin a task, known by its data."""
        wishes = [
            f"{s['ship']}, {s['hull']}, wants {s['berth']} on {s['day']} at {s['tide']} tide" for s in data["ships"]
        ]
        return Watch(data, "; ".join(wishes) + ".")

    def parts(self, task: dict, episode: Episode) -> dict[str, float]:
        """The score's parts, but for that of the last words."""
        due = self.play(task["data"], self.reference(task))
        return {"books": float(sorted(episode.writes) == sorted(due.writes))}

    def solution(self, data: dict, habits: set[str]) -> list[dict]:
        """The messages of a solution; with these habits "calendar" or "depth" is not looked up, the "last" is left."""
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
        return [*messages, end(DONE)]


class Demonstrations(Dialogues):
    """Dialogues from which the tiny base learns the harbour, with three bad habits."""

    domain, tools = Harbour, TOOLS
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
