# pyright: reportAttributeAccessIssue=false
"""Common ground of the workers of benchmarks with a scripted user: results of calls, and replays."""

from typing import Any

import worker_loop

Message = dict[str, Any]


class ScriptedEpisode(worker_loop.Episode):
    """One task being played. It has `result(tool, arguments)`, the text that answers a call of whatever form,
    `refuses(result)`, `state()`, equal in equal worlds, and `score(messages)` of what was played.
    """

    replay: "list[tuple[str, bool, bool]] | None" = None
    """Result of each call so far, whether it was refused, and whether it changed the world; None where nobody asks
    for it."""
    before: object = None
    """State of a replay before its next call."""

    def results(self, message: Message) -> "list[Message]":
        """The tool messages that answer the calls of a message, in order."""
        replies = []
        for call in message.get("tool_calls") or []:
            tool, arguments = worker_loop.call_of(call)
            content = self.result(tool, arguments)
            if self.replay is not None:
                before, self.before = self.before, self.state()
                self.replay.append((content, self.refuses(content), self.before != before))
            identity = call.get("id") if isinstance(call.get("id"), str) else ""
            replies.append({"role": "tool", "tool_call_id": identity, "name": str(tool), "content": content})
        return replies


class Episodes(worker_loop.Episodes):
    """The open episodes, and replays of tasks.

    Args:
        make: see `worker_loop.Episodes`; a log may tell more of a task's world than its id.
    """

    def operations(self):
        """For `serve`."""
        return [*super().operations(), self.replay]

    def replay(self, dialogues: "list[list[Message]]", **task: object) -> "dict[str, Any]":
        """Assistant messages, played in fresh worlds: what each call led to, and the score."""
        replayed = []
        for messages in dialogues:
            episode = self.make(**task)
            episode.opening()
            episode.replay, episode.before = [], episode.state()
            for message in messages:
                if episode.turn is not None:
                    episode.take("agent", message)
            score = episode.score(messages)
            replayed.append({"calls": episode.replay, "parts": score["parts"], "passed": score["success"]})
        return {"replayed": replayed}


def batches(calls: "list[tuple[str, dict[str, Any]]]", rounds: int) -> "list[Message]":
    """Calls, as tool and arguments, in assistant messages: one each but where there are more calls than rounds."""
    size = -(-len(calls) // rounds) or 1
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return [
        {"role": "assistant", "content": "", "tool_calls": functions[start : start + size]}
        for start in range(0, len(functions), size)
    ]
