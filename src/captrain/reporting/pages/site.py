"""Site of the report: pages from templates, data for them, in one folder that opens from a disk.

`files` reads results/, `archive` finds rollouts and labels in artifacts/, `data` gathers what the pages say, `shards`
cuts the rollouts into files that a page loads when it needs them, and this renders and writes. Nothing is computed anew
but marks, gains by kind and what is drawn.

Equal inputs give equal bytes: nothing of time, machine or path is written. The folder is made aside and renamed at the
end, so that what stands there is always a whole report; a folder that is not one is never replaced. Rollouts are data:
templates escape all text, scripts set text alone, and the pages' policy runs no script but the report's own files.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from captrain.errors import UserError
from captrain.evaluation import headline_methods, label, supervision, unequal_total
from captrain.records import JsonObject, place_aside
from captrain.reporting.pages import data, shards
from captrain.reporting.pages.archive import Archive
from captrain.reporting.pages.files import Missing

FOLDER = Path(__file__).parent
GENERATOR = '<meta name="generator" content="captrain report">'
SCRIPTS = ("rollouts.js", "selection.js", "thresholds.js")
PAGES = {
    "index": "Overview",
    "rollouts": "Rollouts",
    "thresholds": "Thresholds",
    "several": "Several runs",
    "published": "Published",
    "ledger": "Ledger",
    "provenance": "Provenance",
}
"""Pages by name, with what the navigation calls them."""
STRATA = {
    "lacking": "failed, lacks it",
    "sole": "failed, lacks it and no other selected capability",
    "other": "failed, does not lack it",
    "passed": "passed",
}
"""Strata of the causal test, with what the pages call them."""
PREFIX = "figure-"
"""Prefix of copied figures' names."""


def build(root: Path, out: Path) -> list[Path]:
    """Build the report of a project.

    Args:
        root: of the project, with results/ and, where they were made, artifacts/.
        out: folder of the report; replaced as a whole if it holds one.

    Returns:
        The files written, pages first.

    Raises:
        UserError: `out` holds something else than a report; a file among the results is corrupt.
    """
    _refuse_foreign(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    with place_aside(out, f".{os.getpid()}") as aside:
        (aside / "data").mkdir(parents=True)
        for name, content in _files(root):
            with (aside / name).open("wb") as file:
                pieces = [content] if isinstance(content, str | bytes) else content
                file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
            paths.append(out / name)
        if out.exists():
            shutil.rmtree(out)
        aside.rename(out)
    return paths


def _refuse_foreign(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    page = out / "index.html"
    if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{out} exists and is not a report", "name a new folder with --out")


def _files(root: Path) -> Iterator[tuple[str, shards.Content]]:
    with Archive(root) as archive:
        yield from _files_of(root, archive)


def _files_of(root: Path, archive: Archive) -> Iterator[tuple[str, shards.Content]]:
    """Yield every file of the report, name and content; pages first."""
    candidates = data.capabilities(root, archive)
    runs = data.tables_of_runs(root)
    shared = {
        "generator": Markup(GENERATOR),
        "style": Markup((FOLDER / "static/style.css").read_text()),
        "pages": PAGES,
        "headline": headline_methods(),
        "missing": [part for part in (archive.discovery, archive.labels, archive.evaluation) if part],
        "rollouts": archive.has_rollouts,
    }
    views: Mapping[str, JsonObject] = {
        "index": data.overview(root),
        "rollouts": {},
        "thresholds": {"selection": data.selection(root)},
        "several": runs,
        "published": data.literature(root),
        "ledger": data.ledger(root),
        "provenance": {"stages": data.provenance(root)},
    }
    pages = _environment()
    for name in PAGES:
        yield f"{name}.html", pages.get_template(f"{name}.html.j2").render(page=name, **shared, **views[name])
    for candidate in candidates if isinstance(candidates, list) else ():
        text = pages.get_template("capability.html.j2").render(page=candidate["id"], one=candidate, **shared)
        yield f"{page_of(candidate['id'])}.html", text
    for name in SCRIPTS:
        yield name, (FOLDER / "static" / name).read_text()
    for name in runs["figures"]:
        yield f"{PREFIX}{name}", (root / "results/studies" / name).read_bytes()
    selected = [row["id"] for row in candidates if row["selected"]] if isinstance(candidates, list) else []
    yield from shards.shard_files(archive, selected, {} if archive.outcomes else data.arm_names(root, archive))


def page_of(capability: str) -> str:
    """Name of a capability's page, without its ending."""
    return f"capability-{capability}"


def _environment() -> jinja2.Environment:
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters |= {
        "num": _number,
        "signed": _signed,
        "count": _count,
        "p": _p,
        "island": _island,
        "size": _size,
        "columns": _columns,
    }
    pages.tests["missing"] = lambda value: isinstance(value, Missing)
    pages.globals |= {
        "page_of": page_of,
        "shown": shards.message_on_page,
        "label": label,
        "unequal_total": unequal_total,
        "supervision": supervision,
        "least": _least,
        "prefix": PREFIX,
        "strata": STRATA,
    }
    return pages


def _least(candidates: Sequence[JsonObject]) -> float:
    """Return the start of an axis of gaps: 0, or so far below that all gaps and intervals are on it."""
    gaps = [run["gap"] for candidate in candidates for run in candidate["per_run"]]
    lowest = min(
        (gap for gap in [*gaps, *(candidate["gap_low"] for candidate in candidates)] if gap is not None), default=0.0
    )
    return next(start for start in (0.0, -0.25, -0.5, -1.0) if start <= lowest)


def _number(value: float | None, digits: int = 3) -> str:
    return "undefined" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.3f}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{int(value):,}"


def _p(value: float | None) -> str:
    if value is None:
        return "not tested"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _columns(rows: Sequence[JsonObject]) -> list[tuple[str, bool, list[str]]]:
    """List columns that are not known beforehand and not empty: heading, whether of numbers, a text for each row."""
    columns = []
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        form = "{:,.0f}" if numeric and all(float(value).is_integer() for value in values) else "{:.3f}"
        texts = ["" if row[name] is None else form.format(row[name]) if numeric else str(row[name]) for row in rows]
        if values:
            columns.append((name.replace("_", " "), numeric, texts))
    return columns


def _size(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"


def _island(value: object) -> Markup:
    """Encode JSON for a script element of data: nothing in it can end the element."""
    return Markup(shards.escaped(json.dumps(value, separators=(",", ":"), allow_nan=False)))
