"""Content of the report's pages, made from what `files` reads. Numbers that are undefined are None."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from captrain.evaluation import Bootstrap, tables
from captrain.records import Capability, Passport, Rollout, load, read_text, read_yaml
from captrain.reporting import published
from captrain.reporting.pages import files
from captrain.reporting.pages.archive import Archive, Lack, indices
from captrain.reporting.pages.files import JsonObject, Missing, plain

SELECTION = "results/capabilities/selection.json"
EXAMPLES = 5
"""Rollouts that the page of a capability shows in full."""
RESAMPLES = 2000
OWN_KINDS, OTHER_KINDS = "its own kinds", "all other kinds"


def selection(root: Path) -> Any:
    """Read the account of the selection, or what is missing."""
    return files.document(root, SELECTION, "capabilities", files.Selection)


def overview(root: Path) -> JsonObject:
    """Collect the main table, differences with their reading, and candidates."""
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
        "causality": files.table_of(root, "results/causality/capabilities.csv", "causality", files.CausalRow),
        "rediscovery": _rediscovery(root),
    }


def _rediscovery(root: Path) -> list[JsonObject] | Missing:
    """Read the diagnoses of the taught agent beside the base's, of the capabilities that one of them has selected."""
    rows = files.table_of(root, "results/solutions/rediscovery.csv", "solutions", files.RediscoveryRow)
    if isinstance(rows, Missing) or not any(row["round"] for row in rows):
        return rows if isinstance(rows, Missing) else []
    selected = {row["capability"] for row in rows if row["selected"]}
    return sorted(
        (row for row in rows if row["capability"] in selected), key=lambda row: (row["capability"], row["round"])
    )


def ledger(root: Path) -> JsonObject:
    """Collect rollouts counted by purpose, and what each method is charged for."""
    return {
        "ledger": files.table_of(root, "results/evaluation/ledger.csv", "evaluation", files.LedgerRow),
        "spent": files.table_of(root, "results/evaluation/spent.csv", "evaluation", files.SpendingRow),
    }


def tables_of_runs(root: Path) -> JsonObject:
    """Collect tables over several runs, by the file that they are of, and the figures that are drawn of them.

    Their columns are those of the file: a sweep has one for each of its settings.
    """
    further = sorted(path.parent.relative_to(root) for path in root.glob("results/replicates/*/summary.csv"))
    folders = ["results/replicates", *(folder.as_posix() for folder in further)]
    names = [f"{folder}/{table}.csv" for folder in folders for table in ("summary", "differences", "points")]
    names += sorted(path.relative_to(root).as_posix() for path in root.glob("results/sweeps/*.csv"))
    tables = {name: files.table_of(root, name, name.split("/")[1]) for name in names if (root / name).exists()}
    return {"tables": tables, "figures": [path.name for path in sorted(root.glob("results/studies/*.png"))]}


def literature(root: Path) -> JsonObject:
    """Collect the tables of the paper as printed, our number where the same thing was run, and what does not agree."""
    publication, run = published.read_published(), dict[tuple[str, str, str], JsonObject]()
    if all((root / "results" / name).exists() for name in ("evaluation/main.csv", "evaluation/kinds.csv", "spec.yaml")):
        with files.corruption_named(root, "results/spec.yaml", "compose"):
            read_yaml(root / "results/spec.yaml", JsonObject)
        rows = files.rows(published.table(root))
        run = {(row["what"], row["method"], row["at"]): row for row in rows if row["ours"] is not None}
    return {"known": publication, "ours": run}


