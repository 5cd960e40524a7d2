"""Estimates the gain of each adapter in its own environment on unseen tasks, without further rollouts.

The base's pass rate comes from its calibration rollouts, which used other tasks. GRPO plays every training task once,
before it learns from it. The pass rate over the last steps is therefore measured on unseen tasks. An adapter with no
gain above zero does not help even in its own environment, so no task is routed to it.

Both rates are at the temperature of training. If some rollouts read hints, they raise the last rate. Intervals are
Newcombe's for two independent proportions, method 10 (Statistics in Medicine 17, 1998). Rollouts of one group share
their task, so the intervals are somewhat too narrow.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from captrain.records import Rollout

LAST = 0.25
"""Final share of the training steps, over which the adapter's pass rate is measured."""
CONFIDENCE = 0.95
COLUMNS = ["capability", "base", "base_rollouts", "last", "last_rollouts", "gain", "low", "high"]


def adapter_gains(
    adapters: Sequence[str], calibration: Mapping[str, Sequence[Rollout]], history: pd.DataFrame
) -> pd.DataFrame:
    """Estimate the gain of each adapter in its own environment.

    Args:
        adapters: their names, which are those of their capabilities.
        calibration: rollouts of the base in each capability's environment.
        history: of training: adapter, step, rollouts (so far), success (pass rate of the step).

    Returns:
        Columns capability, base and last (pass rates), base_rollouts and last_rollouts, gain, low, high; one row an
        adapter in the given order. Unknown values are NaN: an adapter without environment has no base rate.
    """
    from statsmodels.stats.proportion import confint_proportions_2indep

    rows = []
    for name in adapters:
        scored = [rollout.outcome == "passed" for rollout in calibration.get(name, ()) if rollout.outcome != "error"]
        steps = history.loc[history["adapter"] == name]
        sizes = np.diff(steps["rollouts"].to_numpy(dtype=float), prepend=0.0)
        last_steps = slice(-max(1, round(LAST * len(sizes))), None)
        before, passed_before = len(scored), sum(scored)
        after = int(sizes[last_steps].sum())
        passed_after = int((steps["success"].to_numpy(dtype=float) * sizes)[last_steps].sum().round())
        base = passed_before / before if before else np.nan
        last = passed_after / after if after else np.nan
        low, high = np.nan, np.nan
        if before and after:
            low, high = confint_proportions_2indep(
                passed_after, after, passed_before, before, method="newcomb", compare="diff", alpha=1 - CONFIDENCE
            )
        rows.append((name, base, before, last, after, last - base, float(low), float(high)))
    return pd.DataFrame(rows, columns=COLUMNS)


def routable(gains: pd.DataFrame, gate: bool) -> list[str]:
    """Return the adapters that tasks may be routed to. `gate` drops those with a known gain of zero or less."""
    closed = gains["gain"].to_numpy(dtype=float) <= 0 if gate else np.zeros(len(gains), dtype=bool)
    return [str(name) for name in gains["capability"].to_numpy()[~closed]]
