"""Files that the report reads, in the shapes that its pages rely on.

A file that is not there is a `Missing` with its remedy, which a page shows in its place: a fresh clone has results/
alone, and its report says what else there could be. A file that is there and corrupt (cut off, not what its ending
says, without a value that a page shows) is a `UserError` that names it and the stage that makes it: a report with holes
that nobody sees would be worse than none.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from captrain.errors import UserError
from captrain.records import read_json, read_table

JsonObject = dict[str, Any]
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Number = float | None
PART = 2000
"""Rows of a long table that are in memory at once."""
COMMANDS = {"replicates": "make replicate", "sweeps": "captrain-sweep"}
"""Commands that make files which no stage makes."""


@dataclass(frozen=True)
class Missing:
    """File that is not here, and how to make it."""

    problem: str
    remedy: str


class MethodRow(BaseModel):
    """A row of results/evaluation/main.csv."""

    method: str
    label: str
    pass_rate: Number
    low: Number
    high: Number
    pass_hat_k: Number
    mean_reward: Number
    tasks: int
    errors: int
    rollouts_spent: int


class DifferenceRow(BaseModel):
    """A row of results/evaluation/differences.csv; `p_holm` and `effect` are of later versions."""

    first: str
    second: str
    difference: Number
    low: Number
    high: Number
    better: int
    worse: int
    p: Number
    distinguishable: bool
    effect: Number
    p_holm: Number


class KindRow(BaseModel):
    """A row of results/evaluation/kinds.csv."""

    kind: str
    method: str
    label: str
    pass_rate: Number
    low: Number
    high: Number
    tasks: int


class CausalRow(BaseModel):
    """A row of results/causality/capabilities.csv."""

    capability: str
    adapter: str
    name: str
    failures: int
    lacking: int
    sole: int
    tasks: int
    claimed: Number
    claimed_low: Number
    claimed_high: Number
    repaired: Number
    repaired_low: Number
    repaired_high: Number
    efficacy: Number
    efficacy_low: Number
    efficacy_high: Number
    sole_efficacy: Number
    sole_efficacy_low: Number
    sole_efficacy_high: Number
    difference: Number
    difference_low: Number
    difference_high: Number
    placebo: Number
    placebo_low: Number
    placebo_high: Number
    specificity: Number
    specificity_low: Number
    specificity_high: Number


class RediscoveryRow(BaseModel):
    """A row of results/solutions/rediscovery.csv."""

    round: int
    capability: str
    selected: bool
    gap: Number
    gap_low: Number
    gap_high: Number
    coverage: Number
    lacking: Number
    passed: int
    failed: int


class EffectRow(BaseModel):
    """A row of results/causality/effects.csv."""

    capability: str | None
    stratum: str
    arm: str
    tasks: int
    base: Number
    rate: Number
    change: Number
    low: Number
    high: Number


class SpendingCounts(BaseModel):
    """Counts in a row of results/evaluation/ledger.csv and spent.csv."""

    rollouts: int
    discarded: int
    errors: int
    prompt_tokens: int
    completion_tokens: int


class LedgerRow(SpendingCounts):
    """A row of results/evaluation/ledger.csv."""

    method: str
    stage: str
    purpose: str


class SpendingRow(SpendingCounts):
    """A row of results/evaluation/spent.csv."""

    label: str
    stages: str | None


class StepRow(BaseModel):
    """A row of results/adapters/history.csv."""

    adapter: str
    step: int
    rollouts: int
    reward: Number
    success: Number
    informative: Number


class RouteRow(BaseModel):
    """A row of results/routes/routes.csv, beside a column for each router."""

    task: str
    chosen: str


class Metrics(BaseModel):
    """Fields that are read of results/evaluation/metrics.json."""

    confidence: float


class AdapterEntry(BaseModel):
    """An entry of an index.json."""

    digest: str
    path: str
    rollouts: int
    discarded: int


class Run(BaseModel):
    """One labelling run of a candidate."""

    gap: Number
    coverage: Number


class Candidate(BaseModel):
    """A candidate of results/capabilities/selection.json."""

    id: str
    name: str
    description: str
    gap: Number
    gap_low: Number
    gap_high: Number
    coverage: Number
    er_failed: Number
    er_passed: Number
    runs_retained: int
    runs: int
    per_run: list[Run]
    selected: bool
    reason: str


class Thresholds(BaseModel):
    """The settings that a selection was made by."""

    delta: float
    coverage: float
    agreement: int
    confidence: float
    floor: float
    count: int


class RolloutCounts(BaseModel):
    """Rollouts that a selection rests on."""

    passed: int
    failed: int


class Selection(BaseModel):
    """results/capabilities/selection.json."""

    thresholds: Thresholds
    rollouts: RolloutCounts
    candidates: list[Candidate]


@contextmanager
def corruption_named(root: Path, name: str, stage: str) -> Iterator[None]:
    """Turn errors that show a file to be corrupt into a `UserError`, while it is read."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{first['msg']} at {'.'.join(map(str, first['loc'])) or 'the top'}"
        raise _corrupt(root, name, stage, reason) from None
    except UserError as error:
        raise _corrupt(root, name, stage, error.problem.replace(f"{root}/", "")) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # of JSON, of CSV, of an encoding
        raise _corrupt(root, name, stage, " ".join(str(error).split()) or type(error).__name__) from None


