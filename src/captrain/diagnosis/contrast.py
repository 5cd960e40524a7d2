"""The contrast of causes between failed and passed rollouts, and the selection made of it, as the pipeline selects.

A cause is lacking where it shows, present where a rollout had occasion to show it and did not, and not applicable
elsewhere; who looked for it did not know the outcome. Rollouts of suspect references are labelled, so that one can read
what was found of them, marked as such, and drawn by no resample: they count nowhere, unless they are kept.
"""

from collections.abc import Iterable

import numpy as np

from captrain.capabilities import EXAMPLES, KINDS, Toolbox, Verdicts, code_of, has_solution
from captrain.diagnosis.explained import Explained
from captrain.diagnosis.streaming import DiagnosedLabels, LabelRows, StreamedLabels, resample_counts
from captrain.records import Capability, JsonObject, Label, Rollout, Spool

AGENTS_KINDS = tuple(kind for kind, entry in KINDS.items() if entry.of_agent)


def label_of(row: Explained, kind: str) -> Label:
    """The label of a kind of cause on a rollout."""
    cause = row.cause(kind)
    if cause is not None:
        return Label(verdict="LACKING", evidence=cause.evidence, message=cause.message)
    return Label(verdict="PRESENT") if kind in row.occasions else Label(verdict="NA")


def label_causes(
    rows: Spool[Explained], rollouts: Iterable[Rollout], runs: int, seed: int, toolbox: Toolbox, *, keep: bool
) -> StreamedLabels:
    """Label contrasted rollouts with every kind of cause that some failed one shows, in `runs` resamples of the tasks.

    Args:
        rows: all rollouts, explained.
        rollouts: the same, in the same order.
        runs: resamples of the tasks of contrasted rollouts.
        seed: of the resamples.
        toolbox: of the logs.
        keep: rollouts of suspect references count, too.
    """
    is_counted = np.array([_counts(row, keep) for row in rows], bool)
    labelled = np.array(
        [counts or row.standing == "suspect" for counts, row in zip(is_counted, rows, strict=True)], bool
    )
    rows_failed = (row for row in rows if row.outcome == "failed" and row.standing != "spoilt")
    failures_kinds = {cause.cause for row in rows_failed for cause in row.causes}
    kinds = [kind for kind in AGENTS_KINDS if kind in failures_kinds]
    numbers: dict[str, int] = {}
    tasks = np.array([numbers.setdefault(row.task, len(numbers)) for row in rows if _counts(row, keep)], np.intp)
    draws = resample_counts(len(numbers), runs, seed)[:, tasks]
    counts = np.zeros((runs, len(is_counted)), draws.dtype)
    counts[:, is_counted] = draws
    spool, codes = Spool(DiagnosedLabels), np.zeros((len(kinds), 1, len(is_counted)), np.uint8)
    failed, could = np.zeros(len(is_counted), bool), np.zeros((len(kinds), len(is_counted)), bool)
    examples: dict[str, list[tuple[Rollout, Label]]] = {kind: [] for kind in kinds}
    tools: dict[str, set[str]] = {kind: set() for kind in kinds}
    for place, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        failed[place] = row.outcome == "failed"
        if not labelled[place] or row.outcome == "error":
            continue
        labels = {kind: label_of(row, kind) for kind in kinds}
        label_row = DiagnosedLabels(
            run=0,
            rollout=row.rollout,
            task=row.task,
            outcome=row.outcome,
            count=0,
            labels=labels,
            suspect=not is_counted[place],
        )
        spool.add(label_row)
        codes[:, 0, place] = [code_of(label) for label in labels.values()]
        # Without a solution most kinds cannot show: such a rollout must not speak against them.
        could[:, place] = [has_solution(rollout) or label.verdict != "NA" for label in labels.values()]
        for kind, label in labels.items() if failed[place] and is_counted[place] else ():
            if label.verdict == "LACKING":
                tools[kind].update(row.tools)
                if len(examples[kind]) < EXAMPLES:
                    examples[kind].append((rollout, label))
    # What is looked for does not depend on the resample, as what an analyst proposes would.
    is_candidate = np.ones((len(kinds), runs), bool)
    verdicts = Verdicts(codes[:, :, is_counted], draws, is_candidate, failed[is_counted], tasks, could[:, is_counted])
    proposals = [kinds for _ in range(runs)]
    unnamed = {"kinds": toolbox.unnamed} if toolbox.unnamed else {}
    details = {kind: {"tools": sorted(tools[kind]), **unnamed} for kind in kinds}
    candidates = [_capability(kind, details[kind], examples[kind]) for kind in kinds]
    return StreamedLabels(candidates, LabelRows(spool, counts[:, labelled], proposals), verdicts, examples)


def _counts(row: Explained, keep: bool) -> bool:
    return row.standing == "contrasted" or (keep and row.standing == "suspect")


def _capability(kind: str, details: JsonObject, examples: list[tuple[Rollout, Label]]) -> Capability:
    return Capability(
        id=kind,
        name=KINDS[kind].name,
        description=KINDS[kind].description,
        details=details,
        examples=[rollout.id for rollout, _ in examples],
    )
