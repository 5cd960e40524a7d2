"""An observatory whose tasks are known by their outcome alone: no reference solution is written down anywhere."""

import random

from .domain import Dialogues, Domain, Episode, call, end, tool

POLICY = (
    "You keep a telescope. Ask for the sky before you open the dome, and keep it shut under cloud. Use the filter that "
    "the catalogue has for the object. File every night, and then say goodnight."
)
DONE = "Goodnight."
OBJECTS = ["Vega", "Mira", "Rigel", "Deneb", "Altair", "Spica"]
NIGHTS = [f"night {number}" for number in range(1, 9)]
FILTERS = ["red", "green", "blue"]

TOOLS = [
    tool("sky", "The sky of a night.", "night"),
    tool("catalogue", "The filter of an object.", "object"),
    tool("expose", "Open the dome and expose.", "object", "filter"),
    tool("file", "File a night: exposed or shut.", "night", "entry"),
]


class Night(Episode):
    """One task being played."""

    policy, done, tools, turns, refusal = POLICY, DONE, TOOLS, 10, "nothing there"

    def run(self, name: str, arguments: dict) -> dict:
        """The answer to a call in the right form."""
        if name == "sky":
            return {"sky": self.data["sky"]} if arguments["night"] == self.data["night"] else {"error": self.refusal}
        if name == "catalogue":
            known = arguments["object"] == self.data["object"]
            return {"filter": self.data["filter"]} if known else {"error": self.refusal}
        return self.write(name, arguments)


class Telescope(Domain):
    """The benchmark. It knows what the night's end must be, and tells no way there."""

    name, tools = "telescope", TOOLS

    def make(self, rng: random.Random) -> dict:
        """The data of one task."""
        sky = "cloud" if rng.random() < 0.4 else "clear"
        filter_name = rng.choice(FILTERS)
        return {"object": rng.choice(OBJECTS), "night": rng.choice(NIGHTS), "sky": sky, "filter": filter_name}

    def episode(self, data: dict) -> Night:
        """Begin a task, known by its data."""
        return Night(data, f"Observe {data['object']} on {data['night']}.")

    def parts(self, task: dict, episode: Episode) -> dict[str, float]:
        """The score's parts, but for that of the last words."""
        data, clear = task["data"], task["data"]["sky"] == "clear"
        exposed, filed = ([write for write in episode.writes if write[0] == name] for name in ("expose", "file"))
        return {
            "exposed": float(exposed == ([["expose", data["object"], data["filter"]]] if clear else [])),
            "filed": float(filed == [["file", data["night"], "exposed" if clear else "shut"]]),
        }

    def reference(self, task: dict) -> list[dict]:
        """None is known."""
        return []

    def solution(self, data: dict, habits: set[str]) -> list[dict]:
        """The messages of a keeper, who may ask for no "sky" or "filter", and "file" nothing."""
        actions, clear = [], True
        if "sky" not in habits:
            actions.append(call("sky", night=data["night"]))
            clear = data["sky"] == "clear"
        if clear:
            if "filter" not in habits:
                actions.append(call("catalogue", object=data["object"]))
            name = "green" if "filter" in habits else data["filter"]
            actions.append(call("expose", object=data["object"], filter=name))
        if "file" not in habits:
            actions.append(call("file", night=data["night"], entry="exposed" if clear else "shut"))
        return [*actions, end(DONE)]


class Demonstrations(Dialogues):
    """Dialogues of a keeper with three bad habits, from which the tiny base learns the observatory."""

    domain, tools = Telescope, TOOLS
    phrases = [
        *(
            POLICY,
            DONE,
            "Observe ",
            " on ",
            ".",
            '{"sky": "',
            '{"filter": "',
            '"}',
            '{"ok": true}',
            '{"error": "nothing there"}',
        ),
        *(*OBJECTS, *NIGHTS, *FILTERS, "cloud", "clear", "exposed", "shut"),
    ]
    habits = {"sky": 0.4, "filter": 0.4, "file": 0.3}
