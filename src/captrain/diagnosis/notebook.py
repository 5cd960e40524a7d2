"""A diagnosis from Python, with defaults: `captrain.diagnose("log.jsonl")`, its records and pandas frames.

>>> diagnosis = captrain.diagnose("docs/examples/servicedesk.jsonl")
>>> diagnosis.causes.loc["wrong_argument", "failures"]
18
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import pandas as pd

from captrain.capabilities import CAUSES
from captrain.diagnosis import diagnosis as rules
from captrain.diagnosis.advice import advise
from captrain.diagnosis.report import publish_diagnosis
from captrain.diagnosis.rollouts import DiagnosedRollout
from captrain.interop import Choices, Logs, logs_of_rollouts, logs_of_rows, read_logs
from captrain.records import Rollout, counted
from captrain.run import SelectionSettings

RUNS = 10
LogPaths = Path | str | Iterable[Path | str]
LogRows = Iterable[Rollout] | Iterable[Mapping[str, object]] | pd.DataFrame


@dataclass(frozen=True, repr=False)
class NotebookDiagnosis:
    """A diagnosis as records (`rollouts`) and as frames; `diagnosis` has everything."""

    diagnosis: rules.Diagnosis

    def __repr__(self) -> str:
        return "\n".join([self._summary(), self.causes.to_string()] if len(self.causes) else [self._summary()])

    def _repr_html_(self) -> str:
        """The same as an HTML table."""
        return f"<p>{escape(self._summary())}</p>{self.causes.to_html() if len(self.causes) else ''}"

    def _summary(self) -> str:
        account, shortage = self.diagnosis.account, self.diagnosis.shortage
        counts = f"{counted(len(self.diagnosis.logs.rollouts), 'rollout')}, {account.failures} failed"
        summary = f"{counts}, unexplained: {account.unexplained} of {account.failures}"
        return f"{summary}; nothing can be concluded: {shortage}" if shortage else summary

    @cached_property
    def rollouts(self) -> list[DiagnosedRollout]:
        """Every rollout with its causes, in the order of the logs."""
        return [*self.diagnosis.diagnosed.rollouts]

    @property
    def causes(self) -> pd.DataFrame:
        """A row for each cause, the most frequent first: `failures` with it as primary cause, their `share`,
        `secondary` (failures with it as another cause), `passed` rollouts with it, and whether it is `of_agent`."""
        failures = self.diagnosis.account.failures or math.nan
        rows = [
            (kind, tally.primary, tally.primary / failures, tally.secondary, tally.passed, CAUSES[kind].of_agent)
            for kind, tally in self.diagnosis.account.shares
        ]
        columns = ["cause", "failures", "share", "secondary", "passed", "of_agent"]
        return pd.DataFrame(rows, columns=columns).set_index("cause")

    @property
    def failures(self) -> pd.DataFrame:
        """A row for each failed rollout: `agent`, `task`, `trial`, `cause` (None: unexplained), `message`,
        `evidence`, `grade`, `secondary` causes, and `suspicions` against its reference."""
        names = ["cause", "message", "evidence", "grade"]
        rows = [
            (
                *(row.rollout, row.agent, row.task, row.trial),
                *(getattr(row.primary, name, None) for name in names),
                [cause.cause for cause in row.secondary],
                row.suspicions,
            )
            for row in self.rollouts
            if row.outcome == "failed"
        ]
        columns = ["rollout", "agent", "task", "trial", *names, "secondary", "suspicions"]
        return pd.DataFrame(rows, columns=columns).set_index("rollout")

    @property
    def suspects(self) -> pd.DataFrame:
        """A row for each rollout with a suspect reference: `task`, `outcome`, `reasons`."""
        rows = [(row.rollout, row.task, row.outcome, row.suspicions) for row in self.rollouts if row.suspicions]
        return pd.DataFrame(rows, columns=["rollout", "task", "outcome", "reasons"]).set_index("rollout")

    @property
    def ranking(self) -> pd.DataFrame:
        """A row for each cause as ranked: `gap`, its interval, `coverage`, `runs_retained`, whether it is
        `selected`, and the `reason`; empty if nothing could be compared."""
        columns = ["id", "gap", "gap_low", "gap_high", "coverage", "runs_retained", "selected", "reason"]
        report = self.diagnosis.report
        return pd.DataFrame(report["candidates"] if report else [], columns=columns).set_index("id")

    @property
    def advice(self) -> pd.DataFrame:
        """A row for each advice: its subject and the actions."""
        rows = [(entry.subject, "; ".join(entry.actions)) for entry in advise(self.diagnosis)]
        return pd.DataFrame(rows, columns=["subject", "action"]).set_index("subject")

    def save(self, folder: Path | str) -> list[Path]:
        """Write the files of `captrain diagnose`; returns their paths."""
        return publish_diagnosis(self.diagnosis, Path(folder))


def diagnose(
    logs: LogPaths | LogRows,
    *,
    scores: Path | str | None = None,
    outcome: str = "",
    pass_at: float | None = None,
    messages: str = "",
    agent: str = "",
    delta: float = 0.2,
    coverage: float = 0.1,
    agreement: int = 8,
    count: int = 4,
    seed: int = 0,
) -> NotebookDiagnosis:
    """Diagnose why rollouts failed and what the agent lacks; the settings are those of `captrain diagnose`.

    Args:
        logs: a file or folder, or several; or data in memory: rollouts, dicts in any row format of docs/formats.md, or
            a frame with a row for each rollout.
        scores: CSV of outcomes, whose first column names a trace, session, file or task.
        outcome, messages, agent: fields that hold the outcome, the messages and the name of the agent.
        pass_at: least reward of a passed rollout; by default 1.
        delta: least gap.
        coverage: least coverage.
        agreement: labelling runs, of 10, that must agree.
        count: most causes selected.
        seed: of the resamples.

    Raises:
        UserError: the logs cannot be read.
    """
    selection = SelectionSettings(
        delta=delta, coverage=coverage, agreement=agreement, confidence=0.95, floor=0.0, resamples=1000
    )
    source = _read(logs, Path(scores) if scores else None, Choices(outcome, pass_at, messages, agent))
    return NotebookDiagnosis(rules.diagnose(source, selection, runs=RUNS, count=count, seed=seed))


def _read(logs: LogPaths | LogRows, scores: Path | None, choices: Choices) -> Logs:
    if isinstance(logs, pd.DataFrame):
        return logs_of_rows(logs, scores, choices)
    entries = [logs] if isinstance(logs, Path | str) else [*logs]
    if entries and all(isinstance(entry, Path | str) for entry in entries):
        return read_logs([Path(str(entry)) for entry in entries], scores, choices=choices)
    if all(isinstance(entry, Rollout) for entry in entries):
        return logs_of_rollouts(entry for entry in entries if isinstance(entry, Rollout))
    return logs_of_rows(entries, scores, choices)
