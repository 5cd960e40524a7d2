"""The rows of the table: which arm acts for each method on each task, and which rollouts a method is charged for.

An arm is what was played (the base, an adapter, a prompt, a composition of adapters); a method is a rule that names an
arm for each task. So routers, controls and bounds cost no rollout beyond the arms', and what a method spent is read off
the ledger entries of the stages that it rests on: diagnosis and calibration count as much as training. Methods are
compared at equal totals; those that cannot be say so in the table.

Rollouts record what acted, as digests of policy and adapter; what an arm is called stands in the index of the stage
that left it. Whoever reads the rollouts of the evaluation again, as a report or the test of a capability, asks here.
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
    Supervision,
)
from captrain.comparison.baselines.registry import acting_stages, baselines
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import IndexEntry, Rollout, read_index, read_json
from captrain.run import repro

ADAPTERS = "adapters"
"""The stage of TRACE's own adapters."""
IDLE = "idle"
BASE = "base"
TRACE = "trace"
GRPO = "grpo_target"
"""The baseline that recipes are held against: GRPO on the target itself."""
SINGLE = "single"
"""The baseline that has all of TRACE's budget on the first capability."""
SINGLE_SHARE = "single_share"
"""TRACE's adapter of the first capability on every task: the paper's row of that name, with one adapter's share of the
budget. It is played wherever adapters are, and shown beside the baseline of all the budget."""
ORACLE = "bound:oracle"
RANDOM = "bound:random"
BEST_SINGLE = "bound:best_single"
BOUNDS = (ORACLE, RANDOM, BEST_SINGLE)
UNEQUAL = {
    SINGLE_SHARE: "is one of TRACE's adapters",
    "merged:distillation": "samples beside the adapters that it learns from",
    "control:": "may need other environments, calibrated more or less often",
}
"""Methods that are no baselines, by name or its beginning, that may spend another total than TRACE, and why."""
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
"""Labels of methods that are no baselines."""


@dataclass(frozen=True)
class Method:
    """One row: the `arm` that acts on every task, or the column of the routes, `route`, that names it."""

    name: str
    arm: str = ""
    route: str = ""


def label(name: str) -> str:
    """Return the label of a method in tables and figures."""
    if baseline := baselines().get(name):
        return baseline.label
    return LABELS.get(name, name.replace(":", ": ").replace("_", " "))


def supervision(name: str) -> Supervision | None:
    """Return the supervision that a method learns from: a baseline as it declares it, all that rests on TRACE's
    adapters from rewards; None for what learns nothing."""
    if name in (IDLE, BASE):
        return None
    baseline = baselines().get(_supervised(name))
    return baseline.learns_from if baseline else "rewards"


def is_supervised(name: str) -> bool:
    """Return whether a method learns from demonstrations, in whatever part, and not from rewards alone."""
    return "demonstrations" in (supervision(name) or "")


def headline_methods() -> tuple[str, ...]:
    """Return the base, all baselines, and TRACE as this project and as the paper have it."""
    return (BASE, *baselines(), ROUTED, TRACE)


def controls_of(folder: Path) -> dict[str, list[str]]:
    """Read the capabilities of each control that has adapters of its own, as the controls stage left them."""
    path = folder / "choices.json"
    return read_json(path, dict[str, list[str]]) if path.exists() else {}


def partial_stages(alternatives: bool) -> tuple[str, ...]:
    """List the stages of whose arms those that are not the stage's row play only the tasks that are routed to them.

    Args:
        alternatives: to the configured router are rows of the table, too: see `captrain.run.EvaluationSettings`.
    """
    return ("compositions", "controls") if alternatives else ("compositions", "controls", "adapters", SOLUTIONS_ADAPTER)


