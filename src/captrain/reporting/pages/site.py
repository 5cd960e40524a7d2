"""The report: one page, its script and data for it, in one folder that opens from a disk.

`files` reads results/, `archive` finds rollouts and labels in artifacts/, `data` gathers what the page says, `shards`
cuts the rollouts into files that it loads when it needs them, and this renders and writes. Nothing is computed anew but
marks, gains by kind and what is drawn.

Equal inputs give equal bytes: nothing of time, machine or path is written. The folder is made aside and renamed at the
end, so that what stands there is always a whole report; a folder that is not one is never replaced. Rollouts are data:
the template escapes all text, the script sets text alone, and the page's policy runs no script but the report's own.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from captrain.comparison import headline_methods, label, supervision, unequal_total
from captrain.errors import UserError
from captrain.records import JsonObject, place_aside
from captrain.reporting.pages import data, shards
from captrain.reporting.pages.archive import Archive
from captrain.reporting.pages.files import Missing

FOLDER = Path(__file__).parent
GENERATOR = '<meta name="generator" content="captrain report">'


def build(root: Path, out: Path) -> list[Path]:
    """Build the report of a project.

    Args:
        root: of the project, with results/ and, where they were made, artifacts/.
        out: folder of the report; replaced as a whole if it holds one.

    Returns:
        The files written, the page first.

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
    """Yield every file of the report, name and content; the page first."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
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
        # Nothing in it can end the element of data.
        "island": lambda value: Markup(shards.compact(value)),
        "columns": _columns,
        "shown": shards.message_on_page,
    }
    pages.tests["missing"] = lambda value: isinstance(value, Missing)
    pages.globals |= {
        "generator": Markup(GENERATOR),
        "style": Markup((FOLDER / "static/style.css").read_text()),
        "headline": headline_methods(),
        "label": label,
        "unequal_total": unequal_total,
        "supervision": supervision,
        "least": _least,
    }
    with Archive(root) as archive:
        content = data.content(root, archive)
        yield "index.html", pages.get_template("index.html.j2").render(content)
        yield "report.js", (FOLDER / "static/report.js").read_text()
        for name in content["figures"]:
            yield f"figure-{name}", (root / "results/studies" / name).read_bytes()
        selected = [row["id"] for row in content["candidates"] if row["selected"]]
        yield from shards.shard_files(archive, selected, {} if archive.outcomes else data.arm_names(root, archive))


def _least(candidates: Sequence[JsonObject]) -> float:
    """Return the start of an axis of gaps: 0, or so far below that all gaps and intervals are on it."""
    gaps = [run["gap"] for candidate in candidates for run in candidate["per_run"]]
    lowest = min(
        (gap for gap in [*gaps, *(candidate["gap_low"] for candidate in candidates)] if gap is not None), default=0.0
    )
    return next(start for start in (0.0, -0.25, -0.5, -1.0) if start <= lowest)


def _columns(rows: Sequence[JsonObject]) -> list[tuple[str, list[str]]]:
    """List columns that are not known beforehand and not empty: heading, after `#` where it is of numbers, and a text
    for each row."""
    columns = []
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        form = ("{:,.0f}" if all(float(value).is_integer() for value in values) else "{:.3f}") if numeric else "{}"
        if values:
            texts = ["" if row[name] is None else form.format(row[name]) for row in rows]
            columns.append(("#" * numeric + name.replace("_", " "), texts))
    return columns
