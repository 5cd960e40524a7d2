"""Parts that domains share: calls whose arguments are texts, an episode that answers them, tasks, scores, dialogues.

`copies.py` puts it into the files that a project gets, so it needs the standard library alone.
"""

import json
import random


def tool(name: str, description: str, *parameters: str) -> dict:
    """An OpenAI function schema whose parameters are texts."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def call(name: str, **arguments: str) -> dict:
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def end(content: str) -> dict:
    """An assistant message of words alone."""
    return {"role": "assistant", "content": content}


class Episode:
    """One task being played.

    Args:
        data: of the task.
        request: words of the user.
    """

    policy: str
    done: str
    """Words that close the task."""
    tools: list[dict]
    turns: int
    """Messages of the assistant at the most."""
    refusal = "no such call"
    """The answer to a call that names no tool, or other arguments than the tool has."""

    def __init__(self, data: dict, request: str) -> None:
        self.data, self.writes, self.closed, self.played = data, [], False, 0
        self.messages = [{"role": "system", "content": self.policy}, {"role": "user", "content": request}]

    def step(self, message: dict) -> tuple[list[dict], bool]:
        """Answer calls with results; words end the episode."""
        self.played += 1
        replies = [self.result(entry["function"]) for entry in message.get("tool_calls") or []]
        if not replies:
            self.closed = self.done in (message.get("content") or "")
        return replies, not replies or self.played >= self.turns

    def result(self, function: dict) -> dict:
        """Run one tool call."""
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        named = {*arguments} if isinstance(arguments, dict) else set()
        answer: object = {"error": self.refusal}
        if named == {*self.parameters(name)} and all(isinstance(arguments[key], str) for key in named):
            answer = self.run(name, arguments)
        return {"role": "tool", "name": name, "content": json.dumps(answer)}

    def parameters(self, name: str) -> list:
        """Names of the arguments of a tool; of one that is not there something that no call has."""
        known = {entry["function"]["name"]: entry["function"]["parameters"]["required"] for entry in self.tools}
        return known.get(name, [0])

    def run(self, name: str, arguments: dict) -> object:
        """The answer to a call in the right form."""
        raise NotImplementedError

    def write(self, name: str, arguments: dict) -> dict:
        """Note a change down."""
        self.writes.append([name, *(arguments[key] for key in self.parameters(name))])
        return {"ok": True}


class Domain:
    """A benchmark of such episodes."""

    name: str
    tools: list[dict]

    def tasks(self, split: str, count: int) -> list[dict]:
        """The first `count` tasks of a split."""
        return [
            {"id": f"{self.name}/{split}/{i:04d}", "split": split, "data": self.make(random.Random(f"{split}-{i}"))}
            for i in range(count)
        ]

    def make(self, rng: random.Random) -> dict:
        """The data of one task."""
        raise NotImplementedError

    def episode(self, data: dict) -> Episode:
        """Begin a task, known by its data."""
        raise NotImplementedError

    def open(self, task: dict) -> Episode:
        """A task as an episode."""
        return self.episode(task["data"])

    def play(self, data: dict, messages: list[dict]) -> Episode:
        """A task after the assistant's messages among these."""
        episode = self.episode(data)
        for message in messages:
            if message["role"] == "assistant":
                episode.step(message)
        return episode

    def score(self, task: dict, messages: list[dict]) -> dict:
        """The score of recorded messages, which are played again."""
        episode = self.play(task["data"], messages)
        parts = {**self.parts(task, episode), "closed": float(episode.closed)}
        return {"reward": min(parts.values()), "success": all(parts.values()), "parts": parts}

    def parts(self, task: dict, episode: Episode) -> dict[str, float]:
        """The score's parts, but for that of the last words."""
        raise NotImplementedError

    def reference(self, task: dict) -> list[dict]:
        """The assistant messages that solve the task."""
        return self.solution(task["data"], set())

    def solution(self, data: dict, habits: set[str]) -> list[dict]:
        """The assistant messages of a solution, with these bad habits."""
        raise NotImplementedError


class Dialogues:
    """Dialogues from which the tiny base learns a domain, with bad habits."""

    domain: type[Domain]
    tools: list[dict]
    phrases: list[str]
    habits: dict[str, float]
    """Share of the dialogues that follow each."""

    def drawn(self, rng: random.Random) -> set[str]:
        """Draw the habits of one dialogue."""
        return {habit for habit, share in self.habits.items() if rng.random() < share}

    def demonstration(self, rng: random.Random) -> tuple[list[dict], list[dict]]:
        """One dialogue: its opening messages, and all after them."""
        domain, messages = self.domain(), []
        data = domain.make(rng)
        episode = domain.episode(data)
        for action in domain.solution(data, self.drawn(rng)):
            messages += [action, *episode.step(action)[0]]
        return episode.messages, messages
