# pyright: reportAttributeAccessIssue=false
"""Operations of workers whose environment scores a record by replaying it.

Such a worker has a description of its environment (`survey`), and episodes of the task at a place ("split/number").
These have `messages`, `answer(message)`, which returns what answers an assistant message, and `verdict()`, which
returns `{"reward", "parts"}` of the episode so far.
"""

from contextlib import suppress

from worker_loop import Episode, Episodes


class NotRepeatable(Exception):
    """The same messages got other answers: the reward depends on more than the record."""


def texts(messages):
    """What everybody but the agent says, with roles."""
    return [(message["role"], message.get("content") or "") for message in messages if message["role"] != "assistant"]


class ReplayableEpisode(Episode):
    """An episode that ends when its environment says so, and after at most `turns` messages of the agent."""

    turns = 0

    def opening(self):
        """See `worker_loop.Episode`."""
        return self.messages

    def take(self, role, message):
        """See `worker_loop.Episode`."""
        replies = self.answer(message)
        self.turns -= 1
        if self.turns <= 0:
            self.turn = None
        return replies


def operations(survey, make):
    """All operations of the worker.

    Args:
        survey: describes the environment: its splits, its tools, its world.
        make: opens an episode of the task at a place.
    """

    def hello():
        """Survey the environment during the start, which may take long. Its faults are reported by the first request
        that needs it."""
        with suppress(Exception):
            survey()

    def evaluate(place, messages):
        """The environment's own reward of a record, which is replayed from the start."""
        actions = [message for message in messages if message["role"] == "assistant"]
        answers = [[]]
        """The opening, then what answers each of the actions."""
        for message in messages:
            if message["role"] == "assistant":
                answers.append([])
            else:
                answers[-1].append(message)
        episode = make(place)
        try:
            replies = episode.messages
            for number, recorded in enumerate(answers):
                # If the record was cut off after the last action, the answer was never recorded.
                is_unread = number == len(actions) > 0 and not recorded
                if not is_unread and texts(recorded) != texts(replies):
                    raise NotRepeatable(
                        f"task {place} answers otherwise when its record is played again ({str(texts(replies))[:80]!r},"
                        f" and was {str(texts(recorded))[:80]!r}): it cannot be scored"
                    )
                if number == len(actions) or episode.turn is None:
                    break
                replies = episode.take("agent", actions[number])
            return episode.verdict()
        finally:
            episode.close()

    return [*Episodes(make).operations(), survey, hello, evaluate]
