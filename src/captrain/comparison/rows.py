"""Rows of the table: the arm of each method on each task, and the rollouts that each method is charged for.

An arm is a played agent: the base, an adapter, a prompt, or a composition of adapters. A method is a rule that names an
arm for each task. So routers, controls and bounds cost no rollouts beyond those of the arms. The cost of a method is
the sum of the ledger entries of its stages; diagnosis and calibration count as much as training. Methods are compared
at equal totals, and the table says which ones are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.comparison.baselines.baseline import (
    CALIBRATION,
    DIAGNOSIS,
    ROUTED,
    SOLUTIONS_ADAPTER,
    TRACE_STAGES,
    Baseline,
    Supervision,
)
from captrain.comparison.baselines.registry import acting_stages, baselines
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import IndexEntry, counted, read_index, read_json
from captrain.run import repro

ADAPTERS = "adapters"
"""The stage of TRACE's own adapters."""
IDLE = "idle"
BASE = "base"
TRACE = "trace"
GRPO = "grpo_target"
"""The reference baseline: GRPO on the target itself."""
SINGLE = "single"
"""The baseline that spends all of TRACE's budget on the first capability."""
SINGLE_SHARE = "single_share"
"""TRACE's adapter of the first capability on every task: the paper's row of that name, with one adapter's share of the
budget."""
ORACLE = "bound:oracle"
RANDOM = "bound:random"
BEST_SINGLE = "bound:best_single"
BOUNDS = (ORACLE, RANDOM, BEST_SINGLE)
UNEQUAL = {
    SINGLE_SHARE: "is one of TRACE's adapters",
    "merged:distillation": "samples beside the adapters that it learns from",
    "control:": "may need other environments, calibrated more or less often",
}
"""Prefix of a method's name -> why its total may differ from TRACE's. For methods other than the baselines."""
VARIANT = "is the row with another training of its gates"
"""Reason why the total of a row's variant may differ from TRACE's."""
LABELS = {
    IDLE: "doing nothing",
    BASE: "base",
    SINGLE_SHARE: "single capability, one share",
    TRACE: "TRACE",
    ROUTED: "TRACE, solutions, routed",
    ORACLE: "bound: oracle router",
    RANDOM: "bound: random router",
    BEST_SINGLE: "bound: best single adapter",
}
"""Labels of methods other than the baselines."""


@dataclass(frozen=True)
class Method:
    """One row of the table. It acts with `arm` on every task, or with the arm in the column `route` of the routes."""

    name: str
    arm: str = ""
    route: str = ""


def label(name: str) -> str:
    """Return the label of a method in tables and figures."""
    if baseline := baselines().get(name):
        return baseline.label
    return LABELS.get(name, name.replace(":", ": ").replace("_", " "))


def supervision(name: str) -> Supervision | None:
    """Return the supervision of a method; None for a method that learns nothing."""
    if name in (IDLE, BASE):
        return None
    baseline = baselines().get(_row_of(name))
    return baseline.learns_from if baseline else "rewards"


def is_supervised(name: str) -> bool:
    """Return whether a method learns from demonstrations, at least in part."""
    return "demonstrations" in (supervision(name) or "")


def headline_methods() -> tuple[str, ...]:
    """Return the base, all baselines, the routed solutions and TRACE."""
    return (BASE, *baselines(), ROUTED, TRACE)


def controls_of(folder: Path) -> dict[str, list[str]]:
    """Read the capabilities of each control from the outputs of the stage `controls`."""
    path = folder / "choices.json"
    return read_json(path, dict[str, list[str]]) if path.exists() else {}


def partial_stages(alternatives: bool) -> tuple[str, ...]:
    """Return the stages whose arms play only the tasks routed to them.

    The arm that has the name of its stage still plays every task. With `alternatives` (see
    `captrain.run.EvaluationSettings`), adapters of one capability also play every task.
    """
    return ("compositions", "controls") if alternatives else ("compositions", "controls", "adapters", SOLUTIONS_ADAPTER)


def methods(
    arms: Mapping[str, str], routes: Sequence[str], ranked: Sequence[str], alternatives: bool = True
) -> list[Method]:
    """List all played rows in table order, without bounds.

    Args:
        arms: name -> stage that trained it; "" for the base and for the idle agent.
        routes: columns of the routes; `chosen` is the configured router: TRACE itself.
        ranked: capabilities with an environment, best first.
        alternatives: adapters of one capability played every task.
    """
    single = [Method(name, arm=name) for name in (IDLE, BASE)]
    single += [Method(arm, arm=arm) for stage in baselines() for arm in arms if arms[arm] == arm == stage]
    single += [Method(name, arm=name) for row in baselines().values() for name in _variants(row) if name in arms]
    if alternatives and SINGLE in arms.values() and arms.get(next(iter(ranked), "")) == "adapters":
        single.append(Method(SINGLE_SHARE, arm=ranked[0]))
    routers = [name for name in routes if name not in ("chosen", ROUTED) and not name.startswith("control:")]
    controls = [name for name in routes if name.startswith("control:")]
    return [
        *single,
        Method(TRACE, route="chosen"),
        *(Method(ROUTED, route=ROUTED) for name in routes if name == ROUTED),
        *(Method(f"router:{name}", route=name) for name in routers),
        *(Method(f"merged:{name}", arm=name) for name, stage in arms.items() if stage == "merging"),
        *(Method(name, route=name) for name in controls),
    ]