def capabilities(root: Path, archive: Archive) -> list[JsonObject] | Missing:
    """List the candidates, best first, each with all that its page shows."""
    account = selection(root)
    if isinstance(account, Missing):
        return account
    history = files.table_of(root, "results/adapters/history.csv", "adapters", files.StepRow)
    adapters = files.document(root, "results/adapters/index.json", "adapters", dict[str, files.AdapterEntry])
    kinds = files.table_of(root, "results/evaluation/kinds.csv", "evaluation", files.KindRow)
    effects = files.table_of(root, "results/causality/effects.csv", "causality", files.EffectRow)
    proposals = _proposals(root)
    synthesized = (root / "results/environments").exists()
    rows = []
    for candidate in account["candidates"]:
        name = candidate["id"]
        path = f"results/environments/{name}.py"
        source = files.present(root, path, "environments", partial(read_text, root / path))
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
                "evidence": _evidence(name, proposals.get(name), archive),
                "gains": gains(name, archive),
                "effects": effects if isinstance(effects, Missing) else _own_effects(name, effects),
            }
        )
    return rows


def _own_effects(name: str, effects: list[JsonObject]) -> list[JsonObject]:
    """Select the effects of a capability's own adapter, by stratum of the base's rollouts."""
    return [row for row in effects if row["arm"] == name and row["capability"] in (name, None)]


def _proposals(root: Path) -> dict[str, Capability]:
    """Read every candidate as it was proposed; what is missing is said elsewhere."""
    stages = {"results/labels/candidates.jsonl": "labels", "results/capabilities/capabilities.jsonl": "capabilities"}
    proposals: dict[str, Capability] = {}
    for name, stage in stages.items():
        capabilities = files.present(root, name, stage, lambda name=name: load(root / name, Capability))
        proposals |= (
            {} if isinstance(capabilities, Missing) else {capability.id: capability for capability in capabilities}
        )
    return proposals


def _evidence(name: str, proposal: Capability | None, archive: Archive) -> list[tuple[Rollout, Lack]] | Missing:
    """Find rollouts that lack the capability, those first that it was proposed from."""
    missing = archive.discovery or archive.labels
    return missing or archive.examples(name, proposal.examples if proposal else (), EXAMPLES)


def gains(name: str, archive: Archive) -> JsonObject | Missing | None:
    """Estimate the adapter's gain over the base on tasks of each kind, on its own kinds together and on the others.

    A kind is the capability's own where more than half of its failed discovery rollouts demand it
    (`compounds.demands`). None where no such adapter was played; without labels no kind is known as its own.
    Intervals (95%) are of a bootstrap over tasks.
    """
    if archive.outcomes:
        return archive.outcomes
    if name not in archive.arms():
        return None
    places, tasks = archive.paired_rates(name)
    own_kinds = archive.own_kinds(name)
    kinds = sorted(places)
    groups = {OWN_KINDS: own_kinds, OTHER_KINDS: {*kinds} - own_kinds} if own_kinds else {}
    groups |= {kind: {kind} for kind in kinds}
    rows = []
    for group, members in groups.items():
        part = tasks[np.isin(tasks["kind"], [place for place, kind in enumerate(places) if kind in members])]
        if len(part):
            rates = np.stack([part["base"], part["adapter"]], axis=1)
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


class _Stages(BaseModel):
    """Fields that are read of dvc.yaml and dvc.lock."""

    stages: dict[str, JsonObject] = {}


def provenance(root: Path) -> list[JsonObject] | Missing:
    """List the stages of dvc.yaml: what each is, its command, its outputs with their hashes as dvc.lock records them,
    and whether they are here."""
    path, lock = root / "dvc.yaml", root / "dvc.lock"
    if not path.exists() or not lock.exists():
        absent = lock if path.exists() else path
        return Missing(f"{absent.name} is missing", "run the report inside a clone in which `dvc repro` has run")
    recorded, stages = (
        read_yaml(file, _Stages, f"restore it: `git checkout -- {file.name}`").stages for file in (lock, path)
    )
    rows = []
    for name, stage in stages.items():
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


def _is_present(root: Path, name: str) -> bool:
    path = root / name
    return any(path.iterdir()) if path.is_dir() else path.exists()


def arm_names(root: Path, archive: Archive) -> dict[str, str]:
    """Name the arms that are known by a digest alone: compositions of adapters."""
    arms = {"base", *(name for index in indices(root).values() for name in index)}
    return archive.composition_names(arms)
