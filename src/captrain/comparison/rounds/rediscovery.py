"""Re-discovery: what each diagnosis finds of the same capabilities, before and after the agent was taught.

One row for each diagnosis and candidate: of the base, then of the agent that each round has taught, always on tasks
that neither it nor an earlier diagnosis has seen. A capability is repaired where its coverage and the share of rollouts
that lack it fall; gap and coverage are shares of failures, which become few, so that the share of all rollouts stands
beside them.
"""

from collections.abc import Iterator, Sequence

import pandas as pd

from captrain.capabilities import SelectionAccount
from captrain.comparison.rounds.diagnosis import Diagnosis

REDISCOVERY_COLUMNS = [
    "round",
    "capability",
    "selected",
    "gap",
    "gap_low",
    "gap_high",
    "coverage",
    "lacking",
    "passed",
    "failed",
]


def rediscovery_table(base: SelectionAccount, diagnoses: Sequence[Diagnosis]) -> pd.DataFrame:
    """Tabulate gap and coverage of every capability before and after teaching.

    Returns:
        Columns round (0: the base), capability, selected, gap, gap_low, gap_high, coverage (of the failed rollouts),
        lacking (share of all rollouts that failed and lack it), passed, failed (rollouts). Empty where undefined.
    """
    rows = [*_rows(0, base)]
    for diagnosis in diagnoses:
        if diagnosis.account is not None:
            rows += _rows(diagnosis.number, diagnosis.account)
    return pd.DataFrame(rows, columns=REDISCOVERY_COLUMNS)


def _rows(number: int, account: SelectionAccount) -> Iterator[tuple[object, ...]]:
    passed, failed = account["rollouts"]["passed"], account["rollouts"]["failed"]
    for row in sorted(account["candidates"], key=lambda row: row["id"]):
        lacking = None if row["coverage"] is None else row["coverage"] * failed / (passed + failed)
        numbers = row["gap"], row["gap_low"], row["gap_high"], row["coverage"], lacking, passed, failed
        yield number, row["id"], row["selected"], *numbers
