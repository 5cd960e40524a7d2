"""The tasks of logs as a target whose every task is held out: an environment made from logs must not repeat them.

What was logged is, as a rule, what an agent is judged by. So these tasks take the place of a benchmark's test split in
the passport: their words and ids may not come back in an environment. Nothing can be played here.
"""

from collections.abc import Sequence

from captrain.errors import UserError
from captrain.records import JsonObject, Message, Rollout

MOST = 1000
"""Tasks that are held out: of each all runs of words are in memory."""


class LoggedEpisode:
    """User messages that open a logged task. A system prompt is no task's own."""

    def __init__(self, rollout: Rollout) -> None:
        roles = [message["role"] for message in rollout.messages]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        self.messages: list[Message] = [message for message in rollout.messages[:end] if message["role"] == "user"]

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """Nothing goes on from a log.

        Raises:
            UserError: always.
        """
        raise UserError("a logged task cannot be played", "bring its benchmark")


class LoggedTasks:
    """Tasks that were played, as a benchmark: the first rollout of each stands for it.

    Args:
        rollouts: of the logs.
        tools: schemas of the tools.
    """

    name = "logs"

    def __init__(self, rollouts: Sequence[Rollout], tools: list[JsonObject]) -> None:
        self.tools = tools
        self._rollouts: dict[str, Rollout] = {}
        for rollout in rollouts:
            if len(self._rollouts) < MOST:
                self._rollouts.setdefault(rollout.task.id, rollout)

    def size(self, split: str) -> int:
        """Count the tasks of a split: all are for tests, none for training, since no environment may repeat them."""
        return len(self._rollouts) if split == "test" else 0

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """The first `count` tasks of a split; only the held-out one has any (see `size`)."""
        tasks = [rollout.task for rollout in self._rollouts.values()]
        return [{"id": task.id, "split": split, "data": task.data} for task in tasks[: min(count, self.size(split))]]

    def open(self, task: JsonObject) -> LoggedEpisode:
        """Open a task at what was asked first."""
        return LoggedEpisode(self._rollouts[task["id"]])

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """Nothing is judged here.

        Raises:
            UserError: always.
        """
        raise UserError("a logged task cannot be judged", "bring its benchmark")

    def reference(self, task: JsonObject) -> list[Message]:
        """The solution that came with the log."""
        return self._rollouts[task["id"]].reference
