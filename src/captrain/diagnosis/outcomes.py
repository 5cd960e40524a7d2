"""Pass rates of logs by environment, over tasks: counted as rollouts go by.

A log may have as many tasks as rollouts, and an interval over tasks needs the rate of each. So sums by task are kept
in a database that SQLite holds on disk, and only the rates of one environment come back, as an array.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from captrain.comparison import Bootstrap, mean
from captrain.records import Rollout

TRIED = 4
"""So many rollouts of a task, of at least two agents, must fail before that alone makes its reference suspect."""
OF = "FROM tally WHERE (environment = ?1 OR ?1 IS NULL) AND (agent = ?2 OR ?2 IS NULL)"
"""Rows of one environment or of all, of one agent or of all."""


@dataclass(frozen=True)
class EnvironmentOutcomes:
    """Outcomes in one environment: the numbers of rollouts, of their tasks and of those that passed; the pass rate over
    tasks with its 95% interval, and the mean reward over tasks."""

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
        self._database.executescript("""
        PRAGMA journal_mode = OFF;
        CREATE TABLE tally (
            environment TEXT, task TEXT, agent TEXT, rollouts INTEGER, passed INTEGER, reward REAL,
            PRIMARY KEY (environment, task, agent)
        );
        BEGIN""")

    def add(self, rollout: Rollout) -> None:
        """Count a rollout in; one without a verdict is none."""
        if rollout.outcome != "error":
            reward = rollout.score.reward if rollout.score else 0.0
            row = (rollout.environment, rollout.task.id, rollout.policy, rollout.outcome == "passed", reward)
            addition = """
            INSERT INTO tally VALUES (?1, ?2, ?3, 1, ?4, ?5)
            ON CONFLICT DO UPDATE SET rollouts = rollouts + 1, passed = passed + ?4, reward = reward + ?5"""
            self._database.execute(addition, row)

    def unpassed(self, environment: str, task: str) -> str | None:
        """Explain why a task that nobody passes is suspect; None where somebody does or too few have tried."""
        query = "SELECT sum(rollouts), sum(passed), count(*) FROM tally WHERE environment = ? AND task = ?"
        count, passed, agents = self._database.execute(query, (environment, task)).fetchone()
        if passed or agents < 2 or count < TRIED:
            return None
        return f"none of {count} rollouts of {agents} agents passes the task"

    def agents(self) -> list[str]:
        """List the agents of the rollouts, in the order in which they came."""
        query = "SELECT agent FROM tally GROUP BY agent ORDER BY min(rowid)"
        return [name for (name,) in self._database.execute(query)]

    def environments(self, agent: str | None = None) -> Iterator[EnvironmentOutcomes]:
        """By environment, in the order in which they came, and all together where they are several; of one agent, or of
        all."""
        query = f"SELECT environment {OF} GROUP BY environment ORDER BY min(rowid)"
        names: list[str | None] = [name for (name,) in self._database.execute(query, (None, agent))]
        for name in names + ([None] if len(names) > 1 else []):
            ratios = "CAST(sum(passed) AS REAL) / sum(rollouts), sum(reward) / sum(rollouts)"
            rows = self._database.execute(f"SELECT {ratios} {OF} GROUP BY task ORDER BY min(rowid)", (name, agent))
            tasks = np.fromiter(rows, dtype=[("rate", float), ("reward", float)])
            rates, rewards = np.ascontiguousarray(tasks["rate"]), np.ascontiguousarray(tasks["reward"])
            low, high = Bootstrap(len(rates), 2000, 0.95, 0).interval(rates)
            totals = self._database.execute(f"SELECT sum(rollouts), sum(passed) {OF}", (name, agent))
            rollouts, passed = totals.fetchone()
            yield EnvironmentOutcomes(
                name or "all", rollouts, len(rates), passed, mean(rates), low, high, mean(rewards)
            )

    def difference(self, first: str, second: str) -> tuple[int, float, float, float] | None:
        """Over the tasks that both agents played: how many there are, and the pass rate of the first minus that of the
        second with its 95% interval, paired by task; None where there is no such task."""
        query = """
        SELECT CAST(a.passed AS REAL) / a.rollouts, CAST(b.passed AS REAL) / b.rollouts FROM tally a JOIN tally b
        ON a.environment = b.environment AND a.task = b.task WHERE a.agent = ? AND b.agent = ? ORDER BY a.rowid"""
        rows = self._database.execute(query, (first, second))
        rates = np.fromiter(rows, dtype=[("first", float), ("second", float)])
        if not len(rates):
            return None
        differences = np.ascontiguousarray(rates["first"] - rates["second"])
        low, high = Bootstrap(len(differences), 2000, 0.95, 0).interval(differences)
        return len(differences), mean(differences), low, high

    def repeated(self) -> tuple[int, float] | None:
        """Return how often every task was played and the share of tasks of which every trial passed; None unless all
        were played equally often and more than once."""
        query = """
        SELECT min(trials), max(trials), avg(passed = trials)
        FROM (SELECT sum(rollouts) AS trials, sum(passed) AS passed FROM tally GROUP BY environment, task)"""
        least, most, share = self._database.execute(query).fetchone()
        return (least, share) if least is not None and least == most > 1 else None
