"""Content of the report, made from what `files` reads. Numbers that are undefined are None."""

from functools import partial
from pathlib import Path

import numpy as np

from captrain.capabilities import SelectionAccount
from captrain.comparison import Bootstrap, evaluation_metrics, interpret_difference, published
from captrain.config import read_stages, row_of
from captrain.records import Capability, IndexEntry, JsonObject, Passport, load, read_json, read_text, read_yaml
from captrain.reporting.pages import files
from captrain.reporting.pages.archive import Archive, indices
from captrain.reporting.pages.files import Missing, plain

SELECTION = "results/capabilities/selection.json"
EXAMPLES = 5
"""Rollouts that are shown in full of each capability."""
RESAMPLES = 2000
OWN_KINDS, OTHER_KINDS = "its own kinds", "all other kinds"


def content(root: Path, archive: Archive) -> JsonObject:
    """Collect all that the page shows, by the name that its template knows it by."""
    evaluation = root / "results/evaluation"
    read = partial(evaluation_metrics, evaluation)
    metrics = files.present(root, "results/evaluation/metrics.json", "evaluation", read)
    confidence = 0.95 if isinstance(metrics, Missing) else metrics.confidence
    differences = files.table_of(root, "results/evaluation/differences.csv")
    if isinstance(differences, list):
        level = 1 - confidence
        differences = [{**row, "reading": interpret_difference(row, level)} for row in differences]
    selection = files.document(root, SELECTION, "capabilities", SelectionAccount)
    return {
        "confidence": confidence,
        "differences": differences,
        "main": files.table_of(root, "results/evaluation/main.csv"),
        "kinds": files.table_of(root, "results/evaluation/kinds.csv"),
        "ledger": files.table_of(root, "results/evaluation/ledger.csv"),
        "spent": files.table_of(root, "results/evaluation/spent.csv"),
        "causality": files.table_of(root, "results/causality/capabilities.csv"),
        "rediscovery": _rediscovery(root),
        "selection": selection,
        "candidates": [] if isinstance(selection, Missing) else _capabilities(root, archive, selection["candidates"]),
        "missing": [part for part in (archive.discovery, archive.labels, archive.evaluation) if part],
        "rollouts": archive.has_rollouts,
        "stages": _stages(root),
        **_tables_of_runs(root),
        **_literature(root),
    }


def _rediscovery(root: Path) -> list[JsonObject] | Missing:
    """Read the diagnoses of the taught agent beside the base's, of the capabilities that one of them has selected."""
    rows = files.table_of(root, "results/solutions/rediscovery.csv")
    if isinstance(rows, Missing) or not any(row["round"] for row in rows):
        return rows if isinstance(rows, Missing) else []
    selected = {row["capability"] for row in rows if row["selected"]}
    return sorted(
        (row for row in rows if row["capability"] in selected), key=lambda row: (row["capability"], row["round"])
    )


def _tables_of_runs(root: Path) -> JsonObject:
    """Collect tables over several runs, by the file that they are of, and the figures that are drawn of them.

    Their columns are those of the file: a sweep has one for each of its settings.
    """
    paths = [root / "results/replicates/summary.csv", *sorted(root.glob("results/replicates/*/summary.csv"))]
    names = [path.with_stem(table) for path in paths for table in ("summary", "differences", "points")]
    names = [path.relative_to(root).as_posix() for path in [*names, *sorted(root.glob("results/sweeps/*.csv"))]]
    tables = {name: files.table_of(root, name) for name in names if (root / name).exists()}
    return {"tables": tables, "figures": [path.name for path in sorted(root.glob("results/studies/*.png"))]}


def _literature(root: Path) -> JsonObject:
    """Collect the tables of the paper as printed, our number where the same thing was run, and what does not agree."""
    publication, run = published.read_published(), dict[tuple[str, str, str], JsonObject]()
    if all((root / "results" / name).exists() for name in ("evaluation/main.csv", "evaluation/kinds.csv", "spec.yaml")):
        with files.corruption_named(root, "results/spec.yaml", "compose"):
            read_yaml(root / "results/spec.yaml", JsonObject)
        rows = [
            {key: files.plain(value) for key, value in row.items()} for row in published.table(root).to_dict("records")
        ]
        run = {(row["what"], row["method"], row["at"]): row for row in rows if row["ours"] is not None}
    return {"known": publication, "ours": run}


def _capabilities(root: Path, archive: Archive, candidates: list[JsonObject]) -> list[JsonObject]:
    """Add to each candidate, best first, all that is shown of it alone."""
    history = files.table_of(root, "results/adapters/history.csv")
    adapters = files.document(root, "results/adapters/index.json", "adapters", dict[str, IndexEntry])
    effects = files.table_of(root, "results/causality/effects.csv")
    proposals = _proposals(root)
    synthesized = (root / "results/environments").exists()
    rows = []
    for candidate in candidates:
        name = candidate["id"]
        path, place = f"results/environments/{name}.py", f"results/environments/{name}.passport.json"
        source = files.present(root, path, "environments", partial(read_text, root / path))
        passport = files.present(root, place, "environments", partial(read_json, root / place, Passport))
        proposal = proposals.get(name)
        rows.append(
            {
                **candidate,
                "details": proposal.details if proposal else {},
                "passport": None if isinstance(passport, Missing) and synthesized else passport,
                "source": "" if isinstance(source, Missing) else source,
                "history": _own(history, adapter=[name]),
                "adapter": adapters if isinstance(adapters, Missing) else adapters.get(name),
                # Those first that it was proposed from.
                "evidence": archive.discovery
                or archive.labels
                or archive.examples(name, proposal.examples if proposal else (), EXAMPLES),
                "gains": gains(name, archive),
                "effects": _own(effects, arm=[name], capability=[name, None]),
            }
        )
    return rows


def _own(rows: list[JsonObject] | Missing, **values: list[str | None] | list[str]) -> list[JsonObject] | Missing:
    """Select the rows that have one of these values in each of these columns."""
    if isinstance(rows, Missing):
        return rows
    return [row for row in rows if all(row[column] in allowed for column, allowed in values.items())]


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


def _stages(root: Path) -> list[JsonObject] | Missing:
    """List the stages of dvc.yaml: what each is, its command, its outputs with their hashes as dvc.lock records them,
    and whether they are here."""
    for name in ("dvc.yaml", "dvc.lock"):
        if not (root / name).exists():
            return Missing(f"{name} is missing", "run the report inside a clone in which `dvc repro` has run")
    stages = read_stages(root / "dvc.yaml", "restore it: `git checkout -- dvc.yaml`")
    recorded = read_yaml(root / "dvc.lock", JsonObject, "restore it: `git checkout -- dvc.lock`").get("stages", {})
    empty = {"md5": "", "size": None}
    return [
        {
            "name": row_of(name),
            "command": f"dvc repro {name}",
            "desc": stage.get("desc", ""),
            "cmd": stage.get("cmd", ""),
            "outs": [{**empty, **entry, "here": _is_present(root, entry["path"])} for entry in record.get("outs", [])],
            "deps": [{**empty, **entry} for entry in record.get("deps", [])],
        }
        for name, stage in stages.items()
        for record in [recorded.get(name, {})]
    ]


def _is_present(root: Path, name: str) -> bool:
    path = root / name
    return any(path.iterdir()) if path.is_dir() else path.exists()


def arm_names(root: Path, archive: Archive) -> dict[str, str]:
    """Name the arms that are known by a digest alone: compositions of adapters."""
    arms = {"base", *(name for index in indices(root).values() for name in index)}
    return archive.composition_names(arms)
