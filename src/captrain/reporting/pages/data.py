"""What the pages of the report say, of what `files` reads. Numbers that are undefined are None."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import yaml
from pydantic import TypeAdapter

from captrain.baselines import acting_stages
from captrain.capabilities import demands, is_majority, labels_of_rollouts
from captrain.errors import UserError
from captrain.evaluation import Bootstrap, tables
from captrain.records import Capability, Passport, Rollout, RolloutLabels, load
from captrain.reporting import loaders, published
from captrain.reporting.pages import files
from captrain.reporting.pages.files import JsonObject, Missing, plain

LABELS = "artifacts/labels/labels.jsonl"
SELECTION = "results/capabilities/selection.json"
EXAMPLES = 5
"""Rollouts that the page of a capability shows in full."""
RESAMPLES = 2000
OWN_KINDS, OTHER_KINDS = "its own kinds", "all other kinds"


@dataclass(frozen=True)
class Lack:
    """What the labels say of one failed rollout and one capability: in how many of the runs that labelled it it is
    LACKING, and the evidence that most of those give, with the index of the message it points at."""

    capability: str
    lacking: int
    runs: int
    evidence: str
    message: int | None


def selection(root: Path) -> Any:
    """The account of the selection, or what is missing."""
    return files.document(root, SELECTION, "capabilities", files.Selection)


def overview(root: Path) -> JsonObject:
    """Main table, differences with their reading, candidates, recommendation."""
    metrics = files.document(root, "results/evaluation/metrics.json", "evaluation", files.Metrics)
    confidence = 0.95 if isinstance(metrics, Missing) else metrics["confidence"]
    differences = files.table_of(root, "results/evaluation/differences.csv", "evaluation", files.DifferenceRow)
    if isinstance(differences, list):
        level = 1 - confidence
        differences = [{**row, "reading": tables.interpret_difference(row, level)} for row in differences]
    return {
        "confidence": confidence,
        "main": files.table_of(root, "results/evaluation/main.csv", "evaluation", files.MethodRow),
        "differences": differences,
        "candidates": selection(root),
        "recommendation": files.document(
            root, "results/capabilities/recommendation.json", "capabilities", files.Recommendation
        ),
    }


def ledger(root: Path) -> JsonObject:
    """Rollouts counted by purpose, and what each method is charged for."""
    return {
        "ledger": files.table_of(root, "results/evaluation/ledger.csv", "evaluation", files.LedgerRow),
        "spent": files.table_of(root, "results/evaluation/spent.csv", "evaluation", files.SpendingRow),
    }


def tables_of_runs(root: Path) -> JsonObject:
    """Tables over several runs, by the file that they are of, and the figures that are drawn of them.

    Their columns are those of the file: a sweep has one for each of its settings.
    """
    names = ["results/replicates/summary.csv", "results/replicates/differences.csv", "results/replicates/points.csv"]
    names += sorted(path.relative_to(root).as_posix() for path in root.glob("results/sweeps/*.csv"))
    tables = {name: files.table_of(root, name, name.split("/")[1]) for name in names if (root / name).exists()}
    return {"tables": tables, "figures": [path.name for path in sorted(root.glob("results/studies/*.png"))]}


def literature(root: Path) -> JsonObject:
    """The tables of the paper as printed, our number where the same thing was run, and what does not agree."""
    publication, run = published.read_published(), dict[tuple[str, str, str], JsonObject]()
    if all((root / "results" / name).exists() for name in ("evaluation/main.csv", "evaluation/kinds.csv", "spec.yaml")):
        with files.corruption_named(root, "results/spec.yaml", "compose"):
            TypeAdapter(dict[str, Any]).validate_python(yaml.safe_load((root / "results/spec.yaml").read_text()))
        rows = files.rows(published.table(root))
        run = {(row["what"], row["method"], row["at"]): row for row in rows if row["ours"] is not None}
    return {"known": publication, "ours": run, "contradictions": published.contradictions()}


def rollouts(root: Path, purpose: Literal["diagnosis", "evaluation"]) -> list[Rollout] | Missing:
    """The rollouts of one purpose."""
    stage = "rollouts" if purpose == "diagnosis" else purpose
    return files.present(root, loaders.ROLLOUTS[purpose], stage, lambda: loaders.load_rollouts(root, purpose))


def outcomes(root: Path, rollouts: list[Rollout] | Missing) -> pd.DataFrame | Missing:
    """As `loaders.load_outcomes` gives them, of the rollouts of the evaluation."""
    if isinstance(rollouts, Missing):
        return rollouts
    adapters = files.document(root, "results/adapters/index.json", "adapters", dict[str, files.AdapterEntry])
    if isinstance(adapters, Missing):
        return adapters
    indices(root)  # so that a corrupt one is named
    return files.present(
        root, loaders.ROLLOUTS["evaluation"], "evaluation", lambda: loaders.load_outcomes(root, rollouts)
    )


def labels(root: Path) -> list[RolloutLabels] | Missing:
    """All labels of all runs."""
    return files.present(root, LABELS, "labels", lambda: load(root / LABELS, RolloutLabels))


def majority_lacks(labels: Sequence[RolloutLabels]) -> dict[str, list[Lack]]:
    """What each failed rollout lacks in more than half of the runs that labelled it."""
    lacking: defaultdict[str, list[Lack]] = defaultdict(list)
    for rollout, capabilities in labels_of_rollouts(row for row in labels if row.outcome == "failed").items():
        for name, runs in capabilities.items():
            if is_majority([label.verdict == "LACKING" for label in runs]):
                against = [label for label in runs if label.verdict == "LACKING"]
                reasons = Counter((label.evidence, label.message) for label in against)
                ((evidence, message), _), *_ = reasons.most_common(1)
                lacking[rollout].append(Lack(name, len(against), len(runs), evidence, message))
    return dict(lacking)


def capabilities(
    root: Path,
    discovery: Sequence[Rollout] | Missing,
    verdicts: Sequence[RolloutLabels] | Missing,
    outcomes: pd.DataFrame | Missing,
) -> list[JsonObject] | Missing:
    """One row a candidate, best first, with all that its page shows.

    Args:
        root: of the project.
        discovery: rollouts of the diagnosis.
        verdicts: labels of these.
        outcomes: of the evaluation, as `loaders.load_outcomes` gives them.
    """
    account = selection(root)
    if isinstance(account, Missing):
        return account
    history = files.table_of(root, "results/adapters/history.csv", "adapters", files.StepRow)
    adapters = files.document(root, "results/adapters/index.json", "adapters", dict[str, files.AdapterEntry])
    kinds = files.table_of(root, "results/evaluation/kinds.csv", "evaluation", files.KindRow)
    proposals = _proposals(root)
    lacking = {} if isinstance(verdicts, Missing) else majority_lacks(verdicts)
    synthesized = (root / "results/environments").exists()
    rows = []
    for candidate in account["candidates"]:
        name = candidate["id"]
        path = f"results/environments/{name}.py"
        source = files.present(root, path, "environments", (root / path).read_text)
        passport = files.model(root, f"results/environments/{name}.passport.json", "environments", Passport)
        steps = history if isinstance(history, Missing) else [row for row in history if row["adapter"] == name]
        rows.append(
            {
                **candidate,
                "thresholds": account["thresholds"],
                "details": proposals[name].details if name in proposals else {},
                "passport": None if isinstance(passport, Missing) and synthesized else passport,
                "source": "" if isinstance(source, Missing) else source,
                "history": steps,
                "adapter": adapters if isinstance(adapters, Missing) else adapters.get(name),
                "kinds": kinds,
                "evidence": _evidence(name, proposals.get(name), discovery, verdicts, lacking),
                "gains": gains(name, discovery, verdicts, outcomes),
            }
        )
    return rows


def _proposals(root: Path) -> dict[str, Capability]:
    """Every candidate as it was proposed; what is missing is said elsewhere."""
    stages = {"results/labels/candidates.jsonl": "labels", "results/capabilities/capabilities.jsonl": "capabilities"}
    proposals: dict[str, Capability] = {}
    for name, stage in stages.items():
        capabilities = files.present(root, name, stage, lambda name=name: load(root / name, Capability))
        proposals |= (
            {} if isinstance(capabilities, Missing) else {capability.id: capability for capability in capabilities}
        )
    return proposals


def _evidence(
    name: str,
    proposal: Capability | None,
    discovery: Sequence[Rollout] | Missing,
    verdicts: Sequence[RolloutLabels] | Missing,
    lacking: Mapping[str, list[Lack]],
) -> list[tuple[Rollout, Lack]] | Missing:
    """Rollouts that lack the capability, those first that it was proposed from."""
    if isinstance(discovery, Missing) or isinstance(verdicts, Missing):
        return discovery if isinstance(discovery, Missing) else verdicts  # type: ignore[return-value]
    first = {rollout: position for position, rollout in enumerate(proposal.examples if proposal else ())}
    pairs = [
        (failure, lack) for failure in discovery for lack in lacking.get(failure.id, ()) if lack.capability == name
    ]
    pairs.sort(key=lambda pair: first.get(pair[0].id, len(first)))  # stable: the others stay in their order
    return pairs[:EXAMPLES]


def gains(
    name: str,
    discovery: Sequence[Rollout] | Missing,
    verdicts: Sequence[RolloutLabels] | Missing,
    outcomes: pd.DataFrame | Missing,
) -> JsonObject | Missing | None:
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
    tasks = {place: arms for place, arms in passed.items() if all(arms.values())}
    own_kinds = _own_kinds(name, discovery, verdicts)
    kinds = sorted({kind for kind, _ in tasks})
    groups = {OWN_KINDS: own_kinds, OTHER_KINDS: {*kinds} - own_kinds} if own_kinds else {}
    groups |= {kind: {kind} for kind in kinds}
    rows = []
    for group, members in groups.items():
        part = [arms for (kind, _), arms in tasks.items() if kind in members]
        if part:
            rates = np.array([[sum(arms[arm]) / len(arms[arm]) for arm in ("base", name)] for arms in part])
            differences = rates[:, 1] - rates[:, 0]
            low, high = Bootstrap(len(differences), RESAMPLES, 0.95, 0).interval(differences)
            base, adapter = rates.mean(axis=0).tolist()
            rows.append(
                {
                    "group": group,
                    "strong": group in (OWN_KINDS, OTHER_KINDS) or group in own_kinds,
                    "tasks": len(part),
                    "base": base,
                    "adapter": adapter,
                    "gain": float(differences.mean()),
                    "low": plain(low),
                    "high": plain(high),
                }
            )
    return {"rows": rows, "own": sorted(own_kinds)}


def _own_kinds(
    name: str, discovery: Sequence[Rollout] | Missing, verdicts: Sequence[RolloutLabels] | Missing
) -> set[str]:
    if isinstance(discovery, Missing) or isinstance(verdicts, Missing):
        return set()
    demanded = demands(verdicts, [name])
    demands_of: defaultdict[str, list[bool]] = defaultdict(list)
    for rollout in discovery:
        if rollout.id in demanded:
            demands_of[str(rollout.task.data.get("kind", ""))].append(name in demanded[rollout.id])
    return {kind for kind, flags in demands_of.items() if is_majority(flags)}


def provenance(root: Path) -> list[JsonObject] | Missing:
    """One row a stage of dvc.yaml: what it is, its command, its outputs with their hashes as dvc.lock records them, and
    whether they are here."""
    path, lock = root / "dvc.yaml", root / "dvc.lock"
    if not path.exists() or not lock.exists():
        absent = lock if path.exists() else path
        return Missing(f"{absent.name} is missing", "run the report inside a clone in which `dvc repro` has run")
    recorded = (_yaml(lock) or {}).get("stages", {})
    rows = []
    for name, stage in _yaml(path)["stages"].items():
        record = recorded.get(name, {})
        outputs = [
            {
                "path": entry["path"],
                "hash": entry.get("md5", ""),
                "size": entry.get("size"),
                "here": _is_present(root, entry["path"]),
            }
            for entry in record.get("outs", [])
        ]
        inputs = [{"path": entry["path"], "hash": entry.get("md5", "")} for entry in record.get("deps", [])]
        command = stage.get("cmd", "")
        rows.append({"name": name, "desc": stage.get("desc", ""), "cmd": command, "outputs": outputs, "inputs": inputs})
    return rows


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is corrupt: {reason}", f"restore it: `git checkout -- {path.name}`") from None


def _is_present(root: Path, name: str) -> bool:
    path = root / name
    return any(path.iterdir()) if path.is_dir() else path.exists()


def routes(root: Path) -> list[JsonObject] | Missing:
    """One row a task: task, kind, the arm that each router chooses, and the configured one's (`chosen`)."""
    return files.table_of(root, "results/routes/routes.csv", "routes", files.RouteRow)


