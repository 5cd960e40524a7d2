"""The files of an evaluation: written by the stage, read by whoever shows or compares it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import BaseModel, Field

from captrain.comparison.tables import Evaluation
from captrain.records import publish_json, publish_text, read_json, read_table

EVALUATION_REMEDY = "run `dvc repro evaluation` to make it"
WORDS = {"method", "label", "kind", "first", "second", "purpose", "stages", "distinguishable"}
"""Columns that hold no numbers."""


def publish_evaluation(evaluation: Evaluation, folder: Path) -> None:
    """Write main.csv, differences.csv, kinds.csv, ledger.csv, spent.csv, metrics.json; curve.csv if there is one."""
    frames = {
        "main": evaluation.main,
        "differences": evaluation.differences,
        "kinds": evaluation.kinds,
        "ledger": evaluation.ledger,
        "spent": evaluation.costs,
        "curve": evaluation.curve,
    }
    for name, frame in frames.items():
        if frame is None:
            continue
        publish_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6f", lineterminator="\n"))
    publish_json(folder / "metrics.json", evaluation.metrics)


class Metrics(BaseModel):
    """Fields that are read of metrics.json: the level of the intervals, and the pass rates, by method."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    pass_rate: dict[str, float | None] = {}


def evaluation_metrics(folder: Path) -> Metrics:
    """Read the metrics.json that `publish_evaluation` wrote.

    Raises:
        UserError: it is missing, or not whole.
    """
    return read_json(folder / "metrics.json", Metrics, EVALUATION_REMEDY)


def evaluation_table(folder: Path, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Read one table that `publish_evaluation` wrote, by its name without `.csv`, and the columns that it must have.

    Raises:
        UserError: it is missing, or not whole: it lacks a column, or a number is none.
    """
    numbers = [column for column in columns if column not in WORDS]
    return read_table(folder / f"{name}.csv", EVALUATION_REMEDY, columns=columns, numbers=numbers)
