"""Samples and scores for the endpoint, in batches, on one thread: what waits at the same time is computed together.

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


@dataclass(frozen=True)
class Scoring:
    """A prompt whose next token is not sampled: its log-probability for each of some tokens, among these."""

    adapter: str
    prompt: list[int]
    tokens: list[int]
    future: Future[list[float]] = field(default_factory=Future)


class Sampler:
    """Samples completions in batches, on one thread.

    Args:
        policy: whose model, whose batch and whose longest dialogue.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self._queue: queue.SimpleQueue[Sampling | Scoring | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, sampling: Sampling) -> Future[EngineRow]:
        """Wait in line; the row is complete when the future is done."""
        self._queue.put(sampling)
        return sampling.future

    def score(self, scoring: Scoring) -> Future[list[float]]:
        """Wait in line; see `Scoring`."""
        self._queue.put(scoring)
        return scoring.future

    def close(self) -> None:
        """Finish what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            queued: list[Sampling | Scoring] = [first]
            while not self._queue.empty():
                if (more := self._queue.get()) is None:
                    self._queue.put(None)
                    break
                queued.append(more)
            for scoring in queued:
                if isinstance(scoring, Scoring):
                    self._score(scoring)
            samplings = [sampling for sampling in queued if isinstance(sampling, Sampling)]
            for group in dict.fromkeys(sampling.group for sampling in samplings):
                alike = [sampling for sampling in samplings if sampling.group == group]
                for start in range(0, len(alike), self.policy.batch):
                    self._sample(group, alike[start : start + self.policy.batch])

    def _score(self, scoring: Scoring) -> None:
        with _telling([scoring.future]):
            scoring.future.set_result(self.policy.scores(scoring.prompt, scoring.tokens, scoring.adapter))

    def _sample(self, group: tuple[str, float, int], batch: Sequence[Sampling]) -> None:
        adapter, temperature, tokens = group
        with _telling([sampling.future for sampling in batch]):
            sample_rows(
                self.policy.decoder(adapter),
                [sampling.row for sampling in batch],
                ends=self.policy.ends,
                temperature=temperature,
                max_tokens=tokens,
                max_length=self.policy.max_length,
            )
            for sampling in batch:
                sampling.future.set_result(sampling.row)


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
