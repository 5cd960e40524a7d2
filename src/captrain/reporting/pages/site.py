"""`captrain report`: one page with its script and data, in a folder that opens from disk.

`files` reads results/. `rollouts` reads artifacts/ and splits rollouts and labels into files that the page loads when
it needs them. This module collects the content, renders the page and writes the folder. Undefined numbers are None.

Equal inputs give equal bytes: no time, machine or path is written. The folder is written aside and renamed at the end,
so it is always a complete report. A folder that is not a report is never replaced. Rollouts are data: the template
escapes all text, the script sets only text, and the page's policy allows no script but the report's own.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import jinja2
from markupsafe import Markup

from captrain.capabilities import CAUSES, CandidateAccount, SelectionAccount
from captrain.comparison import (
    ComparisonRow,
    evaluation_metrics,
    headline_methods,
    label,
    published,
    supervision,
    unequal_total,
)
from captrain.errors import UserError
from captrain.records import (
    Capability,
    IndexEntry,
    JsonObject,
    Passport,
    Rollout,
    load,
    place_aside,
    plain,
    read_json,
    read_text,
    read_yaml,
    without_secrets,
)
from captrain.reporting.pages import files
from captrain.reporting.pages.files import Missing
from captrain.reporting.pages.rollouts import Archive, MajorityLack, compact, message_on_page
from captrain.reporting.rediscovery import of_selected
from captrain.reporting.verdicts import VERDICTS, verdict
from captrain.run import read_stages, repro, row_of

FOLDER = Path(__file__).parent
GENERATOR = '<meta name="generator" content="captrain report">'
EXAMPLES = 5
"""Rollouts that are shown in full for each capability."""


HEADINGS = {
    "label": "row",
    "reading": "verdict",
    "over_grpo": "difference to GRPO",
    "over_low": "from",
    "over_high": "to",
}
"""Headings of columns in tables of several runs."""
ANSWERS = {"True": "yes", "False": "no"}
REPEATED = {"method": "label", "distinguishable": "reading", "point": "seed"}
"""Column that is left out -> the more readable column with the same content."""


def build(root: Path, out: Path) -> list[Path]:
    """Write the report of a project.

    Args:
        root: folder of the project, with results/ and perhaps artifacts/.
        out: folder for the report; an old report in it is replaced.

    Returns:
        The files written, the page first.

    Raises:
        UserError: `out` holds something other than a report, or a result file is corrupt.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        page = out / "index.html"
        if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace"):
            raise UserError(f"{out} exists and is not a report", "name a new folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    with place_aside(out, f".{os.getpid()}") as aside, Archive(root) as archive:
        (aside / "data").mkdir(parents=True)
        for name, content in _files(root, archive):
            with (aside / name).open("wb") as file:
                pieces = [content] if isinstance(content, str | bytes) else content
                file.writelines(
                    without_secrets(piece).encode() if isinstance(piece, str) else piece for piece in pieces
                )
            paths.append(out / name)
        if out.exists():
            shutil.rmtree(out)
        aside.rename(out)
    return paths


def _files(root: Path, archive: Archive) -> Iterator[tuple[str, str | bytes | Iterable[str]]]:
    """Yield name and content of every file of the report, the page first."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters |= {
        "num": lambda value: "undefined" if value is None else f"{value:.3f}",
        "signed": lambda value: "undefined" if value is None else f"{value:+.3f}",
        "count": lambda value: "" if value is None else f"{int(value):,}",
        "size": lambda value: (
            "" if value is None else f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"
        ),
        "p": lambda value: "not tested" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}",
        # Its text cannot end the script element of data.
        "island": lambda value: Markup(compact(value)),
        "columns": _columns,
        "shown": message_on_page,
    }
    pages.tests["missing"] = lambda value: isinstance(value, Missing)
    functions: dict[str, object] = {
        "generator": Markup(GENERATOR),
        "style": Markup((FOLDER / "static/style.css").read_text(encoding="utf-8")),
        "headline": headline_methods(),
        "label": label,
        "with_id": _with_id,
        "unequal_total": unequal_total,
        "supervision": supervision,
        "least": _least,
    }
    pages.globals.update(functions)
    content = _content(root, archive)
    yield "index.html", pages.get_template("index.html.j2").render(content)
    yield "report.js", (FOLDER / "static/report.js").read_text(encoding="utf-8")
    for name in cast(list[str], content["figures"]):
        yield f"figure-{name}", (root / "results/studies" / name).read_bytes()
    candidates = cast(list[CandidatePage], content["candidates"])
    yield from archive.data([row["id"] for row in candidates if row["selected"]])


def _least(candidates: Sequence[CandidateAccount]) -> float:
    """Return the start of the axis of gaps: 0, or less if a gap or an interval is negative."""
    gaps = [run["gap"] for candidate in candidates for run in candidate["per_run"]]
    gaps += [candidate["gap_low"] for candidate in candidates]
    lowest = min((gap for gap in gaps if gap is not None), default=0.0)
    return next(start for start in (0.0, -0.25, -0.5, -1.0) if start <= lowest)


def _columns(rows: Sequence[ComparisonRow]) -> list[tuple[str, list[str]]]:
    """Format the non-empty columns of any table: heading (`#` marks numbers), and the text of each row."""
    columns = []
    repeated = {name for name, words in REPEATED.items() if words in rows[0]}
    for name in [name for name in rows[0] if name not in repeated]:
        values = [row[name] for row in rows if row[name] is not None]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        form = ("{:,.0f}" if all(float(value).is_integer() for value in values) else "{:.3f}") if numeric else "{}"
        if values:
            texts = ["" if row[name] is None else form.format(row[name]) for row in rows]
            if name in ("first", "second"):
                texts = [label(text) for text in texts]
            elif name == "reading":
                texts = [VERDICTS.get(text, text) for text in texts]
            elif name == "selected":
                texts = [", ".join(text.split()) for text in texts]
            else:
                texts = [ANSWERS.get(text, text) for text in texts]
            columns.append(("#" * numeric + HEADINGS.get(name, name).replace("_", " "), texts))
    return columns


def _content(root: Path, archive: Archive) -> dict[str, object]:
    """Collect the content of the page by the names that its template uses."""
    read = partial(evaluation_metrics, root / "results/evaluation")
    metrics = files.present(root, "results/evaluation/metrics.json", "evaluation", read)
    confidence = 0.95 if isinstance(metrics, Missing) else metrics.confidence
    names = ("main", "differences", "kinds", "ledger", "spent")
    tables = {name: files.table_of(root, f"results/evaluation/{name}.csv") for name in names}
    if not isinstance(tables["differences"], Missing):
        level = 1 - confidence
        tables["differences"] = [{**row, "reading": verdict(row, level)} for row in tables["differences"]]
    rediscovery = files.table_of(root, "results/solutions/rediscovery.csv")
    selection = files.document(root, "results/capabilities/selection.json", "capabilities", SelectionAccount)
    # Our number is shown beside a published one if the same thing was run.
    rows = list[ComparisonRow]()
    if not isinstance(tables["main"], Missing) and not isinstance(tables["kinds"], Missing):
        frame = files.present(root, "results/spec.yaml", "compose", partial(published.table, root))
        rows = [] if isinstance(frame, Missing) else frame.dropna(subset="ours").to_dict("records")
    # Tables over several runs have any columns: a sweep has one for each of its settings.
    summaries = [root / "results/replicates/summary.csv", *sorted(root.glob("results/replicates/*/summary.csv"))]
    paths = [path.with_stem(name) for path in summaries for name in ("summary", "differences", "points")]
    paths += sorted(root.glob("results/sweeps/*.csv"))
    gatherings = [path.relative_to(root).as_posix() for path in paths if path.exists()]
    main = tables["main"]
    if not isinstance(main, Missing):
        # The best row first; rows without a rate come last.
        main.sort(key=lambda row: -1.0 if row["pass_rate"] is None else row["pass_rate"], reverse=True)
    return {
        "identity": _identity(root),
        "sentences": _sentences(main, tables["differences"], selection),
        "best": "" if isinstance(main, Missing) else next(iter(_compared(main)), {"method": ""})["method"],
        "confidence": confidence,
        **tables,
        "causality": files.table_of(root, "results/causality/capabilities.csv"),
        "rediscovery": rediscovery if isinstance(rediscovery, Missing) else of_selected(rediscovery),
        "selection": selection,
        "candidates": [] if isinstance(selection, Missing) else _capabilities(root, archive, selection["candidates"]),
        "missing": [part for part in (archive.discovery, archive.labels, archive.evaluation) if part],
        "rollouts": archive.has_rollouts,
        "stages": _stages(root),
        "tables": {name: files.table_of(root, name) for name in gatherings},
        "figures": [path.name for path in sorted(root.glob("results/studies/*.png"))],
        "known": published.read_published(),
        "ours": {(row["what"], row["method"], row["at"]): row for row in rows},
    }


def _identity(root: Path) -> list[tuple[str, str]]:
    """List what was run: benchmark, model, experiment, seed, and the commit that last changed the results.

    The commit and its date come from git, so equal results give equal bytes. Parts that are unknown are left out.
    """
    facts = list[tuple[str, str]]()
    if (root / "results/spec.yaml").exists():
        spec = read_yaml(root / "results/spec.yaml", JsonObject, f"run `{repro('compose', root)}` to derive it again")
        benchmark, base = spec.get("benchmark", {}), spec.get("base", {})
        facts.append(("benchmark", str(benchmark.get("_target_", "")).rpartition(".")[2]))
        facts.append(("model", base.get("model") or "the embedded tiny base"))
        facts.append(("seed", str(spec.get("seed", ""))))
    if (root / "params.yaml").exists():
        params = read_yaml(root / "params.yaml", JsonObject, "restore it: `git checkout -- params.yaml`")
        facts.insert(min(2, len(facts)), ("experiment", str(params.get("experiment", ""))))
    command = ["git", "-C", str(root), "log", "-1", "--format=%h %cs", "--", "results/evaluation"]
    if shutil.which("git"):
        logged = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        commit, _, date = logged.stdout.strip().partition(" ")
        facts += [("results of commit", commit), ("date", date)] if date else []
    return [(name, value) for name, value in facts if value]


def _compared(main: list[ComparisonRow]) -> list[ComparisonRow]:
    """Return the methods that are compared, without routers, merged adapters, controls and bounds."""
    return [row for row in main if row["method"] in headline_methods() and row["pass_rate"] is not None]


def _sentences(
    main: list[ComparisonRow] | Missing,
    differences: list[ComparisonRow] | Missing,
    selection: SelectionAccount | Missing,
) -> list[tuple[str, str]]:
    """Say what the agent lacks, which row is best, and what limits both; each with a heading."""
    said = list[tuple[str, str]]()
    if not isinstance(selection, Missing):
        lacks = [_lack(one) for one in selection["candidates"] if one["selected"]]
        text = ", ".join(lacks).replace("%)", "% of failures)", 1)
        said.append(("When it fails, the agent", f"{text or 'shows no reliable pattern'}."))
    rows = [] if isinstance(main, Missing) else _compared(main)
    if not rows:
        return said
    best, pairs = rows[0], [] if isinstance(differences, Missing) else differences
    compared = [
        f"{(1 if row['first'] == best['method'] else -1) * row['difference']:+.3f} to {label(other)} ({row['reading']})"
        for row in pairs
        for other in ("base", "trace")
        if {row["first"], row["second"]} == {best["method"], other} and row["difference"] is not None
    ]
    words = "; ".join([f"{best['label']} passes {best['pass_rate']:.3f} of the test tasks", *compared])
    said.append(("Best row", f"{words}."))
    caveat = f"one seed, {best['tasks']} test tasks."
    if "demonstrations" in (supervision(best["method"]) or ""):
        caveat += (
            " The best row learns from demonstrations: it sees solutions, and rows that learn from rewards do not."
        )
    said.append(("Caveat", caveat))
    return said


def _lack(candidate: CandidateAccount) -> str:
    """Say what an agent without a capability does, with its title and its share of the failed rollouts."""
    name, share = candidate["name"], f"in {candidate['coverage'] or 0:.0%}"
    cause = CAUSES.get(candidate["id"])
    return f"{cause.mistake} ({candidate['id']}, {share})" if cause else f"lacks {name} ({share})"


def _with_id(id: str, name: str) -> str:
    """Return id and title of a cause; only the title of a capability that a language model named."""
    return f"{id} ({name})" if id in CAUSES else name


class CandidatePage(CandidateAccount):
    """A candidate with everything that its own view shows."""

    details: JsonObject
    passport: Passport | Missing | None
    source: str
    history: list[ComparisonRow] | Missing
    adapter: IndexEntry | Missing | None
    evidence: list[tuple[Rollout, MajorityLack]] | Missing
    effects: list[ComparisonRow] | Missing


def _capabilities(root: Path, archive: Archive, candidates: list[CandidateAccount]) -> list[CandidatePage]:
    """Add to each candidate everything that its own view shows."""
    history = files.table_of(root, "results/adapters/history.csv")
    adapters = files.document(root, "results/adapters/index.json", "adapters", dict[str, IndexEntry])
    effects = files.table_of(root, "results/causality/effects.csv")
    proposals = dict[str, Capability]()
    for path, stage in (("labels/candidates", "labels"), ("capabilities/capabilities", "capabilities")):
        place = f"results/{path}.jsonl"
        capabilities = files.present(root, place, stage, partial(load, root / place, Capability))
        proposals |= {} if isinstance(capabilities, Missing) else {proposal.id: proposal for proposal in capabilities}
    rows = list[CandidatePage]()
    for candidate in candidates:
        name = candidate["id"]
        proposal = proposals.get(name)
        path, place = f"results/environments/{name}.py", f"results/environments/{name}.passport.json"
        source = files.present(root, path, "environments", partial(read_text, root / path))
        passport: Passport | Missing | None = files.present(
            root, place, "environments", partial(read_json, root / place, Passport)
        )
        if isinstance(passport, Missing) and (root / "results/environments").exists():
            passport = None
        # Show first the rollouts from which the capability was proposed.
        examples = archive.examples(name, proposal.examples if proposal else (), EXAMPLES)
        rows.append(
            CandidatePage(
                **candidate,
                details=proposal.details if proposal else {},
                passport=passport,
                source="" if isinstance(source, Missing) else source,
                history=_own(history, adapter=[name]),
                adapter=adapters if isinstance(adapters, Missing) else adapters.get(name),
                evidence=archive.discovery or archive.labels or examples,
                effects=_own(effects, arm=[name], capability=[name, None]),
            )
        )
    return rows


def _own(rows: list[ComparisonRow] | Missing, **values: list[str | None] | list[str]) -> list[ComparisonRow] | Missing:
    """Select the rows that have one of the given values in each given column."""
    if isinstance(rows, Missing):
        return rows
    return [row for row in rows if all(row[column] in allowed for column, allowed in values.items())]


def _stages(root: Path) -> list[dict[str, object]] | Missing:
    """List the stages of dvc.yaml: description, command, and inputs and outputs with their hashes in dvc.lock."""
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
            "outs": [{**empty, **entry} for entry in record.get("outs", [])],
            "deps": [{**empty, **entry} for entry in record.get("deps", [])],
        }
        for name, stage in stages.items()
        for record in [recorded.get(name, {})]
    ]
