"""Which candidates each labelling run alone would retain, as a table: the paper's figure of stability over runs.

Each row is what selection (`capabilities.selection`) says of one run by itself; nothing is computed in a second way.
"""

from collections.abc import Sequence

import pandas as pd

from captrain.capabilities.selection import select
from captrain.config import spec
from captrain.records import Capability, RolloutLabels


def stability(
    labels: Sequence[RolloutLabels], candidates: Sequence[Capability], selection: spec.Selection
) -> pd.DataFrame:
    """One row for each run and candidate: run, capability, gap, coverage (empty where undefined), and whether the run
    `kept` it, which is to say that both reach their thresholds. The sum of `kept` over runs is `runs_retained`.

    Args:
        labels: of all runs.
        candidates: of all runs.
        selection: thresholds. Interval and agreement are of all runs together, and have no say here.
    """
    alone = selection.model_copy(update={"agreement": 1, "resamples": 1})
    rows = []
    for run in sorted({row.run for row in labels}):
        report = select([row for row in labels if row.run == run], candidates, alone, len(candidates), 0).report
        for row in sorted(report["candidates"], key=lambda row: row["id"]):
            rows.append((run, row["id"], *row["per_run"][0].values(), row["runs_retained"] == 1))
    table = pd.DataFrame(rows, columns=["run", "capability", "gap", "coverage", "kept"])
    return table.astype({"gap": float, "coverage": float})
