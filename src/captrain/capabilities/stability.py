"""Table of the candidates that each labelling run alone retains: the paper's figure of stability over runs."""

import pandas as pd

from captrain.capabilities.rule import SelectionAccount, is_retained


def stability_table(account: SelectionAccount) -> pd.DataFrame:
    """One row for each run and candidate, by run and id: run (from 0), capability, gap, coverage (empty where
    undefined), and `kept`, whether the run retains it. The sum of `kept` over runs is `runs_retained`.

    Args:
        account: of the selection; interval and agreement are of all runs together, and have no say here.
    """
    candidates = sorted(account["candidates"], key=lambda candidate: candidate["id"])
    rows = [
        (number, candidate["id"], run["gap"], run["coverage"], is_retained(run, account["thresholds"]))
        for number in range(max((candidate["runs"] for candidate in candidates), default=0))
        for candidate in candidates
        for run in [candidate["per_run"][number]]
    ]
    table = pd.DataFrame(rows, columns=["run", "capability", "gap", "coverage", "kept"])
    return table.astype({"gap": float, "coverage": float})
