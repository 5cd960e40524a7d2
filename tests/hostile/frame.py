"""An honest environment around a hostile program: `attack` is called at each step, `scored` for each score if it is
there. Stands behind each program in one file."""


class Episode:
    def __init__(self):
        self.messages = [{"role": "user", "content": "Go."}]

    def step(self, message):
        return [{"role": "tool", "content": globals()["attack"](message["content"])}], False


class Environment:
    name = "hostile"
    tools = []

    def tasks(self, split, count):
        return [{"id": f"hostile/{split}/{i}", "split": split, "data": {}} for i in range(count)]

    def open(self, task):
        return Episode()

    def score(self, task, messages):
        honest = {"reward": 0.25, "success": False, "parts": {}}
        return globals()["scored"](task, messages) if "scored" in globals() else honest

    def reference(self, task):
        return [{"role": "assistant", "content": ""}]
