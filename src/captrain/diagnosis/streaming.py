"""Labels of rollouts that lie on disk, in little memory.

Rollouts that a program labels have the same label in every run, so each is labelled once, and a byte for each candidate
is all that the selection needs of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from captrain.capabilities import Counts, Verdicts
from captrain.records import Capability, Label, Rollout, RolloutLabels, Spool


class DiagnosedLabels(RolloutLabels):
    """Labels of a rollout of logs. `suspect`: its reference is suspect, so that it counts nowhere."""

    suspect: bool = False


class LabelRows:
    """One row for every run and rollout, run by run, as often as they are read.

    Args:
        spool: labels of each rollout with all candidates.
        counts: (runs, rollouts) how often a run's resample drew a rollout.
        proposals: the candidates of each run.
    """

    def __init__(self, spool: Spool[DiagnosedLabels], counts: Counts, proposals: Sequence[Sequence[str]]) -> None:
        self._spool, self._counts, self._proposals = spool, counts, proposals

    def __len__(self) -> int:
        return len(self._spool) * len(self._proposals)

    def __iter__(self) -> Iterator[DiagnosedLabels]:
        for run, slugs in enumerate(self._proposals):
            for row, count in zip(self._spool, self._counts[run], strict=True):
                labels = {slug: row.labels[slug] for slug in slugs}
                yield row.model_copy(update={"run": run, "count": int(count), "labels": labels})


@dataclass(frozen=True)
class StreamedLabels:
    """Candidates and rows as of `captrain.capabilities.label_runs`; the verdicts as arrays, for `select_by_verdicts`;
    and of each candidate its examples, with the label that finds each of them lacking."""

    candidates: list[Capability]
    rows: LabelRows
    verdicts: Verdicts
    examples: dict[str, list[tuple[Rollout, Label]]]


def resample_counts(tasks: int, runs: int, seed: int) -> Counts:
    """Count how often the resample of each run draws each task: (runs, tasks), in as few bytes as that takes."""
    counts = np.zeros((runs, tasks), np.uint8)
    for run in range(runs):
        draw = np.random.default_rng([seed, run]).integers(tasks, size=tasks)
        row = np.bincount(draw, minlength=tasks)
        counts = counts.astype(np.promote_types(counts.dtype, np.min_scalar_type(row.max())), copy=False)
        counts[run] = row
    return counts
