"""What the pages of the report say, read from results/ and artifacts/ through the loaders.

What is not there is a `Missing` with its remedy, which a page shows in its place: a fresh clone has results/ alone, and
its report says what else there could be. Tables become lists of rows, numbers that are undefined None.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import yaml

from captrain import loaders
from captrain.compounds import demands
from captrain.errors import UserError
from captrain.methods import STAGES
from captrain.records import Capability, Rollout, RolloutLabels, load
from captrain.statistics import Bootstrap

Row = dict[str, Any]
LABELS = "artifacts/labels/labels.jsonl"
EXAMPLES = 5
"""Rollouts that the page of a capability shows in full."""
RESAMPLES = 2000
OWN, OTHERS = "its own kinds", "all other kinds"


@dataclass(frozen=True)
class Missing:
    """What is not here and how to make it."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Lack:
    """What the labels say of one failed rollout and one capability: in how many of the runs that labelled it it is
    LACKING, and the evidence that most of those give, with the index of the message it points at."""

    capability: str
    lacking: int
    runs: int
    evidence: str
    message: int | None


T = TypeVar("T")


def attempt(root: Path, read: Callable[[], T]) -> T | Missing:
    """What a loader returns, or what it says is missing, with paths relative to the project."""
    try:
        return read()
    except UserError as error:
        return Missing(*(text.replace(f"{root}/", "") for text in (error.problem, error.remedy)))


def cached(root: Path, path: str, stage: str, read: Callable[[], T]) -> T | Missing:
    """`attempt` of what DVC caches and git does not hold."""
    if not (root / path).exists():
        return Missing(f"{path} is not here", f"run `dvc pull` if a remote holds it, or `dvc repro {stage}`")
    return attempt(root, read)


def rows(table: pd.DataFrame) -> list[Row]:
    """A table as rows of plain values: NaN is None."""
    return [{key: plain(value) for key, value in row.items()} for row in table.to_dict("records")]


