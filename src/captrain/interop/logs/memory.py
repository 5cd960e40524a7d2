"""Rows that are in memory, as logs: dicts of any format of rows, or a table of pandas.

They go through a file, as what is read from one does, and so are told by what they hold and judged alike.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from captrain.errors import UserError
from captrain.interop.logs.reading import REMEDY, Logs, read_logs

if TYPE_CHECKING:
    import pandas as pd

NAME = "rows in memory.jsonl"


def logs_of_rows(rows: "Iterable[object] | pd.DataFrame", scores: Path | None = None) -> Logs:
    """Read rows as a file of such lines is read.

    Args:
        rows: objects of any format of rows that docs/diagnose.md lists, messages of LangChain or pydantic inside them
            as they are; or a frame with a row for each rollout, whose cells may be JSON text.
        scores: as of `read_logs`.

    Raises:
        UserError: a row is no object, or they do not read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, NAME)
        with path.open("w") as file:
            for number, row in enumerate(_records(rows)):
                content = _plain(row)
                if not isinstance(content, Mapping):
                    raise UserError(f"row {number} is not an object but {type(row).__name__}", REMEDY)
                try:
                    file.write(json.dumps({**content}, default=_plain) + "\n")
                except (TypeError, ValueError, RecursionError):
                    raise UserError(f"row {number} holds what JSON cannot say", REMEDY) from None
        return read_logs([path], scores)


def _records(rows: "Iterable[object] | pd.DataFrame") -> Iterable[object]:
    """Convert the rows of a frame to objects, its JSON texts to what they say, without what is missing."""
    if not hasattr(rows, "columns"):
        return rows
    from captrain.interop.logs.exchange import loaded

    frame: pd.DataFrame = rows  # pyright: ignore[reportAssignmentType]
    names = [str(name) for name in frame.columns]
    missing = frame.isna().to_numpy()
    return (
        {name: loaded(value) for name, value, is_none in zip(names, row, missing[number], strict=True) if not is_none}
        for number, row in enumerate(frame.itertuples(index=False, name=None))
    )


def _plain(value: object) -> object:
    """Convert a value that JSON does not know: pydantic records by their fields, arrays as lists, all else as text."""
    for name, options in (("model_dump", {"mode": "json"}), ("tolist", {})):
        if method := getattr(value, name, None):
            return method(**options)
    return value if isinstance(value, Mapping) else str(value)
