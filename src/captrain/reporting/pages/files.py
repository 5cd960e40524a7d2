"""Files that the report reads, and the columns that it needs.

A missing file becomes a `Missing` with its remedy, which the page shows instead. For example, a fresh clone has only
results/. A corrupt file (truncated, of another format, or without a value that is shown) is a `UserError` that names
the file and its stage, so that a report never silently lacks content.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from captrain.comparison import ComparisonRow
from captrain.errors import UserError
from captrain.records import read_json, read_table
from captrain.run import repro

T = TypeVar("T")
COMMANDS = {"replicates": "make replicate", "sweeps": "captrain-sweep", "evaluation": "dvc repro comparison"}
"""Commands that make the folders of results/ that are not named after a stage."""


@dataclass(frozen=True)
class Missing:
    """A missing file, and how to make it."""

    problem: str
    remedy: str


def _shape(words: str, counts: str = "", numbers: str = "", flags: str = "", optional: str = "") -> type[BaseModel]:
    """Return a pydantic model for the rows of a table. Each argument lists the names of the columns of one type.

    words: text. counts: integers. numbers: numbers that may be undefined. flags: booleans. optional: optional text.
    """
    kinds = {words: str, counts: int, numbers: float | None, flags: bool, optional: str | None}
    return create_model("Row", **{name: (kind, ...) for names, kind in kinds.items() for name in names.split()})  # type: ignore[call-overload]


SPENDING = "rollouts discarded errors prompt_tokens completion_tokens"
CAUSAL = "claimed repaired efficacy sole_efficacy difference placebo specificity"
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
        "capability adapter name",
        "failures lacking sole tasks",
        " ".join(f"{name} {name}_low {name}_high" for name in CAUSAL.split()),
    ),
    "results/causality/effects.csv": _shape("stratum arm", "tasks", "base rate change low high", optional="capability"),
    "results/solutions/rediscovery.csv": _shape(
        "capability", "round passed failed", "gap gap_low gap_high coverage lacking", "selected"
    ),
    "results/adapters/history.csv": _shape("adapter", "step rollouts", "reward success informative"),
    "results/routes/routes.csv": _shape("task chosen"),
}
"""Columns of each table that the report shows."""


def present(root: Path, name: str, stage: str, read: Callable[[], T]) -> T | Missing:
    """Read one file, or return a `Missing`.

    Raises:
        UserError: the file is corrupt.
    """
    command = COMMANDS.get(stage) or repro(stage, root)
    if not (root / name).exists():
        pull = "`dvc pull` if a remote holds it, or " if name.startswith("artifacts/") else ""
        return Missing(f"{name} is not here", f"run {pull}`{command}`")
    try:
        return read()
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{first['msg']} at {'.'.join(map(str, first['loc'])) or 'the top'}"
    except UserError as error:
        reason = error.problem.replace(f"{root}/", "")
    raise UserError(
        f"{root / name} is corrupt: {reason}",
        f"delete it and run `{command}`, which restores what is cached and makes the rest again",
    )


def document(root: Path, name: str, stage: str, shape: Any) -> Any:
    """Read a JSON document and check it against `shape`; a `Missing` if it is not there."""

    def read() -> object:
        value = read_json(root / name, object)
        TypeAdapter(shape).validate_python(value, strict=True)
        return value

    return present(root, name, stage, read)


def table_of(root: Path, name: str) -> list[ComparisonRow] | Missing:
    """Read a CSV table as rows of plain values (None for empty cells) and check them against `TABLES`."""

    def read() -> list[ComparisonRow]:
        fields = TABLES[name].model_fields if name in TABLES else {}
        kinds = {column: str for column, field in fields.items() if field.annotation is str}
        # A kind or an arm may be called "none" or "NA".
        frame = read_table(root / name, columns=fields, words=True, kinds=kinds)
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        if fields:
            for row in rows:
                TABLES[name].model_validate(row, strict=True)
        return [*rows]

    return present(root, name, name.split("/")[1], read)