def charged(entry: LedgerEntry, name: str, ranked: Sequence[str], controls: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a method is charged for a ledger entry.

    Args:
        entry: a ledger entry of any stage.
        name: name of the method. Routers, merged adapters and bounds use TRACE's adapters.
        ranked: capabilities with an environment, best first.
        controls: control -> its capabilities.
    """
    if name in (IDLE, BASE):
        return False
    if baseline := baselines().get(_row_of(name)):
        own = (baseline.name, *_variants(baseline))
        is_others = bool(baseline.variants) and entry.stage == baseline.name and entry.item in own
        return baseline.charged(entry, ranked) and not (is_others and entry.item != name)
    if entry.stage == DIAGNOSIS:
        return True
    if name == SINGLE_SHARE:
        return entry.stage in (CALIBRATION, ADAPTERS) and entry.item in ranked[:1]
    control, merged = name.removeprefix("control:"), name.removeprefix("merged:")
    if control in controls:
        return entry.stage in (CALIBRATION, ADAPTERS, "controls") and entry.item in controls[control]
    return entry.stage in TRACE_STAGES or (merged != name and entry.stage == "merging" and entry.item == merged)


def _row_of(name: str) -> str:
    """Return the row whose adapters a method uses. It may be the method itself."""
    return SOLUTIONS_ADAPTER if name == ROUTED else name.partition(":")[0]


def _variants(row: Baseline) -> list[str]:
    """List the names of a row's variants."""
    return [f"{row.name}:{variant}" for variant in row.variants]


def spending(
    names: Sequence[str], ledger: Sequence[LedgerEntry], ranked: Sequence[str], controls: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return method -> rollouts spent. Evaluation rollouts are charged to no method.

    Raises:
        UserError: the total of a method differs from TRACE's, and no reason is declared in `UNEQUAL` or its row.
    """
    entries = [entry for entry in ledger if entry.purpose != "evaluation"]
    totals = {
        name: sum(entry.rollouts for entry in entries if charged(entry, name, ranked, controls)) for name in names
    }
    for name in names:
        if name not in (IDLE, BASE) and totals[name] != totals[TRACE] and not unequal_total(name):
            raise UserError(
                f"TRACE spent {counted(totals[TRACE], 'rollout')} and {name} {totals[name]}: not comparable",
                "give both the same total (TRACE's includes diagnosis and calibration) and run "
                f"`{repro(name if name in baselines() else 'adapters')}`",
            )
    return totals


def unequal_total(name: str) -> str:
    """Return why a method's total may differ from TRACE's; "" if it may not."""
    if baseline := baselines().get(_row_of(name)):
        return VARIANT if name in _variants(baseline) else baseline.unequal
    return next((reason for beginning, reason in UNEQUAL.items() if name.startswith(beginning)), "")


def compared_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """List the compared pairs of the table.

    - TRACE and each baseline with the base, and TRACE with each baseline.
    - Routers, merged adapters, bounds and controls with TRACE.
    - The routed solutions with the base, TRACE and each baseline.
    - Each baseline with its `compared_with` and its variants, and the router of sets with GRPO on the target.
    """
    rows = [row for name, row in baselines().items() if name in names]
    pairs = [(TRACE, BASE), *((row.name, BASE) for row in rows), *((TRACE, row.name) for row in rows)]
    pairs += [*[(ORACLE, TRACE)] * (ORACLE in names), *[(TRACE, RANDOM)] * (RANDOM in names)]
    pairs += [(name, TRACE) for name in names if name.startswith(("merged:", "router:"))]
    if ROUTED in names:
        pairs += [(ROUTED, name) for name in (BASE, TRACE, *(row.name for row in rows))]
    pairs += [(TRACE, name) for name in names if name == SINGLE_SHARE]
    further = [("router:sets", GRPO)] + [(row.name, name) for row in rows for name in row.compared_with]
    further += [(row.name, name) for row in rows for name in _variants(row)]
    pairs += [pair for pair in further if {*pair} <= {*names}]
    return pairs + [(TRACE, name) for name in names if name.startswith("control:")]


def arm_indices(root: Path) -> dict[str, list[tuple[str, IndexEntry]]]:
    """Read the index of each stage: its arms by name, in the order of the stages.

    Raises:
        UserError: TRACE's adapters have no index, or an index is damaged.
    """
    paths = {stage: root / "results" / stage / "index.json" for stage in acting_stages()}
    return {
        stage: [*read_index(path, f"run `{repro(stage, root)}` to make it").items()]
        for stage, path in paths.items()
        if stage == ADAPTERS or path.exists()
    }