def arm_names(root: Path, outcomes: pd.DataFrame, routes: Sequence[JsonObject]) -> dict[str, str]:
    """Names of compositions by the digest that stands for them among the arms: a composition is played on the tasks
    that are routed to it and on no other, and is named where that is true of one alone."""
    names = files.document(root, "results/routes/compositions.json", "routes", dict[str, Any])
    if isinstance(names, Missing):
        return {}
    tasks_of: dict[str, set[str]] = {name: set() for name in names}
    for row in routes:
        for column, arm in row.items():
            if column not in ("task", "kind") and arm in tasks_of:
                tasks_of[arm].add(row["task"])
    arms = {"base", *(name for index in indices(root).values() for name in index)}
    names_of = {}
    for arm, part in outcomes.groupby("arm"):
        fitting = [name for name, tasks in tasks_of.items() if tasks == set(part["task"])]
        if arm not in arms and len(fitting) == 1:
            names_of[str(arm)] = fitting[0]
    return names_of


def indices(root: Path) -> dict[str, dict[str, Any]]:
    """What each stage that is here has left to act with, by stage and name."""
    documents = {
        stage: files.document(root, f"results/{stage}/index.json", stage, dict[str, files.AdapterEntry])
        for stage in acting_stages()
    }
    return {stage: index for stage, index in documents.items() if not isinstance(index, Missing)}
