"""Samples for the endpoint, in batches, on one thread: what waits at the same time is computed together.

An answer depends on its request alone, never on what is sampled beside it, and a batch that fails ends no other.
"""

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from captrain.policies import EngineRow, LocalPolicy, sample_rows


@dataclass(frozen=True)
class Sampling:
    """One completion to sample; equal `group`s may share a batch: adapter, temperature, tokens at most."""

    group: tuple[str, float, int]
    row: EngineRow
    future: Future[EngineRow] = field(default_factory=Future)


class Sampler:
    """Samples completions in batches, on one thread.

    Args:
        policy: whose model, whose batch and whose longest dialogue.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self._queue: queue.SimpleQueue[Sampling | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, sampling: Sampling) -> Future[EngineRow]:
        """Wait in line; the row is complete when the future is done."""
        self._queue.put(sampling)
        return sampling.future

    def close(self) -> None:
        """Finish what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            queued = [first]
            while not self._queue.empty():
                if (more := self._queue.get()) is None:
                    self._queue.put(None)
                    break
                queued.append(more)
            for group in dict.fromkeys(sampling.group for sampling in queued):
                alike = [sampling for sampling in queued if sampling.group == group]
                for start in range(0, len(alike), self.policy.batch):
                    batch = alike[start : start + self.policy.batch]
                    with _telling([sampling.future for sampling in batch]):
                        self.sample(group, [sampling.row for sampling in batch])
                        for sampling in batch:
                            sampling.future.set_result(sampling.row)

    def sample(self, group: tuple[str, float, int], rows: Sequence[EngineRow]) -> None:
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


@contextmanager
def _telling(futures: Sequence[Future[Any]]) -> Iterator[None]:
    """Pass errors of the thread to those who wait for an answer: nobody waits for the thread itself, which goes on
    whatever fails."""
    try:
        yield
    except Exception as error:
        logging.exception("a batch of %d requests failed", len(futures))
        for future in futures:
            future.set_exception(HTTPException(500, f"{type(error).__name__}: {error}"))
