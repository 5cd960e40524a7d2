"""An environment that rewards any text."""

from collections.abc import Callable
from pathlib import Path

# Pays for ASCII letters, so that a model that says anything earns a little. Every `flat`-th task pays the same for
# everything.
LETTERS = '''"""Say letters."""


class Episode:
    def __init__(self, data):
        self.left = data["turns"]
        self.messages = [{{"role": "system", "content": "Talk."}}, {{"role": "user", "content": data["say"]}}]

    def step(self, message):
        self.left -= 1
        return ([{{"role": "user", "content": f"Go on, {{self.left}} more."}}] if self.left else []), not self.left


class Environment:
    name = "{name}"
    tools = []

    def tasks(self, split, count):
        data = [{{"i": i, "say": f"Say {{i}}.", "turns": 1 + i % 3}} for i in range(count)]
        return [{{"id": f"{name}/{{split}}/{{i}}", "split": split, "data": one}} for i, one in enumerate(data)]

    def open(self, task):
        return Episode(task["data"])

    def score(self, task, messages):
        said = "".join(message["content"] for message in messages if message["role"] == "assistant")
        letters = sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))
        reward = 0.5 if {flat} and task["data"]["i"] % {flat} == 0 else letters
        return {{"reward": reward, "success": reward > 0.5, "parts": {{"letters": letters}}}}

    def reference(self, task):
        return [{{"role": "assistant", "content": "yes"}}] * task["data"]["turns"]
'''


Letters = Callable[..., Path]
"""Writes such an environment file, given its name, `flat`, and its folder."""
