"""A benchmark for tests: meetings in rooms. Pure standard library, so that environments can be derived from it."""

import json
import random

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
POLICY = "You keep the meetings of an office. Look meetings up before you change them. Say so when all is done."


def _tool(name: str, description: str, **parameters: str) -> dict:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("list_meetings", "Meetings of a person.", person="Who."),
    _tool("move_meeting", "Move a meeting.", meeting_id="Which.", time="To when, such as 14:30."),
    _tool("cancel_meeting", "Cancel a meeting.", meeting_id="Which."),
    _tool("book_room", "Book a room for a meeting.", meeting_id="Which.", room="Which room."),
]


class Office:
    """One episode at the desk."""

    def __init__(self, data: dict) -> None:
        self.data, self.changes, self.said = data, [], []
        self.messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": data["request"]}]

    def step(self, message: dict) -> tuple[list[dict], bool]:
        calls = message.get("tool_calls") or []
        if not calls:
            self.said.append(message.get("content") or "")
            return [], True
        return [{"role": "tool", "content": json.dumps(self.call(**call["function"]))} for call in calls], False

    def call(self, name: str, arguments: object) -> object:
        required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
        wanted = required.get(name)
        if wanted is None or not isinstance(arguments, dict) or set(arguments) != set(wanted):
            return {"error": "no such call"}
        if name == "list_meetings":
            return [m for m in self.data["meetings"] if m["person"] == arguments["person"]]
        if arguments["meeting_id"] not in [meeting["id"] for meeting in self.data["meetings"]]:
            return {"error": "no such meeting"}
        self.changes.append([name, arguments])
        return {"ok": True}


class Rooms:
    """The benchmark.

    Args:
        busy: highest number of meetings that a person has.
    """

    name = "rooms"
    tools = TOOLS

    def __init__(self, *, busy: int = 3) -> None:
        self.busy = busy

    def tasks(self, split: str, count: int) -> list[dict]:
        return [{"id": f"rooms/{split}/{i:04d}", "split": split, "data": self.make(split, i)} for i in range(count)]

    def make(self, split: str, index: int) -> dict:
        rng = random.Random(f"{split}-{index}-{self.busy}")
        people = rng.sample(NAMES, 3)
        ids = rng.sample(range(100, 999), 12)
        meetings = [
            {"id": f"m{ids.pop()}", "person": person, "day": day}
            for person in people
            for day in rng.sample(DAYS, rng.randint(2, self.busy))
        ]
        wishes, parts = [], []
        for meeting in rng.sample(meetings, rng.choice([1, 1, 2])):
            kind = rng.choice(["move", "cancel", "book"])
            of = f"{meeting['person']}'s meeting on {meeting['day']}"
            if kind == "move":
                time = f"{rng.randint(8, 18)}:{rng.choice(['00', '15', '30', '45'])}"
                wishes.append(["move_meeting", {"meeting_id": meeting["id"], "time": time}])
                parts.append(f"move {of} to {time}")
            elif kind == "cancel":
                wishes.append(["cancel_meeting", {"meeting_id": meeting["id"]}])
                parts.append(f"cancel {of}")
            else:
                room = f"R{rng.randint(10, 99)}"
                wishes.append(["book_room", {"meeting_id": meeting["id"], "room": room}])
                parts.append(f"book {room} for {of}")
        request = rng.choice(["Please ", "Could you ", "I need you to "]) + " and ".join(parts) + "."
        return {"meetings": meetings, "wishes": wishes, "request": request}

    def open(self, task: dict) -> Office:
        return Office(task["data"])

    def score(self, task: dict, messages: list[dict]) -> dict:
        episode = self.open(task)
        for message in messages:
            if message["role"] == "assistant":
                episode.step(message)
        right = sorted(map(json.dumps, episode.changes)) == sorted(map(json.dumps, task["data"]["wishes"]))
        done = right and bool(episode.said)
        return {"reward": float(done), "success": done, "parts": {"changes": float(right)}}

    def reference(self, task: dict) -> list[dict]:
        messages = []
        by_id = {meeting["id"]: meeting for meeting in task["data"]["meetings"]}
        for name, arguments in task["data"]["wishes"]:
            look_up = ("list_meetings", {"person": by_id[arguments["meeting_id"]]["person"]})
            for tool, given in (look_up, (name, arguments)):
                call = {"type": "function", "function": {"name": tool, "arguments": given}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        return [*messages, {"role": "assistant", "content": "All is done."}]


class OneKind(Rooms):
    """The benchmark with one kind of task only: change the time of one meeting."""

    def make(self, split: str, index: int) -> dict:
        rng = random.Random(f"{split}-{index}-one")
        [person] = rng.sample(NAMES, 1)
        meeting = {"id": f"m{rng.randint(100, 999)}", "person": person, "day": rng.choice(DAYS)}
        time = f"{rng.randint(8, 18)}:{rng.choice(['00', '15', '30', '45'])}"
        wishes = [["move_meeting", {"meeting_id": meeting["id"], "time": time}]]
        request = f"Please move {person}'s meeting on {meeting['day']} to {time}."
        return {"meetings": [meeting], "wishes": wishes, "request": request}


class Unsolved(Rooms):
    """The benchmark without solutions, and without saying so."""

    def reference(self, task: dict) -> list[dict]:
        return []


class Wordy(Rooms):
    """The benchmark with required last words that the policy does not mention."""

    def score(self, task: dict, messages: list[dict]) -> dict:
        score = super().score(task, messages)
        said = float((messages[-1].get("content") or "") == "All is done.")
        return {**score, "reward": score["reward"] * said, "success": score["success"] and said == 1.0}


class Speechless:
    """Demonstrations by an agent that has the right tools and never calls them."""

    tools = TOOLS
    phrases = [POLICY]

    def demonstration(self, rng: random.Random) -> tuple[list[dict], list[dict]]:
        task = Rooms().tasks("training", 1)[0]
        return Office(task["data"]).messages, [{"role": "assistant", "content": "Done."}]