def plain(value: Any) -> Any:
    """A numpy scalar as Python's own; NaN as None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


def document(root: Path, name: str) -> Any:
    """A JSON document of results/.

    Raises:
        UserError: it is missing.
    """
    path = root / "results" / name
    if not path.exists():
        raise UserError(f"{path} is missing", f"run `dvc repro {name.split('/')[0]}` to make it")
    return json.loads(path.read_text())


def overview(root: Path) -> Row:
    """Main table, differences with their reading, what was spent, candidates, recommendation, means over seeds."""
    metrics = attempt(root, lambda: document(root, "evaluation/metrics.json"))
    confidence = 0.95 if isinstance(metrics, Missing) else metrics["confidence"]
    return {
        "confidence": confidence,
        "main": attempt(root, lambda: rows(loaders.load_main(root))),
        "differences": attempt(root, lambda: differences(loaders.load_differences(root), 1 - confidence)),
        "candidates": attempt(root, lambda: document(root, "capabilities/selection.json")),
        "recommendation": attempt(root, lambda: document(root, "capabilities/recommendation.json")),
    }


def differences(table: pd.DataFrame, level: float) -> list[Row]:
    """Comparisons with what to read in them: an interval that excludes 0 is not enough where the corrected test does
    not agree."""
    found = rows(table)
    for row in found:
        p = row.get("p_holm")
        if not row["distinguishable"]:
            row["reading"] = "not distinguishable"
        elif p is not None and p >= level:
            row["reading"] = "not distinguishable after correction"
        else:
            row["reading"] = "distinguishable"
    return found


def ledger(root: Path) -> Row:
    """Rollouts counted by purpose, and what each method is charged for."""
    folder = root / "results/evaluation"
    return {
        "ledger": attempt(root, lambda: rows(loaders.evaluation.read(folder, "ledger"))),
        "spent": attempt(root, lambda: rows(loaders.evaluation.read(folder, "spent"))),
    }


def labels(root: Path) -> list[RolloutLabels]:
    """All labels of all runs."""
    return load(root / LABELS, RolloutLabels)


def lacks(found: Sequence[RolloutLabels]) -> dict[str, list[Lack]]:
    """What each failed rollout lacks in more than half of the runs that labelled it."""
    said: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in found:
        if row.outcome == "failed":
            for name, label in row.labels.items():
                said[row.rollout, name].append(label)
    lacking: defaultdict[str, list[Lack]] = defaultdict(list)
    for (rollout, name), verdicts in said.items():
        against = [one for one in verdicts if one.verdict == "LACKING"]
        if 2 * len(against) > len(verdicts):
            ((evidence, message), _), *_ = Counter((one.evidence, one.message) for one in against).most_common(1)
            lacking[rollout].append(Lack(name, len(against), len(verdicts), evidence, message))
    return dict(lacking)


def capabilities(
    root: Path,
    discovery: Sequence[Rollout] | Missing,
    verdicts: Sequence[RolloutLabels] | Missing,
    outcomes: pd.DataFrame | Missing,
) -> list[Row] | Missing:
    """One row a candidate, best first, with all that its page shows.

    Args:
        root: of the project.
        discovery: rollouts of the diagnosis.
        verdicts: labels of these.
        outcomes: of the evaluation, as `loaders.load_outcomes` gives them.
    """
    selection = attempt(root, lambda: document(root, "capabilities/selection.json"))
    if isinstance(selection, Missing):
        return selection
    passports = attempt(root, lambda: loaders.load_passports(root))
    history = attempt(root, lambda: loaders.load_history(root))
    adapters = attempt(root, lambda: loaders.load_adapters(root))
    kinds = attempt(root, lambda: rows(loaders.load_kinds(root)))
    proposed = _proposed(root)
    lacking = {} if isinstance(verdicts, Missing) else lacks(verdicts)
    found = []
    for one in selection["candidates"]:
        name = one["id"]
        source = root / f"results/environments/{name}.py"
        passport = passports if isinstance(passports, Missing) else passports.get(name)
        steps = history if isinstance(history, Missing) else _adapters_own(history, "adapter", name)
        made = adapters if isinstance(adapters, Missing) else _adapters_own(adapters, "name", name)
        found.append(
            {
                **one,
                "thresholds": selection["thresholds"],
                "details": proposed[name].details if name in proposed else {},
                "passport": passport,
                "source": source.read_text() if source.exists() else "",
                "history": steps,
                "adapter": made[0] if isinstance(made, list) and made else made,
                "kinds": kinds,
                "evidence": _evidence(name, proposed.get(name), discovery, verdicts, lacking),
                "gains": gains(name, discovery, verdicts, outcomes),
            }
        )
    return found


def _adapters_own(table: pd.DataFrame, column: str, name: str) -> list[Row]:
    return [row for row in rows(table) if row[column] == name and row["stage"] == "adapters"]


def _proposed(root: Path) -> dict[str, Capability]:
    """Every candidate as it was proposed; what is missing is said elsewhere."""
    paths = [root / "results/labels/candidates.jsonl", root / "results/capabilities/capabilities.jsonl"]
    return {one.id: one for path in paths if path.exists() for one in load(path, Capability)}


def _evidence(
    name: str,
    proposed: Capability | None,
    discovery: Sequence[Rollout] | Missing,
    verdicts: Sequence[RolloutLabels] | Missing,
    lacking: Mapping[str, list[Lack]],
) -> list[tuple[Rollout, Lack]] | Missing:
    """Rollouts that lack the capability, those first that it was proposed from."""
    if isinstance(discovery, Missing) or isinstance(verdicts, Missing):
        return discovery if isinstance(discovery, Missing) else verdicts  # type: ignore[return-value]
    first = {rollout: at for at, rollout in enumerate(proposed.examples if proposed else ())}
    found = [(one, lack) for one in discovery for lack in lacking.get(one.id, ()) if lack.capability == name]
    found.sort(key=lambda pair: first.get(pair[0].id, len(first)))  # stable: the others stay in their order
    return found[:EXAMPLES]


def gains(
    name: str,
    discovery: Sequence[Rollout] | Missing,
    verdicts: Sequence[RolloutLabels] | Missing,
    outcomes: pd.DataFrame | Missing,
) -> Row | Missing | None:
    """What the adapter gains over the base on tasks of each kind, on its own kinds together and on the others.

    A kind is the capability's own where more than half of its failed discovery rollouts demand it
    (`compounds.demands`). None where no such adapter was played; without labels no kind is known as its own.
    Intervals (95%) are of a bootstrap over tasks.
    """
    if isinstance(outcomes, Missing):
        return outcomes
    if name not in set(outcomes["arm"]):
        return None
    passed: defaultdict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: {"base": [], name: []})
    for kind, task, arm, outcome in outcomes[["kind", "task", "arm", "outcome"]].itertuples(index=False, name=None):
        if arm in ("base", name) and outcome != "error":
            passed[str(kind), task][arm].append(outcome == "passed")
    both = {place: arms for place, arms in passed.items() if all(arms.values())}
    own = _own_kinds(name, discovery, verdicts)
    kinds = sorted({kind for kind, _ in both})
    groups = {OWN: own, OTHERS: {*kinds} - own} if own else {}
    groups |= {kind: {kind} for kind in kinds}
    found = []
    for group, members in groups.items():
        part = [arms for (kind, _), arms in both.items() if kind in members]
        if part:
            rates = np.array([[sum(arms[arm]) / len(arms[arm]) for arm in ("base", name)] for arms in part])
            each = rates[:, 1] - rates[:, 0]
            low, high = Bootstrap(len(each), RESAMPLES, 0.95, 0).interval(each)
            base, adapter = rates.mean(axis=0).tolist()
            found.append(
                {
                    "group": group,
                    "strong": group in (OWN, OTHERS) or group in own,
                    "tasks": len(part),
                    "base": base,
                    "adapter": adapter,
                    "gain": float(each.mean()),
                    "low": plain(low),
                    "high": plain(high),
                }
            )
    return {"rows": found, "own": sorted(own)}


def _own_kinds(
    name: str, discovery: Sequence[Rollout] | Missing, verdicts: Sequence[RolloutLabels] | Missing
) -> set[str]:
    if isinstance(discovery, Missing) or isinstance(verdicts, Missing):
        return set()
    asked = demands(verdicts, [name])
    said: defaultdict[str, list[bool]] = defaultdict(list)
    for one in discovery:
        if one.id in asked:
            said[str(one.task.data.get("kind", ""))].append(name in asked[one.id])
    return {kind for kind, each in said.items() if 2 * sum(each) > len(each)}


def provenance(root: Path) -> list[Row] | Missing:
    """One row a stage of dvc.yaml: what it is, its command, its outputs with their hashes as dvc.lock records them, and
    whether they are here."""
    path, lock = root / "dvc.yaml", root / "dvc.lock"
    if not path.exists() or not lock.exists():
        gone = lock if path.exists() else path
        return Missing(f"{gone.name} is missing", "run the report inside a clone in which `dvc repro` has run")
    recorded = (yaml.safe_load(lock.read_text()) or {}).get("stages", {})
    found = []
    for name, stage in yaml.safe_load(path.read_text())["stages"].items():
        own = recorded.get(name, {})
        outputs = [
            {"path": one["path"], "hash": one.get("md5", ""), "size": one.get("size"), "here": _here(root, one["path"])}
            for one in own.get("outs", [])
        ]
        inputs = [{"path": one["path"], "hash": one.get("md5", "")} for one in own.get("deps", [])]
        command = stage.get("cmd", "")
        found.append(
            {"name": name, "desc": stage.get("desc", ""), "cmd": command, "outputs": outputs, "inputs": inputs}
        )
    return found


def _here(root: Path, name: str) -> bool:
    path = root / name
    return any(path.iterdir()) if path.is_dir() else path.exists()


def arm_names(root: Path, outcomes: pd.DataFrame) -> dict[str, str]:
    """Names of compositions by the digest that stands for them among the arms: a composition is played on the tasks
    that are routed to it and on no other, and is named where that is true of one alone."""
    routes = attempt(root, lambda: loaders.load_routes(root))
    if isinstance(routes, Missing):
        return {}
    path = root / "results/routes/compositions.json"
    names = json.loads(path.read_text()) if path.exists() else {}
    choices = routes.drop(columns=["task", "kind"])
    asked = {name: frozenset(routes["task"][choices.eq(name).any(axis=1)]) for name in names}
    known = {"base", *(row["name"] for row in _adapter_rows(root))}
    found = {}
    for arm, part in outcomes.groupby("arm"):
        fitting = [name for name, tasks in asked.items() if tasks == frozenset(part["task"])]
        if arm not in known and len(fitting) == 1:
            found[str(arm)] = fitting[0]
    return found


def _adapter_rows(root: Path) -> list[Row]:
    paths = [root / "results" / stage / "index.json" for stage in STAGES]
    return [{"name": name} for path in paths if path.exists() for name in json.loads(path.read_text())]
