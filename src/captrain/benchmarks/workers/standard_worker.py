# pyright: reportAttributeAccessIssue=false
"""The operations of workers that play environments of a standard: one loop for all episodes, records replayed again.

A standard's worker gives two things: what its environment is (`survey`), and episodes of the task at a place
("split/number"), which have `messages`, `answer(message)` (what answers an assistant message) and `verdict()`
(`{"reward", "parts"}` of what was played so far).
"""

import asyncio
import hashlib
import threading
from contextlib import suppress

import worker_loop
from worker_loop import BadRequest

LOOP = asyncio.new_event_loop()


class NotRepeatable(Exception):
    """The same messages were answered otherwise: what an episode is worth hangs on more than its record."""


def wait(function, *values, **arguments):
    """Call a function in the loop of all episodes, and return what it gives when it is awaited."""

    async def awaited():
        return await function(*values, **arguments)

    if not LOOP.is_running():
        threading.Thread(target=LOOP.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(awaited(), LOOP).result()


def hash_of(folder):
    """Digest of the files of a package that decide what it does, by names and bytes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
            total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def placed(place, listing):
    """(split, number) of a task.

    Raises:
        BadRequest: there is none.
    """
    split, _, number = place.rpartition("/")
    if split not in listing or not number.isdecimal() or (listing[split] or int(number) + 1) <= int(number):
        raise BadRequest(f"there is no task {place!r}")
    return split, int(number)


def texts(messages):
    """List what others than the agent say in messages, each with its role."""
    return [(message["role"], message.get("content") or "") for message in messages if message["role"] != "assistant"]


class Episode(worker_loop.Episode):
    """An episode that ends when its environment says so, and after `turns` messages of the agent at most."""

    turns = 0

    def opening(self):
        return self.messages

    def take(self, role, message):
        replies = self.answer(message)
        self.turns -= 1
        if self.turns <= 0:
            self.turn = None
        return replies


class Episodes(worker_loop.Episodes):
    """The operations of a worker.

    Args:
        survey: describes the environment: its splits, its tools, its world.
        make: an episode of the task at a place.
    """

    def __init__(self, survey, make):
        super().__init__(make)
        self.survey = survey

    def operations(self):
        """For `serve`."""
        return [*super().operations(), self.survey, self.hello, self.evaluate]

    def hello(self):
        """Look at the environment already, since a start may take its time; what is wrong with it is said by the first
        request that needs it."""
        with suppress(Exception):
            self.survey()

    def evaluate(self, place, messages):
        """Return the environment's own reward of a record, which is played again from the start."""
        answers = [[]]
        """Messages that answer each of the agent's, the opening first."""
        actions = []
        for message in messages:
            if message["role"] == "assistant":
                actions.append(message)
                answers.append([])
            else:
                answers[-1].append(message)
        episode = self.make(place)
        try:
            replies = episode.messages
            for number, recorded in enumerate(answers):
                # The end of a record that was cut off was answered, too; nobody has read it.
                is_unread = number == len(actions) > 0 and not recorded
                if not is_unread and texts(recorded) != texts(replies):
                    raise NotRepeatable(
                        f"task {place} answers otherwise when its record is played again ({str(texts(replies))[:80]!r},"
                        f" and was {str(texts(recorded))[:80]!r}): no score can be had of it"
                    )
                if number == len(actions) or episode.turn is None:
                    break
                replies = episode.take("agent", actions[number])
            return episode.verdict()
        finally:
            episode.close()