def _corrupt(root: Path, name: str, stage: str, reason: str) -> UserError:
    return UserError(
        f"{root / name} is corrupt: {reason}",
        f"delete it and run `{_command(stage)}`, which restores what is cached and makes the rest again",
    )


def _command(stage: str) -> str:
    return COMMANDS.get(stage, f"dvc repro {stage}")


def present(root: Path, name: str, stage: str, read: Callable[[], T]) -> T | Missing:
    """Read one file, or name it as missing with its remedy.

    Raises:
        UserError: it is corrupt.
    """
    if not (root / name).exists():
        pull = "`dvc pull` if a remote holds it, or " if name.startswith("artifacts/") else ""
        return Missing(f"{name} is not here", f"run {pull}`{_command(stage)}`")
    with corruption_named(root, name, stage):
        return read()


def document(root: Path, name: str, stage: str, shape: Any = Any) -> Any:
    """Read a JSON document as it is, once it is seen to hold what `shape` asks for; a `Missing` where there is none."""

    def read() -> Any:
        value = read_json(root / name, object)
        TypeAdapter(shape).validate_python(value, strict=True)
        return value

    return present(root, name, stage, read)


def model(root: Path, name: str, stage: str, kind: type[M]) -> M | Missing:
    """Read a JSON document as a record."""
    return present(root, name, stage, lambda: read_json(root / name, kind))


def table_of(root: Path, name: str, stage: str, shape: type[BaseModel] | None = None) -> list[JsonObject] | Missing:
    """Read a CSV table as rows of plain values, None where it is empty, once each is seen to hold what `shape` asks
    for."""
    fields = shape.model_fields if shape else {}
    words = {column: str for column, field in fields.items() if field.annotation is str}

    def read() -> list[JsonObject]:
        # A kind or an arm may be called "none" or "NA".
        table = rows(read_table(root / name, columns=fields, words=True, kinds=words))
        if shape:
            for row in table:
                shape.model_validate(row, strict=True)
        return table

    return present(root, name, stage, read)


def table_parts(path: Path, shape: type[BaseModel]) -> Iterator[list[JsonObject]]:
    """Yield the rows of a CSV table that may be long, as of `table_of`, a part at a time; to be read by what `present`
    is told to read by, which names what is corrupt."""
    words = {column: str for column, field in shape.model_fields.items() if field.annotation is str}
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            raise ValueError("its last line has no end")
        file.seek(0)
        for frame in pd.read_csv(file, dtype=words, keep_default_na=False, na_values=[""], chunksize=PART):  # type: ignore[arg-type]
            part = rows(frame)
            for row in part:
                shape.model_validate(row, strict=True)
            yield part


def rows(frame: pd.DataFrame) -> list[JsonObject]:
    """Convert a table to rows of plain values: NaN is None."""
    return [{str(key): plain(value) for key, value in row.items()} for row in frame.to_dict("records")]


def plain(value: Any) -> Any:
    """Convert a numpy scalar to Python's own; NaN to None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value
