"""What TRACE is compared with: one module, one stage and one row of the table each, at TRACE's total of rollouts.

Every baseline leaves what TRACE's adapters leave: an index of what can act in the evaluation (an adapter, lines of
guidance, or both), a ledger of all that it spent, and a history of its training. So the evaluation knows no method.
"""

from collections.abc import Sequence

from captrain.records import LedgerEntry


def budget(entries: Sequence[LedgerEntry]) -> int:
    """Rollouts that TRACE has spent in all: diagnosis and calibration count as much as training, and errors too."""
    return sum(entry.rollouts for entry in entries if entry.method == "trace")
