"""Queue of waiting requests, and the thread that samples their completions in batches.

Completions with equal adapter, temperature and token limit share a batch. The order is fair queuing: a request comes
later the more work it needs, and the more requests its client has waiting. So a client with many or large requests
delays mainly itself, and others by at most one batch. Requests whose client may be gone come last. Requests whose
client is gone are dropped, even in the middle of a batch. If the queue is full, the last request in this order is
refused.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException

from captrain.agents import EngineRow, LocalPolicy, sample_rows
from captrain.serving.protection import Client, asking

WAITING = 256
"""Largest number of waiting requests."""
PATIENCE = 0.5
"""Seconds that `Sampler.close` waits for the token that is being computed."""
BUSY = {"retry-after": "1"}
"""Response headers of a refused request that may succeed later."""
Group = tuple[str, float, int]
"""Adapter, temperature and token limit, which all completions of a batch share."""


@dataclass(eq=False)
class Sampling:
    """The completions of one request, which its client waits for.

    Args:
        group: the group of batches that the completions can be sampled in.
        prompt: number of prompt tokens.
        count: number of completions.
        row: makes the engine row of a completion, given its number.
        client: the client of the request.
    """

    group: Group
    prompt: int
    count: int
    row: Callable[[int], EngineRow]
    client: Client = field(default_factory=lambda: asking.get(Client()))
    rows: list[EngineRow] = field(default_factory=list)
    future: Future[list[EngineRow]] = field(default_factory=Future)
    """The completions, once sampled. It is cancelled when the client is gone."""
    lateness: float = 0.0

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key of the request in the queue. Clients that may be gone come last."""
        return self.client.leaving, self.lateness

    def take(self, most: int) -> list[EngineRow]:
        """Make up to `most` further rows for the engine."""
        taken = [self.row(number) for number in range(len(self.rows), min(self.count, len(self.rows) + most))]
        for row in taken:
            row.abandoned = self.future.cancelled
        self.rows += taken
        return taken

    def end(self, error: Exception | None = None) -> None:
        """Give the client its completions, or an error, if it still waits."""
        if self.future.set_running_or_notify_cancel():
            if error is None:
                self.future.set_result(self.rows)
            else:
                self.future.set_exception(error)


class Sampler:
    """Samples completions in batches, on one thread.

    Args:
        policy: provides the model, the batch size and the longest dialogue.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self._waiting: list[Sampling] = []
        self._clock = 0.0
        """Lateness of the request that was sampled last."""
        self._changed, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, sampling: Sampling) -> Future[list[EngineRow]]:
        """Queue completions. The future gets their rows, or an HTTPException if the queue is full."""
        with self._changed:
            self._drop()
            alike = sum(other.client.address == sampling.client.address for other in self._waiting)
            work = sampling.prompt + sampling.count * max(1, sampling.group[2])
            sampling.lateness = self._clock + work * (1 + alike)
            self._waiting.append(sampling)
            if len(self._waiting) > WAITING:
                last = max(self._waiting, key=lambda one: one.order)
                self._waiting.remove(last)
                last.end(
                    HTTPException(503, f"{WAITING} requests are waiting, which is the maximum: try again later", BUSY)
                )
            self._changed.notify()
        return sampling.future

    def close(self) -> None:
        """Sample the remaining requests, then stop. Waits at most `PATIENCE` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(PATIENCE)

    def _drop(self) -> None:
        """Drop requests whose client is gone."""
        self._waiting = [sampling for sampling in self._waiting if not sampling.future.cancelled()]

    def _next(self) -> dict[Sampling, list[EngineRow]]:
        """Wait for requests, and return the rows of the next batch. An empty batch means that the sampler is closed."""
        with self._changed:
            self._drop()
            while not self._waiting and not self._closing:
                self._changed.wait()
                self._drop()
            queue = sorted(self._waiting, key=lambda one: one.order)
            batch = dict[Sampling, list[EngineRow]]()
            room = self.policy.batch
            for sampling in queue:
                if room and sampling.group == queue[0].group:
                    batch[sampling] = sampling.take(room)
                    room -= len(batch[sampling])
                    self._clock = max(self._clock, sampling.lateness)
            self._waiting = [one for one in queue if len(one.rows) < one.count]
        return batch

    def _run(self) -> None:
        while batch := self._next():
            error: Exception | None = None
            try:
                self.sample(next(iter(batch)).group, [row for rows in batch.values() for row in rows])
            except Exception as raised:
                # The waiting clients get the error; the thread goes on.
                logging.exception("a batch of %d requests failed", len(batch))
                error = HTTPException(500, f"{type(raised).__name__}: {raised}")
            for sampling in batch:
                if error is not None or len(sampling.rows) == sampling.count:
                    sampling.end(error)
            with self._changed:
                self._waiting = [sampling for sampling in self._waiting if not sampling.future.done()]

    def sample(self, group: Group, rows: Sequence[EngineRow]) -> None:
        """Sample rows of one group to their ends."""
        adapter, temperature, tokens = group
        sample_rows(
            self.policy.decoder(adapter),
            rows,
            ends=self.policy.ends,
            temperature=temperature,
            max_tokens=tokens,
            max_length=self.policy.max_length,
        )
