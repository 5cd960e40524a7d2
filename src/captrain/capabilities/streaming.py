"""The labelling runs of the programmatic analyst over rollouts that lie on disk, in little memory.

What it comes to is what `captrain.capabilities.labelling.label_runs` comes to, candidate by candidate and row by row,
which a test holds. The programmatic analyst labels a rollout alike in every run, so that a rollout is labelled once,
and a byte for each candidate is all that the selection needs of it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from captrain.capabilities.alignment import Toolbox
from captrain.capabilities.labelling import EXAMPLES, pooled, task_numbers
from captrain.capabilities.programmatic import Labeller, propose_drawn
from captrain.capabilities.selection import Counts, Verdicts, code_of
from captrain.records import Capability, JsonObject, Label, Rollout, RolloutLabels, Spool


class LabelRows:
    """One row for every run and rollout, run by run, as often as they are read.

    Args:
        spool: labels of each rollout with all candidates.
        counts: (runs, rollouts) how often a run's resample drew a rollout.
        proposals: the candidates of each run.
    """

    def __init__(self, spool: Spool[RolloutLabels], counts: Counts, proposals: Sequence[Sequence[str]]) -> None:
        self._spool, self._counts, self._proposals = spool, counts, proposals

    def __len__(self) -> int:
        return len(self._spool) * len(self._proposals)

    def __iter__(self) -> Iterator[RolloutLabels]:
        for run, slugs in enumerate(self._proposals):
            for row, count in zip(self._spool, self._counts[run], strict=True):
                labels = {slug: row.labels[slug] for slug in slugs}
                yield row.model_copy(update={"run": run, "count": int(count), "labels": labels})


@dataclass(frozen=True)
class StreamedLabels:
    """Candidates and rows as of `label_runs`; the verdicts as arrays, for `select_by_verdicts`; and of each candidate
    its examples, with the label that finds each of them lacking."""

    candidates: list[Capability]
    rows: LabelRows
    verdicts: Verdicts
    examples: dict[str, list[tuple[Rollout, Label]]]


class _Drawn:
    """Rollouts with the runs that drew them, as often as they are read."""

    def __init__(self, rollouts: Collection[Rollout], counts: Counts) -> None:
        self._rollouts, self._counts = rollouts, counts

    def __iter__(self) -> Iterator[tuple[Rollout, list[int]]]:
        for place, rollout in enumerate(self._rollouts):
            yield rollout, np.flatnonzero(self._counts[:, place]).tolist()


def label_streamed(rollouts: Collection[Rollout], tools: list[JsonObject], runs: int, seed: int) -> StreamedLabels:
    """Propose and label in `runs` runs, each on its own resample of the tasks.

    Args:
        rollouts: diagnostic rollouts without faults, of which some passed and some failed; they are read four times.
        tools: the tool schemas of the environment.
        runs: number of runs.
        seed: of the resamples.
    """
    tasks, toolbox = task_numbers(rollouts), Toolbox(tools)
    repeated = np.bincount(tasks)[tasks] > 1
    counts = resample_counts(int(tasks.max()) + 1, runs, seed)[:, tasks]
    proposals = propose_drawn(_Drawn(rollouts, counts), runs, toolbox)
    pool = pooled(proposals)
    is_candidate = np.array([[slug in {entry.id for entry in run} for run in proposals] for slug in pool], bool)
    is_candidate = is_candidate.reshape(len(pool), runs)
    codes, failed = np.zeros((len(pool), 1, len(rollouts)), np.uint8), np.zeros(len(rollouts), bool)
    examples: dict[str, list[tuple[Rollout, Label]]] = {slug: [] for slug in pool}
    spool, labeller = Spool(RolloutLabels), Labeller([*pool.values()], toolbox)
    for place, rollout in enumerate(rollouts):
        assert rollout.outcome != "error"
        labels = labeller.labels(rollout)
        task = rollout.task.id if repeated[place] else ""
        row = RolloutLabels(run=0, rollout=rollout.id, task=task, outcome=rollout.outcome, count=0, labels=labels)
        spool.add(row)
        codes[:, 0, place] = [code_of(label) for label in labels.values()]
        failed[place] = rollout.outcome == "failed"
        for slug, label in labels.items() if failed[place] else ():
            if label.verdict == "LACKING" and len(examples[slug]) < EXAMPLES:
                examples[slug].append((rollout, label))
    candidates = [
        capability.model_copy(update={"examples": [rollout.id for rollout, _ in examples[slug]]})
        for slug, capability in pool.items()
    ]
    slugs = [[slug for slug, flag in zip(pool, is_candidate[:, run], strict=True) if flag] for run in range(runs)]
    verdicts = Verdicts(codes, counts, is_candidate, failed, tasks)
    return StreamedLabels(candidates, LabelRows(spool, counts, slugs), verdicts, examples)


def resample_counts(tasks: int, runs: int, seed: int) -> Counts:
    """How often the resample of each run draws each task, (runs, tasks), in as few bytes as that takes."""
    counts = np.zeros((runs, tasks), np.uint8)
    for run in range(runs):
        draw = np.random.default_rng([seed, run]).integers(tasks, size=tasks)
        row = np.bincount(draw, minlength=tasks)
        counts = counts.astype(np.promote_types(counts.dtype, np.min_scalar_type(row.max())), copy=False)
        counts[run] = row
    return counts
