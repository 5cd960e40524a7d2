"""An observatory whose tasks are known by their outcome alone: no reference solution is written down anywhere."""

import json
import random

POLICY = (
    "You keep a telescope. Ask for the sky before you open the dome, and keep it shut under cloud. Use the filter that "
    "the catalogue has for the object. File every night, and then say goodnight."
)
DONE = "Goodnight."
OBJECTS = ["Vega", "Mira", "Rigel", "Deneb", "Altair", "Spica"]
NIGHTS = [f"night {number}" for number in range(1, 9)]
FILTERS = ["red", "green", "blue"]


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
    tool("sky", "The sky of a night.", "night"),
    tool("catalogue", "The filter of an object.", "object"),
    tool("expose", "Open the dome and expose.", "object", "filter"),
    tool("file", "File a night: exposed or shut.", "night", "entry"),
]
PARAMETERS = {entry["function"]["name"]: entry["function"]["parameters"]["required"] for entry in TOOLS}


class Night:
    """One task being played."""

    def __init__(self, data: dict) -> None:
        self.data, self.exposed, self.filed, self.closed, self.turns = data, [], [], False, 0
        request = f"Observe {data['object']} on {data['night']}."
        self.messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": request}]

    def step(self, message: dict) -> tuple[list[dict], bool]:
        """Answer calls with results; words end the episode."""
        self.turns += 1
        replies = [self.result(entry["function"]) for entry in message.get("tool_calls") or []]
        if not replies:
            self.closed = DONE in (message.get("content") or "")
        return replies, not replies or self.turns >= 10

    def result(self, function: dict) -> dict:
        """Run one tool call."""
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        named = {*arguments} if isinstance(arguments, dict) else set()
        answer: dict = {"error": "nothing there"}
        if named == {*PARAMETERS.get(name, [0])} and all(isinstance(arguments[key], str) for key in named):
            answer = self.run(name, arguments)
        return {"role": "tool", "name": name, "content": json.dumps(answer)}

    def run(self, name: str, arguments: dict) -> dict:
        """The answer to a call in the right form."""
        if name == "sky":
            return {"sky": self.data["sky"]} if arguments["night"] == self.data["night"] else {"error": "nothing there"}
        if name == "catalogue":
            known = arguments["object"] == self.data["object"]
            return {"filter": self.data["filter"]} if known else {"error": "nothing there"}
        (self.exposed if name == "expose" else self.filed).append([arguments[key] for key in PARAMETERS[name]])
        return {"ok": True}


class Telescope:
    """The benchmark. It knows what the night's end must be, and no way there."""

    name = "telescope"
    tools = TOOLS

    def tasks(self, split: str, count: int) -> list[dict]:
        """The first `count` tasks of a split."""
        return [
            {
                "id": f"telescope/{split}/{index:04d}",
                "split": split,
                "data": self.make(random.Random(f"{split}-{index}")),
            }
            for index in range(count)
        ]

    def make(self, rng: random.Random) -> dict:
        """The data of one task."""
        sky = "cloud" if rng.random() < 0.4 else "clear"
        filter_name = rng.choice(FILTERS)
        return {"object": rng.choice(OBJECTS), "night": rng.choice(NIGHTS), "sky": sky, "filter": filter_name}

    def open(self, task: dict) -> Night:
        """A task as an episode."""
        return Night(task["data"])

    def score(self, task: dict, messages: list[dict]) -> dict:
        """The score of recorded messages, which are played again."""
        night, data = Night(task["data"]), task["data"]
        for message in messages:
            if message["role"] == "assistant":
                night.step(message)
        clear = data["sky"] == "clear"
        exposed = night.exposed == ([[data["object"], data["filter"]]] if clear else [])
        filed = night.filed == [[data["night"], "exposed" if clear else "shut"]]
        parts = {"exposed": float(exposed), "filed": float(filed), "closed": float(night.closed)}
        return {"reward": min(parts.values()), "success": all(parts.values()), "parts": parts}

    def reference(self, task: dict) -> list[dict]:
        """None is known."""
        return []


class Demonstrations:
    """Dialogues of a keeper with three bad habits, from which the tiny base learns the observatory."""

    tools = TOOLS
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

    def demonstration(self, rng: random.Random) -> tuple[list[dict], list[dict]]:
        """One dialogue: its opening messages, and all after them."""
        data = Telescope().make(rng)
        bad = {habit for habit, share in self.habits.items() if rng.random() < share}
        actions, clear = [], True
        if "sky" not in bad:
            actions.append(call("sky", night=data["night"]))
            clear = data["sky"] == "clear"
        if clear:
            if "filter" not in bad:
                actions.append(call("catalogue", object=data["object"]))
            actions.append(call("expose", object=data["object"], filter="green" if "filter" in bad else data["filter"]))
        if "file" not in bad:
            actions.append(call("file", night=data["night"], entry="exposed" if clear else "shut"))
        actions.append({"role": "assistant", "content": DONE})
        night, messages = Night(data), []
        for action in actions:
            messages += [action, *night.step(action)[0]]
        return night.messages, messages
