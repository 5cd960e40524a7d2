"""Files that the report reads, in the shapes that it relies on.

A file that is not there is a `Missing` with its remedy, which the page shows in its place: a fresh clone has results/
alone, and its report says what else there could be. A file that is there and corrupt (cut off, not what its ending
says, without a value that is shown) is a `UserError` that names it and the stage that makes it: a report with holes
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
from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from captrain.config import repro
from captrain.errors import UserError
from captrain.records import JsonObject, read_json, read_table

T = TypeVar("T")
PART = 2000
"""Rows of a long table that are in memory at once."""
COMMANDS = {"replicates": "make replicate", "sweeps": "captrain-sweep"}
"""Commands that make files which no stage makes."""


@dataclass(frozen=True)
class Missing:
    """File that is not here, and how to make it."""

    problem: str
    remedy: str


def _shape(words: str, counts: str = "", numbers: str = "", flags: str = "", optional: str = "") -> type[BaseModel]:
    """Make the shape of a table's rows from the names of its columns: words, optional words, whole numbers, flags, and
    numbers that may be undefined."""
    kinds = {words: str, counts: int, numbers: float | None, flags: bool, optional: str | None}
    return create_model("Row", **{name: (kind, ...) for names, kind in kinds.items() for name in names.split()})  # type: ignore[call-overload]


def _with_interval(*names: str) -> str:
    return " ".join(f"{name} {name}_low {name}_high" for name in names)


SPENDING = "rollouts discarded errors prompt_tokens completion_tokens"
CAUSAL = ("claimed", "repaired", "efficacy", "sole_efficacy", "difference", "placebo", "specificity")
TABLES = {
    "results/evaluation/main.csv": _shape(
        "method label", "tasks errors rollouts_spent", "pass_rate low high pass_hat_k mean_reward"
    ),
    "results/evaluation/differences.csv": _shape(
        "first second", "better worse", "difference low high p effect p_holm", "distinguishable"
    ),
    "results/evaluation/kinds.csv": _shape("kind method label", "tasks", "pass_rate low high"),
    "results/evaluation/ledger.csv": _shape("method stage purpose", SPENDING),
    "results/evaluation/spent.csv": _shape("label", SPENDING, optional="stages"),
    "results/causality/capabilities.csv": _shape(
        "capability adapter name", "failures lacking sole tasks", _with_interval(*CAUSAL)
    ),
    "results/causality/effects.csv": _shape("stratum arm", "tasks", "base rate change low high", optional="capability"),
    "results/solutions/rediscovery.csv": _shape(
        "capability", "round passed failed", "gap gap_low gap_high coverage lacking", "selected"
    ),
    "results/adapters/history.csv": _shape("adapter", "step rollouts", "reward success informative"),
    "results/routes/routes.csv": _shape("task chosen"),
}
"""Columns that the report shows of each table; routes.csv has one more for each router."""


@contextmanager
def corruption_named(root: Path, name: str, stage: str) -> Iterator[None]:
    """Turn errors that show a file to be corrupt into a `UserError`, while it is read."""
    try:
        yield
        return
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{first['msg']} at {'.'.join(map(str, first['loc'])) or 'the top'}"
    except UserError as error:
        reason = error.problem.replace(f"{root}/", "")
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # of JSON, of CSV, of an encoding
        reason = " ".join(str(error).split()) or type(error).__name__
    remedy = f"delete it and run `{_command(stage, root)}`, which restores what is cached and makes the rest again"
    raise UserError(f"{root / name} is corrupt: {reason}", remedy)


def _command(stage: str, root: Path) -> str:
    return COMMANDS.get(stage) or repro(stage, root)


def present(root: Path, name: str, stage: str, read: Callable[[], T]) -> T | Missing:
    """Read one file, or name it as missing with its remedy.

    Raises:
        UserError: it is corrupt.
    """
    if not (root / name).exists():
        pull = "`dvc pull` if a remote holds it, or " if name.startswith("artifacts/") else ""
        return Missing(f"{name} is not here", f"run {pull}`{_command(stage, root)}`")
    with corruption_named(root, name, stage):
        return read()


def document(root: Path, name: str, stage: str, shape: Any) -> Any:
    """Read a JSON document as it is, once it is seen to hold what `shape` asks for; a `Missing` where there is none."""

    def read() -> Any:
        value = read_json(root / name, object)
        TypeAdapter(shape).validate_python(value, strict=True)
        return value

    return present(root, name, stage, read)


def table_of(root: Path, name: str, stage: str = "") -> list[JsonObject] | Missing:
    """Read a CSV table as rows of plain values, None where it is empty, once each is seen to hold what `TABLES` asks
    for; `stage`: the one that makes it, where its folder is not of that name."""

    def read() -> list[JsonObject]:
        fields = TABLES[name].model_fields if name in TABLES else {}
        # A kind or an arm may be called "none" or "NA".
        return _rows(name, read_table(root / name, columns=fields, words=True, kinds=_words(name)))

    return present(root, name, stage or name.split("/")[1], read)


def table_parts(root: Path, name: str) -> Iterator[list[JsonObject]]:
    """Yield the rows of a CSV table that may be long, as of `table_of`, a part at a time; to be read by what `present`
    is told to read by, which names what is corrupt."""
    with (root / name).open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            raise ValueError("its last line has no end")
        file.seek(0)
        for frame in pd.read_csv(file, dtype=_words(name), keep_default_na=False, na_values=[""], chunksize=PART):  # type: ignore[arg-type]
            yield _rows(name, frame)


def _words(name: str) -> dict[str, type]:
    fields = TABLES[name].model_fields.items() if name in TABLES else ()
    return {column: str for column, field in fields if field.annotation is str}


def _rows(name: str, frame: pd.DataFrame) -> list[JsonObject]:
    """Convert a table to rows of plain values, NaN to None, and hold each against its shape."""
    rows = [{str(key): plain(value) for key, value in row.items()} for row in frame.to_dict("records")]
    for row in rows if name in TABLES else ():
        TABLES[name].model_validate(row, strict=True)
    return rows


def plain(value: Any) -> Any:
    """Convert a numpy scalar to Python's own; NaN to None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value
