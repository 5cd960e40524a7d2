"""Pass rates of logs by environment, over tasks: counted as rollouts go by.

A log may have as many tasks as rollouts, and an interval over tasks needs the rate of each. So sums by task are kept
in a database that SQLite holds on disk, and only the rates of one environment come back, as an array.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from captrain.evaluation import Bootstrap, mean
from captrain.records import Rollout

SCHEMA = """
CREATE TABLE tally (
    environment TEXT, task TEXT, rollouts INTEGER, passed INTEGER, reward REAL,
    PRIMARY KEY (environment, task)
)"""
ADDITION = """
INSERT INTO tally VALUES (?1, ?2, 1, ?3, ?4)
ON CONFLICT DO UPDATE SET rollouts = rollouts + 1, passed = passed + ?3, reward = reward + ?4"""
TASKS = """
SELECT CAST(sum(passed) AS REAL) / sum(rollouts), sum(reward) / sum(rollouts) FROM tally
WHERE environment = ?1 OR ?1 IS NULL GROUP BY task ORDER BY min(rowid)"""
TOTALS = "SELECT sum(rollouts), sum(passed) FROM tally WHERE environment = ?1 OR ?1 IS NULL"
TRIALS = """
SELECT min(trials), max(trials), avg(passed = trials)
FROM (SELECT sum(rollouts) AS trials, sum(passed) AS passed FROM tally GROUP BY task)"""


@dataclass(frozen=True)
class EnvironmentOutcomes:
    """What the rollouts of one environment came to: how many there are, of how many tasks, how many passed; the pass
    rate over tasks with its 95% interval, and the mean reward over tasks."""

    environment: str
    rollouts: int
    tasks: int
    passed: int
    rate: float
    low: float
    high: float
    reward: float


class OutcomeTally:
    """Counts rollouts that have a verdict."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)  # a file that SQLite removes
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(SCHEMA)
        self._database.execute("BEGIN")

    def add(self, rollout: Rollout) -> None:
        """Count a rollout in; one without a verdict is none."""
        if rollout.outcome != "error":
            reward = rollout.score.reward if rollout.score else 0.0
            row = (rollout.environment, rollout.task.id, rollout.outcome == "passed", reward)
            self._database.execute(ADDITION, row)

    def environments(self) -> Iterator[EnvironmentOutcomes]:
        """By environment, in the order in which they came, and all together where they are several."""
        query = "SELECT environment FROM tally GROUP BY environment ORDER BY min(rowid)"
        names: list[str | None] = [name for (name,) in self._database.execute(query)]
        for name in names + ([None] if len(names) > 1 else []):
            yield self._outcomes(name)

    def _outcomes(self, environment: str | None) -> EnvironmentOutcomes:
        rows = self._database.execute(TASKS, (environment,))
        tasks: NDArray[np.void] = np.fromiter(rows, dtype=[("rate", float), ("reward", float)])
        rates = np.ascontiguousarray(tasks["rate"])
        low, high = Bootstrap(len(rates), 2000, 0.95, 0).interval(rates)
        rollouts, passed = self._database.execute(TOTALS, (environment,)).fetchone()
        reward = mean(np.ascontiguousarray(tasks["reward"]))
        return EnvironmentOutcomes(environment or "all", rollouts, len(rates), passed, mean(rates), low, high, reward)

    def repeated(self) -> tuple[int, float] | None:
        """How often every task was played and the share of tasks of which every trial passed, where all were played
        equally often and more than once."""
        least, most, share = self._database.execute(TRIALS).fetchone()
        return (least, share) if least is not None and least == most > 1 else None
