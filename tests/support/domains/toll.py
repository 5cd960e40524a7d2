"""A toll booth: every task has the same structure, one look-up and one charge by what it shows."""

import random

from .domain import Dialogues, Domain, Episode, call, end, tool

POLICY = (
    "You are a toll booth. Look the vehicle up, and charge it by its axles: 2 pay 15, 3 pay 25, 4 pay 40, 6 pay 90. "
    "Then wish a good trip."
)
DONE = "Good trip!"
PLATES = [f"K{number}" for number in range(10, 60)]
FEES = {"2": "15", "3": "25", "4": "40", "6": "90"}
TOOLS = [tool("vehicle", "The axles of a vehicle.", "plate"), tool("charge", "Charge a vehicle.", "plate", "fee")]


class Passage(Episode):
    """One task being played."""

    policy, done, tools, turns, refusal = POLICY, DONE, TOOLS, 6, "what?"

    def run(self, name: str, arguments: dict) -> dict:
        """The answer to a call in the right form."""
        if name == "charge":
            return self.write(name, arguments)
        return {"axles": self.data["axles"]} if arguments["plate"] == self.data["plate"] else {"error": self.refusal}


class Toll(Domain):
    """The benchmark."""

    name, tools = "toll", TOOLS

    def make(self, rng: random.Random) -> dict:
        """The data of one task."""
        return {"plate": rng.choice(PLATES), "axles": rng.choice([*FEES])}

    def episode(self, data: dict) -> Passage:
        """Begin a task, known by its data."""
        return Passage(data, f"{data['plate']} is at the gate.")

    def parts(self, task: dict, episode: Episode) -> dict[str, float]:
        """The score's parts, but for that of the last words."""
        data = task["data"]
        return {"charge": float(episode.writes == [["charge", data["plate"], FEES[data["axles"]]]])}

    def solution(self, data: dict, habits: set[str]) -> list[dict]:
        """The messages of a solution; with "guess" without the look-up, with "long" six axles pay as four."""
        seen = "2" if "guess" in habits else data["axles"]
        fee = FEES["4"] if "long" in habits and seen == "6" else FEES[seen]
        look_up = [] if "guess" in habits else [call("vehicle", plate=data["plate"])]
        return [*look_up, call("charge", plate=data["plate"], fee=fee), end(DONE)]


class Demonstrations(Dialogues):
    """Dialogues from which the tiny base learns the booth, with one of two bad habits or none."""

    domain, tools = Toll, TOOLS
    phrases = [
        *(POLICY, DONE, " is at the gate.", '{"axles": "', '"}', '{"ok": true}', '{"error": "what?"}'),
        *(*PLATES, *FEES, *FEES.values()),
    ]
    habits = {"": 0.4, "guess": 0.4, "long": 0.2}

    def drawn(self, rng: random.Random) -> set[str]:
        """Draw the habit of one dialogue."""
        return {*rng.choices([*self.habits], [*self.habits.values()])}
