"""Gain of each adapter in its own environment, held out from its past and without a further rollout.

The base's pass rate there is known from its calibration rollouts. GRPO plays every training task once, and a rollout
is played before it is learnt from: so the pass rate over the last steps is that of an adapter on tasks that it has not
seen. Calibration has spent other tasks of the same environment. An adapter whose gain is not above zero makes nothing
better even at home, and is no route.

Both rates are read at the temperature of training. Where a share of the rollouts reads hints, they lift the last rate.
Intervals are Newcombe's for two independent proportions, method 10 (Statistics in Medicine 17, 1998); rollouts of one
group share their task, so that the intervals are too narrow by as much as tasks differ.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from captrain.records import Rollout

LAST = 0.25
"""Share of the training steps that an adapter is judged by."""
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
        adapter in the given order. What is not known is NaN: an adapter of no environment has no base rate.
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
    """List the adapters that may be routed to: with a gate, not those that are known to have gained nothing."""
    closed = gains["gain"].to_numpy(dtype=float) <= 0 if gate else np.zeros(len(gains), dtype=bool)
    return [str(name) for name in gains["capability"].to_numpy()[~closed]]
