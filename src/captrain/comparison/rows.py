"""The rows of the table: which arm acts for each method on each task, and which rollouts a method is charged for.

An arm is what was played (the base, an adapter, a prompt, a composition of adapters); a method is a rule that names an
arm for each task. So routers, controls and bounds cost no rollout beyond the arms', and what a method spent is read off
the ledger entries of the stages that it rests on: diagnosis and calibration count as much as training. Methods are
compared at equal totals; those that cannot be say so in the table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, TRACE_STAGES, Supervision
from captrain.comparison.baselines.registry import baselines
from captrain.comparison.rounds.arms import GENERALIST, ROUTED
from captrain.config import repro
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import read_json

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

    @property
    def label(self) -> str:
        """Label in tables and figures."""
        return label(self.name)


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
        alternatives: to the configured router are rows of the table, too: see `captrain.config.Evaluation`.
    """
    return ("compositions", "controls") if alternatives else ("compositions", "controls", "adapters", GENERALIST)


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


def charges(name: str, ranked: Sequence[str], controls: Mapping[str, Sequence[str]]) -> Callable[[LedgerEntry], bool]:
    """Return the test of a ledger entry: is a method charged for it?

    Args:
        name: of the method; routers, merged adapters, bounds and controls of routing use TRACE's adapters.
        ranked: capabilities with an environment, best first.
        controls: control -> its capabilities, for controls that have adapters of their own.
    """
    if name in (IDLE, BASE):
        return lambda entry: False
    if baseline := baselines().get(_supervised(name)):
        return lambda entry: baseline.charged(entry, ranked)
    if name == SINGLE_SHARE:
        return lambda entry: (
            entry.stage == DIAGNOSIS or (entry.stage in (CALIBRATION, "adapters") and entry.item in ranked[:1])
        )
    control = name.removeprefix("control:")
    if control in controls:
        capabilities, stages = controls[control], (CALIBRATION, "adapters", "controls")
        return lambda entry: entry.stage == DIAGNOSIS or (entry.stage in stages and entry.item in capabilities)
    merged = name.removeprefix("merged:")
    if merged != name:
        return lambda entry: entry.stage in TRACE_STAGES or (entry.stage == "merging" and entry.item == merged)
    return lambda entry: entry.stage in TRACE_STAGES


def _supervised(name: str) -> str:
    """Return the row whose adapters a method routes among; else the method itself."""
    return GENERALIST if name == ROUTED else name


def spending(
    names: Sequence[str], ledger: Sequence[LedgerEntry], ranked: Sequence[str], controls: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Sum up the rollouts that each method has spent; evaluation rollouts are nobody's.

    Raises:
        UserError: a method has spent another total than TRACE, and is none of those that the table says so of.
    """
    entries = [entry for entry in ledger if entry.purpose != "evaluation"]
    totals: dict[str, int] = {}
    for name in names:
        charged = charges(name, ranked, controls)
        totals[name] = sum(entry.rollouts for entry in entries if charged(entry))
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
