"""Labels that somebody else made: read from JSON lines, held to a schema, and put to the rule of the selection.

Whoever has labelled rollouts already, by a model of their own or by hand, needs neither the rollouts nor an analyst to
learn what the rule makes of them. A line is one rollout in one labelling run (`LabelLine`); captrain's own
labels.jsonl are such lines. Nothing is resampled: each run stands for itself, as in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from rich.table import Table

from captrain.capabilities import SelectionAccount, select, selection_table, stability_table
from captrain.config import Selection
from captrain.diagnosis.diagnosis import FEW
from captrain.diagnosis.figures import draw_candidates
from captrain.errors import UserError
from captrain.execution import user_outputs
from captrain.records import (
    Capability,
    FileName,
    Label,
    Record,
    RolloutLabels,
    Verdict,
    named_twice,
    publish_json,
    publish_text,
    read_bytes,
    scan,
)

LINE = '{"rollout": "r1", "outcome": "failed", "labels": {"checks first": "LACKING"}}'


MOST_COUNTED = 1_000_000
"""Runs and draws of one rollout at most: sums of them stay exact."""


class ForeignLabel(Label):
    """A verdict as somebody else gave it."""

    message: Annotated[int, Field(ge=0, strict=True)] | None = None


class LabelLine(Record):
    """One rollout in one labelling run.

    run: number of the run; null: that of the file among those read, from 0. rollout: its id, the same in all runs.
    task: what it is a rollout of, where there are several of one task. count: how often the run's resample drew it.
    labels: capability -> verdict, or an object with `verdict`, and `evidence` and `message` where they are known; a
    capability that is absent was no candidate of the run. suspect: its reference is, so that it counts nowhere.
    """

    run: Annotated[int, Field(ge=0, le=MOST_COUNTED, strict=True)] | None = None
    rollout: Annotated[str, Field(min_length=1)]
    task: str = ""
    outcome: Literal["passed", "failed"]
    count: Annotated[int, Field(ge=0, le=MOST_COUNTED, strict=True)] = 1
    labels: dict[FileName, Verdict | ForeignLabel]
    suspect: Annotated[bool, Field(strict=True)] = False


@dataclass(frozen=True)
class LabelDiagnosis:
    """Outcome of the rule on labels: the account of the selection, and why nothing can be concluded, "" where enough
    was read."""

    report: SelectionAccount
    shortage: str


def read_labels(files: Sequence[Path]) -> list[RolloutLabels]:
    """The labels of all files, run by run.

    Raises:
        UserError: a file is missing or has a line of another form, a rollout is labelled twice in a run, or has two
            outcomes or tasks.
    """
    rows: dict[tuple[int, str], RolloutLabels] = {}
    first: dict[str, RolloutLabels] = {}
    for number, path in enumerate(files):
        for line in (line for line in _lines(path) if not line.suspect):
            run = number if line.run is None else line.run
            labels = {
                slug: label if isinstance(label, Label) else Label(verdict=label) for slug, label in line.labels.items()
            }
            row = RolloutLabels(
                run=run, rollout=line.rollout, task=line.task, outcome=line.outcome, count=line.count, labels=labels
            )
            if (run, line.rollout) in rows:
                raise UserError(
                    f"{path}: rollout {line.rollout} is labelled twice in run {run}",
                    'give each run a number of its own in "run", or a file of its own',
                )
            earlier = first.setdefault(line.rollout, row)
            if (earlier.outcome, earlier.task) != (row.outcome, row.task):
                raise UserError(
                    f"{path}: rollout {line.rollout} is {row.outcome} (task {row.task!r}), and {earlier.outcome} "
                    f"(task {earlier.task!r}) in another run",
                    "give different rollouts different ids",
                )
            rows[run, line.rollout] = row
    return [rows[key] for key in sorted(rows, key=lambda key: key[0])]


def _lines(path: Path) -> list[LabelLine]:
    try:
        lines = [line for _, line in scan(path, LabelLine)]
        for number, line in enumerate(read_bytes(path).splitlines(), start=1):
            if line.strip() and (name := named_twice(line)):
                raise UserError(f"{path}, line {number} names {name} twice", "")
    except UserError as error:
        raise UserError(error.problem, f"a line is an object such as {LINE}") from None
    if not lines:
        raise UserError(f"{path} holds no labels", f"a line is an object such as {LINE}")
    return lines


def diagnose_labels(rows: Sequence[RolloutLabels], selection: Selection, count: int, seed: int) -> LabelDiagnosis:
    """Apply the rule of the selection to labels.

    Args:
        rows: from `read_labels`.
        selection: thresholds, as in the pipeline.
        count: capabilities selected at most.
        seed: of the bootstrap over tasks.

    Raises:
        UserError: more runs must agree than there are, or all rollouts have one outcome.
    """
    runs = len({row.run for row in rows})
    if selection.agreement > runs:
        raise UserError(
            f"{selection.agreement} labelling runs must agree, and the labels are of {runs}", f"say --agreement {runs}"
        )
    slugs = dict.fromkeys(slug for row in rows for slug in row.labels)
    candidates = [Capability(id=slug, name=slug.replace("_", " "), description="") for slug in slugs]
    report = select(rows, candidates, selection, count, seed).report
    passed, failed = report["rollouts"]["passed"], report["rollouts"]["failed"]
    if not passed or not failed:
        raise UserError(
            f"{passed} passed and {failed} failed rollouts: there is nothing to contrast",
            "label rollouts of both outcomes",
        )
    shortage = f"{passed} passed and {failed} failed rollouts; at least {FEW} of each are needed to conclude anything"
    return LabelDiagnosis(report, shortage if min(passed, failed) < FEW else "")


def label_summary(diagnosis: LabelDiagnosis) -> list[Table | str]:
    """Make what the command prints: the ranking, and why nothing can be concluded, where nothing can."""
    shortage = [f"nothing can be concluded: {diagnosis.shortage}"] if diagnosis.shortage else []
    return [selection_table(diagnosis.report), *shortage]


def publish_label_diagnosis(diagnosis: LabelDiagnosis, out: Path) -> None:
    """Write selection.json, stability.csv and figures/."""
    with user_outputs(out) as aside:
        publish_json(aside / "selection.json", diagnosis.report)
        publish_text(
            aside / "stability.csv", stability_table(diagnosis.report).to_csv(index=False, float_format="%.6f")
        )
        draw_candidates(diagnosis.report, aside)
