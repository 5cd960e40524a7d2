"""The operations of workers that play environments of a standard: one loop for all episodes, records replayed again.

A standard's worker gives two things: what its environment is (`survey`), and episodes, as a coroutine that opens the
task at a place ("split/number"). An episode has `messages`, `tools` and `over`, and the coroutines `take(message)`
(what answers an assistant message), `verdict()` (`{"reward", "parts"}` of what was replayed so far) and `close()`.
"""

import asyncio
import hashlib
import threading
from contextlib import suppress

from worker_loop import BadRequest

LOOP = asyncio.new_event_loop()
SILENCE = {"role": "assistant", "content": ""}


class NotRepeatable(Exception):
    """The same messages were answered otherwise: what an episode is worth hangs on more than its record."""


def wait(coroutine):
    """Run a coroutine in the loop of all episodes, and return what it returns."""
    if not LOOP.is_running():
        threading.Thread(target=LOOP.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, LOOP).result()


def hash_of(paths):
    """Digest of files, by names and bytes."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def files_of(folder):
    """The files of a package that decide what it does."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    skipped = (".", "__pycache__")
    return [path for path in paths if not any(part.startswith(skipped) for part in path.relative_to(folder).parts)]


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


def turns_of(messages):
    """The opening of a record, and (assistant message, what answered it) after it."""
    opening, turns = [], []
    for message in messages:
        if message["role"] == "assistant":
            turns.append((message, []))
        else:
            (turns[-1][1] if turns else opening).append(message)
    return opening, turns


class Operations:
    """The operations of a worker.

    Args:
        survey: gives the survey.
        open_episode: place -> coroutine of an episode.
        turns: assistant messages of an episode at most.
    """

    def __init__(self, survey, open_episode, turns):
        self.make_survey, self.open_episode, self.turns = survey, open_episode, turns
        self.episodes, self.count, self.surveyed = {}, 0, None

    def hello(self):
        """Look at the environment already, since a start may take its time; what is wrong with it is said by the first
        request that needs it."""
        with suppress(Exception):
            self.survey()
        return {}

    def survey(self):
        """Describe the environment, asked for once: its splits, its tools, its world."""
        if self.surveyed is None:
            self.surveyed = self.make_survey()
        return self.surveyed

    def reset(self, place, user="scripted"):
        """Open a task."""
        self.survey()
        episode = wait(self.open_episode(place))
        self.count += 1
        self.episodes[str(self.count)] = [episode, 0]
        return {
            "episode": str(self.count),
            "system": "",
            "tools": episode.tools,
            **observation(episode, episode.messages),
        }

    def step(self, episode, role, message):
        """The agent speaks."""
        if episode not in self.episodes:
            raise BadRequest(f"there is no episode {episode!r}")
        entry = self.episodes[episode]
        if entry[0].over:
            raise BadRequest("the episode is over")
        replies = wait(entry[0].take(message))
        entry[1] += 1
        entry[0].over = entry[0].over or entry[1] >= self.turns
        return observation(entry[0], replies)

    def evaluate(self, place, messages):
        """Return the environment's own reward of a record, which is played again from the start."""
        self.survey()
        return wait(self._evaluate(place, messages))

    async def _evaluate(self, place, messages):
        episode = await self.open_episode(place)
        try:
            opening, turns = turns_of(messages)
            self._compare(place, opening, episode.messages)
            for number, (action, replies) in enumerate(turns):
                if episode.over or number >= self.turns:
                    break
                answers = await episode.take(action)
                # The end of a record that was cut off was answered, too; nobody has read it.
                if replies or number + 1 < len(turns):
                    self._compare(place, replies, answers)
            return await episode.verdict()
        finally:
            await episode.close()

    def _compare(self, place, recorded, replayed):
        for first, second in zip(texts(recorded), texts(replayed)):  # noqa: B905  (Python 3.9)
            if first != second:
                raise NotRepeatable(
                    f"task {place} answers otherwise when its record is played again ({str(second[1])[:80]!r}, and "
                    f"was {str(first[1])[:80]!r}): no score can be had of it"
                )
        if len(texts(recorded)) != len(texts(replayed)):
            raise NotRepeatable(f"task {place} answers more or less when its record is played again")

    def idle(self, place):
        """The record of an agent that says nothing to whatever is asked."""
        self.survey()
        return {"messages": wait(self._idle(place))}

    async def _idle(self, place):
        episode = await self.open_episode(place)
        try:
            messages = list(episode.messages)
            for _ in range(self.turns):
                if episode.over:
                    break
                messages += [SILENCE, *await episode.take(SILENCE)]
            return messages
        finally:
            await episode.close()

    def close(self, episode):
        """Drop an episode."""
        entry = self.episodes.pop(episode, None)
        if entry is not None:
            wait(entry[0].close())
        return {}

    def table(self):
        """By name."""
        operations = (self.hello, self.survey, self.reset, self.step, self.evaluate, self.idle, self.close)
        return {operation.__name__: operation for operation in operations}


def observation(episode, messages):
    """An observation of the protocol."""
    return {"turn": None if episode.over else "agent", "done": episode.over, "messages": messages}
