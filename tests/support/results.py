"""Small results of a run: for every figure, and what arms played."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from captrain.capabilities import SelectionAccount
from captrain.comparison import BASE, PLAYED, TRACE
from captrain.comparison.arms import Arm, outcomes_of
from captrain.records import Rollout, publish, publish_json, publish_text

DIFFERENCES = """first,second,difference,low,high,better,worse,p,distinguishable,effect,p_holm
trace,base,0.2,0.1,0.3,5,0,0.001,True,0.4,0.002
trace,grpo_target,0.1,-0.1,0.3,3,2,0.5,False,0.2,1.0
router:retrieval,trace,0.1,0.02,0.2,4,1,0.03,True,0.2,0.09
bound:oracle,trace,0.2,0.1,0.3,5,0,,True,0.4,
"""


QUANTITIES = ("claimed", "repaired", "efficacy", "sole_efficacy", "difference", "placebo", "specificity")


def causal_tables(*capabilities: str) -> dict[str, str]:
    """Return the tables of a causal test by file: each adapter repairs .4 of its own failures and nothing else."""
    columns = [f"{name}{end}" for name in QUANTITIES for end in ("", "_low", "_high")]
    values = ",".join("0.4,0.3,0.5" for _ in QUANTITIES)
    rows = [f"{slug},{slug},{slug.replace('_', ' ')},90,30,20,9,{values}" for slug in capabilities]
    head = ",".join(["capability,adapter,name,failures,lacking,sole,tasks", *columns])
    strata = [*((slug, stratum) for slug in capabilities for stratum in ("lacking", "sole", "other")), ("", "passed")]
    effects = [
        f"{slug},{stratum},{arm},adapters,9,0.1,0.2,{0.4 if slug == arm and stratum != 'other' else 0.0},-0.01,0.5"
        for slug, stratum in strata
        for arm in capabilities
    ]
    return {
        "causality/capabilities.csv": "\n".join([head, *rows]) + "\n",
        "causality/effects.csv": "\n".join(["capability,stratum,arm,stage,tasks,base,rate,change,low,high", *effects])
        + "\n",
    }


def candidate(slug: str, gap: float, coverage: float, selected: bool) -> dict:
    return {
        "id": slug,
        "name": slug.replace("_", " "),
        "description": "Does it.",
        "gap": gap,
        "gap_low": gap - 0.1,
        "gap_high": gap + 0.1,
        "coverage": coverage,
        "er_failed": gap + 0.1,
        "er_passed": 0.1,
        "runs_retained": 10 if selected else 3,
        "runs": 10,
        "per_run": [{"gap": gap, "coverage": coverage}] * 10,
        "selected": selected,
        "reason": "kept" if selected else "gap below delta",
    }


def account(rows: Iterable[Mapping[str, object]]) -> SelectionAccount:
    """Return the account of a selection with these candidates, best first. Missing fields are those of a rejected
    candidate."""
    limits: Any = {"delta": 0.2, "coverage": 0.1, "agreement": 8, "confidence": 0.95, "floor": 0.0, "count": 4}
    candidates: Any = [{"resamples_undefined": 0, **candidate(str(row["id"]), 0.1, 0.1, False), **row} for row in rows]
    return {"thresholds": limits, "rollouts": {"passed": 60, "failed": 180}, "candidates": candidates}


def make_results(results: Path) -> Path:
    """Write the smallest results folder from which every figure can be drawn."""
    methods = ["base", "grpo_target", "trace", "router:retrieval", "bound:oracle"]
    main = [
        f"{name},{name},{0.4 + i / 10},{0.35 + i / 10},{0.45 + i / 10},0.1,9,0,36,0,640"
        for i, name in enumerate(methods)
    ]
    columns = "method,label,pass_rate,low,high,pass_hat_k,tasks,excluded,trials,errors,rollouts_spent"
    publish_text(
        results / "evaluation/main.csv", "\n".join([columns, *main, "bound:best_single,b,,,,,0,9,0,0,640"]) + "\n"
    )
    kinds = [f"{kind},{name},{name},0.5,0.4,0.6,4" for kind in ("easy", "pv+sr") for name in methods]
    publish_text(
        results / "evaluation/kinds.csv", "\n".join(["kind,method,label,pass_rate,low,high,tasks", *kinds]) + "\n"
    )
    publish_json(results / "evaluation/metrics.json", {"confidence": 0.95})
    publish_text(results / "evaluation/differences.csv", DIFFERENCES)
    names = {"adapters": ["check_first", "copy_exactly"], "grpo_target": ["grpo_target"]}
    rows = [
        f"{name},{step * 40},{step / 9},{step / 9},0.5,{stage}"
        for stage, adapters in names.items()
        for name in adapters
        for step in range(1, 9)
    ]
    columns = "adapter,rollouts,reward,success,informative,stage"
    publish_text(results / "evaluation/training.csv", "\n".join([columns, *rows]) + "\n")
    candidates = [candidate("check_first", 0.45, 0.3, True), candidate("copy_exactly", 0.1, 0.12, False)]
    undefined = candidate("never_used", 0.0, 0.0, False) | {"gap": None, "gap_low": None, "gap_high": None}
    publish_json(results / "capabilities/selection.json", account([*candidates, undefined]))
    runs = [f"{run},{one['id']},0.4,0.2,True" for run in range(10) for one in candidates]
    publish_text(results / "capabilities/stability.csv", "\n".join(["run,capability,gap,coverage,kept", *runs]) + "\n")
    return results


def publish_played(project: Path, arms: Mapping[str, Sequence[Rollout]]) -> None:
    """Write what arms played on the test split: the base in its row, the others in TRACE's."""
    rows = {BASE: [BASE], TRACE: [name for name in arms if name != BASE]}
    for row, names in rows.items():
        played = [(Arm(name, "" if name == BASE else "adapters"), arms.get(name, ())) for name in names]
        folder = project / PLAYED / row
        publish(folder / "rollouts.jsonl", [rollout for _, rollouts in played for rollout in rollouts])
        publish(folder / "outcomes.jsonl", [one for arm, rollouts in played for one in outcomes_of(arm, rollouts)])