def methods(
    arms: Mapping[str, str], routes: Sequence[str], ranked: Sequence[str], alternatives: bool = True
) -> list[Method]:
    """List all rows that were played, in the order of the table; bounds are no methods.

    Args:
        arms: name -> stage that it comes from; "" for the base and for doing nothing.
        routes: columns of the routes; `chosen` is the configured router's, and TRACE itself.
        ranked: capabilities with an environment, best first.
        alternatives: an adapter of one capability has played every task.
    """
    single = [Method(name, arm=name) for name in (IDLE, BASE)]
    single += [Method(arm, arm=arm) for stage in baselines() for arm in arms if arms[arm] == arm == stage]
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
        entry: of any stage.
        name: of the method; routers, merged adapters, bounds and controls of routing use TRACE's adapters.
        ranked: capabilities with an environment, best first.
        controls: control -> its capabilities, for controls that have adapters of their own.
    """
    if name in (IDLE, BASE):
        return False
    if baseline := baselines().get(_supervised(name)):
        return baseline.charged(entry, ranked)
    if entry.stage == DIAGNOSIS:
        return True
    if name == SINGLE_SHARE:
        return entry.stage in (CALIBRATION, ADAPTERS) and entry.item in ranked[:1]
    control, merged = name.removeprefix("control:"), name.removeprefix("merged:")
    if control in controls:
        return entry.stage in (CALIBRATION, ADAPTERS, "controls") and entry.item in controls[control]
    return entry.stage in TRACE_STAGES or (merged != name and entry.stage == "merging" and entry.item == merged)


def _supervised(name: str) -> str:
    """Return the row whose adapters a method routes among; else the method itself."""
    return SOLUTIONS_ADAPTER if name == ROUTED else name


def spending(
    names: Sequence[str], ledger: Sequence[LedgerEntry], ranked: Sequence[str], controls: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Sum up the rollouts that each method has spent; evaluation rollouts are nobody's.

    Raises:
        UserError: a method has spent another total than TRACE, and is none of those that the table says so of.
    """
    entries = [entry for entry in ledger if entry.purpose != "evaluation"]
    totals = {
        name: sum(entry.rollouts for entry in entries if charged(entry, name, ranked, controls)) for name in names
    }
    for name in names:
        if name not in (IDLE, BASE) and totals[name] != totals[TRACE] and not unequal_total(name):
            raise UserError(
                f"TRACE spent {totals[TRACE]} rollouts and {name} {totals[name]}: not comparable",
                "give both the same total (diagnosis and calibration count for TRACE) and run "
                f"`{repro(name if name in baselines() else 'adapters')}`",
            )
    return totals


def unequal_total(name: str) -> str:
    """Say why a method may spend another total than TRACE; "" where it may not."""
    if baseline := baselines().get(_supervised(name)):
        return baseline.unequal
    return next((reason for beginning, reason in UNEQUAL.items() if name.startswith(beginning)), "")


def compared_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """List the comparisons of the table: TRACE and each baseline with the base and with each other, other ways of
    routing and merging with TRACE, TRACE with its controls, what claims to repair two lacks with GRPO on the target,
    and what else a baseline says that it is compared with."""
    rows = [row for name, row in baselines().items() if name in names]
    pairs = [(TRACE, BASE), *((row.name, BASE) for row in rows), *((TRACE, row.name) for row in rows)]
    pairs += [*[(ORACLE, TRACE)] * (ORACLE in names), *[(TRACE, RANDOM)] * (RANDOM in names)]
    pairs += [(name, TRACE) for name in names if name.startswith(("merged:", "router:"))]
    if ROUTED in names:
        pairs += [(ROUTED, name) for name in (BASE, TRACE, *(row.name for row in rows))]
    pairs += [(TRACE, name) for name in names if name == SINGLE_SHARE]
    # Sets of adapters claim to repair two lacks, as GRPO on the target does.
    further = [("router:sets", GRPO)] + [(row.name, name) for row in rows for name in row.compared_with]
    pairs += [pair for pair in further if {*pair} <= {*names}]
    return pairs + [(TRACE, name) for name in names if name.startswith("control:")]


def arm_indices(root: Path) -> dict[str, list[tuple[str, IndexEntry]]]:
    """Read the indices of the stages: stage -> what it has left to act with, by name, in the order of the stages.

    Raises:
        UserError: TRACE's adapters have no index, or an index is not whole.
    """
    paths = {stage: root / "results" / stage / "index.json" for stage in acting_stages()}
    return {
        stage: [*read_index(path, f"run `{repro(stage, root)}` to make it").items()]
        for stage, path in paths.items()
        if stage == ADAPTERS or path.exists()
    }


class Arms:
    """Names of arms, for the rollouts of the evaluation in the order in which they were played.

    Args:
        root: of the project.

    `stages` is the stage of each arm that is an adapter, by name.
    """

    def __init__(self, root: Path) -> None:
        indices = arm_indices(root)
        entries = [(name, row) for index in indices.values() for name, row in index]
        self._adapters = {row.digest: name for name, row in reversed(entries) if row.path}
        self.stages = {name: stage for stage, index in indices.items() for name, row in index if row.path}
        # The base is played first, then the prompts in the order of their stages.
        self._guided = [BASE, *(name for name, row in entries if row.guidance)]
        self._policies: dict[str, str] = {}

    def of(self, rollout: Rollout) -> str:
        """Return the arm of the next rollout."""
        policies = self._policies
        if rollout.policy not in policies:
            more = len(policies) < len(self._guided)
            policies[rollout.policy] = self._guided[len(policies)] if more else rollout.policy
        adapter = rollout.adapter
        return self._adapters.get(adapter, adapter) if adapter else policies[rollout.policy]
