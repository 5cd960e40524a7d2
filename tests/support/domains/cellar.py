"""A cheese cellar: a benchmark unlike the others, with a look-up of two arguments, tools whose names say little, and a
base with three bad habits."""

import random

from .domain import Dialogues, Domain, Episode, call, end, tool

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

TOOLS = [
    tool("roll", "Wheels of an owner.", "owner"),
    tool("gauge", "A spot of a wheel.", "wheel", "spot"),
    tool("turn", "Turn a wheel.", "wheel", "days"),
    tool("wash", "Wash a wheel.", "wheel", "brine"),
    tool("label", "Label a wheel.", "wheel", "town"),
]


class Visit(Episode):
    """One task being played."""

    policy, done, tools, turns, refusal = POLICY, DONE, TOOLS, 12, "not understood"

    def run(self, name: str, arguments: dict) -> object:
        """The answer to a call in the right form."""
        wheels = self.data["wheels"]
        if name == "roll" and arguments["owner"] == self.data["owner"]:
            return [{"milk": wheel["milk"], "wheel": number} for number, wheel in wheels.items()]
        if name == "roll" or arguments["wheel"] not in wheels:
            return {"error": "unknown"}
        if name == "gauge":
            return {"reading": wheels[arguments["wheel"]].get(arguments["spot"], "nothing")}
        return self.write(name, arguments)


class Cellar(Domain):
    """The benchmark."""

    name, tools = "cellar", TOOLS

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

    def episode(self, data: dict) -> Visit:
        """Begin a task, known by its data."""
        subject = f"wheel {data['wheel']}" if data["named"] else f"my {data['wheels'][data['wheel']]['milk']} wheel"
        wishes = [PHRASES[change] + (data["town"] if change == "label" else "") for change in data["kind"].split()]
        return Visit(data, f"{data['owner']} here. Take {subject} and {' and '.join(wishes)}.")

    def parts(self, task: dict, episode: Episode) -> dict[str, float]:
        """The score's parts, but for that of the last words."""
        due = self.play(task["data"], self.reference(task))
        return {"wheels": float(sorted(episode.writes) == sorted(due.writes))}

    def solution(self, data: dict, habits: set[str]) -> list[dict]:
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
        return [*messages, end(DONE)]


class Demonstrations(Dialogues):
    """Dialogues from which the tiny base learns the cellar, with shortcuts as habits."""

    domain, tools = Cellar, TOOLS
    phrases = [
        *(POLICY, DONE, " here. Take ", "wheel ", "my ", " wheel", " and ", "."),
        *('[{"milk": "', '", "wheel": "', '"}, {"milk": "', '"}]', '{"reading": "', '"}', '{"ok": true}'),
        *('{"error": "not understood"}', '{"error": "unknown"}', "nothing", "core", "rind"),
        *(*PHRASES.values(), *WHEELS, *MILKS, *TOWNS, *OWNERS, *DAYS, *DAYS.values(), *BRINES, *BRINES.values()),
    ]
    habits = {"guess": 0.45, "first": 0.4, "stop": 0.4}
