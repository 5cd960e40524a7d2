"""Two runs side by side: what was set otherwise, what was found, and how far the pass rates lie apart.

A run is a folder with results (a project, or a point of a sweep by its name), or a commit of this project. Only what
lies in results/ is needed, which is in git, so that runs of long ago can be compared. Rates are those of the tables.
Where both runs have played the same tasks and trials, and their rollouts lie beside the results, the interval of a
difference is that of the tables, paired by task (`pairing`); else it joins the two intervals as those of independent
runs (MOVER: Zou and Donner 2008, Statistics in Medicine 27), which is wider. The table says which.
"""

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from captrain.comparison import CONFIDENCE, WORKSPACES
from captrain.errors import UserError
from captrain.records import JsonObject, parse_table, parse_yaml, read_bytes
from captrain.reporting.pairing import paired_interval, read_played, task_rates
from captrain.reporting.verification import flat

SPEC, MAIN, CAPABILITIES = "results/spec.yaml", "results/evaluation/main.csv", "results/capabilities/selection.json"
VERSIONS = "captrain.yaml"
SETTINGS = 40
"""Settings that are listed; further ones are counted."""
WORLD = ("benchmark.", "evaluation.", "seed")
"""Settings that decide which tasks are played, and how often."""
OTHER_TASKS = (
    "the runs do not play the same tasks (benchmark, evaluation or seed differ), of which a difference tells, too"
)


@dataclass(frozen=True)
class Run:
    """Results as they lie in a folder or in a commit: texts of files by their paths in a project."""

    name: str
    texts: Mapping[str, str]
    folder: Path | None = None
    """Folder in which its rollouts lie, too; None for a commit."""

    def settings(self) -> dict[str, object]:
        """Read the configuration but for the machine, by dotted keys; with the version of captrain, where it is known.

        Raises:
            UserError: the file is not what captrain wrote.
        """
        settings = flat(self._parsed(SPEC))
        version = self._parsed(VERSIONS).get("captrain")
        spec = {key: value for key, value in settings.items() if not key.startswith("machine.")}
        return spec if version is None else {"captrain": version, **spec}

    def rates(self) -> dict[str, "Rate"]:
        """Pass rate and interval of each method, in the order of the table.

        Raises:
            UserError: the table is not what captrain wrote.
        """
        if MAIN not in self.texts:
            return {}
        place, remedy, numbers = f"{MAIN} of {self.name}", "make it again, or restore it", ("pass_rate", "low", "high")
        kinds = {"method": str, "label": str}
        table = parse_table(self.texts[MAIN], place, remedy, columns=[*kinds], numbers=numbers, words=True, kinds=kinds)
        return {row["method"]: Rate(row["label"], *(row[name] for name in numbers)) for row in table.to_dict("records")}

    def capabilities(self) -> dict[str, str]:
        """Read the selected capabilities, each with its gap.

        Raises:
            UserError: the file is not what captrain wrote.
        """
        if CAPABILITIES not in self.texts:
            return {}
        try:
            candidates = self._parsed(CAPABILITIES)["candidates"]
            return {row["id"]: f"gap {row['gap']:.3f}" for row in candidates if row["selected"]}
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{CAPABILITIES} of {self.name} is not a selection", "make it again") from None

    def _parsed(self, path: str) -> JsonObject:
        place, remedy = f"{path} of {self.name}", "make it again, or restore it"
        return parse_yaml(self.texts.get(path, "{}"), JsonObject, place, remedy)


@dataclass(frozen=True)
class Rate:
    """Pass rate of a method, with its interval."""

    label: str
    value: float
    low: float
    high: float


def find_run(name: str, root: Path) -> Run:
    """Find the run of that name.

    Args:
        name: a folder, a point of a sweep, or a commit.
        root: of the project that points and commits are of.

    Raises:
        UserError: there is none, or it has no results.
    """
    paths, home = (SPEC, MAIN, CAPABILITIES, VERSIONS), None
    for folder in (Path(name), root / WORKSPACES / name):
        place = folder.parent if folder.name == "results" else folder
        if place.is_dir():
            texts, home = {path: _text(place / path) for path in paths if (place / path).exists()}, place
            break
    else:
        texts = {path: text for path in paths if (text := _committed(root, name, path)) is not None}
    if SPEC not in texts:
        raise UserError(
            f"there is no run {name!r}: no folder with {SPEC}, no point of a sweep, no commit that has it",
            "name a project's folder, a name below .cache/points/, or a commit such as HEAD~1",
        )
    return Run(name, texts, home)


def _text(path: Path) -> str:
    return read_bytes(path).decode(errors="replace")


def _committed(root: Path, revision: str, path: str) -> str | None:
    """Read a file of a commit, None where there is none."""
    if revision.startswith("-"):
        return None
    command = ["git", "-C", str(root), "show", f"{revision}:./{path}"]
    process = subprocess.run(command, capture_output=True, check=False)
    return None if process.returncode else process.stdout.decode(errors="replace")


def difference(first: Rate, second: Rate) -> tuple[float, float, float]:
    """Subtract the second rate from the first, with the interval of the difference."""
    gap = first.value - second.value
    low = gap - math.hypot(first.value - first.low, second.high - second.value)
    high = gap + math.hypot(first.high - first.value, second.value - second.low)
    return gap, low, high


def compare_runs(first: Run, second: Run) -> list[RenderableType]:
    """Tabulate a comparison: settings that differ, capabilities, pass rates.

    Raises:
        UserError: a file of a run is not what captrain wrote.
    """
    settings = _settings_table(first, second)
    notes = [] if _same_world(first, second) else [OTHER_TASKS]
    return [settings, _capabilities_table(first, second), _rates_table(first, second), *notes]


def _same_world(first: Run, second: Run) -> bool:
    worlds = [{key: value for key, value in run.settings().items() if key.startswith(WORLD)} for run in (first, second)]
    return worlds[0] == worlds[1]


def _settings_table(first: Run, second: Run) -> RenderableType:
    before, after = first.settings(), second.settings()
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if not keys:
        return "settings: the same"
    table = Table("setting", first.name, second.name, title="settings that differ", title_justify="left")
    for key in keys[:SETTINGS]:
        table.add_row(
            key, *(json.dumps(values[key], default=str) if key in values else "-" for values in (before, after))
        )
    table.caption = f"and {len(keys) - SETTINGS} more" if len(keys) > SETTINGS else None
    return table


def _capabilities_table(first: Run, second: Run) -> RenderableType:
    before, after = first.capabilities(), second.capabilities()
    if not before and not after:
        return "capabilities: none selected in either"
    table = Table("selected capability", first.name, second.name, title_justify="left")
    for name in {**before, **after}:
        table.add_row(name, before.get(name, "-"), after.get(name, "-"))
    return table


def _rates_table(first: Run, second: Run) -> RenderableType:
    before, after = first.rates(), second.rates()
    if missing := [run.name for run, rates in ((first, before), (second, after)) if not rates]:
        return f"no pass rates: {' and '.join(missing)} has not played the test split"
    pairs, reason = _pairs(first, second)
    headings: Sequence[str] = ("method", first.name, second.name, "difference", "interval", "distinct", "paired")
    table = Table(*headings, title="pass rates on the test split", title_justify="left")
    for method, rate in {**after, **before}.items():
        cells = [f"{rates[method].value:.3f}" if method in rates else "-" for rates in (before, after)]
        if method in before and method in after:
            pair = pairs.get(method)
            gap, low, high = pair or difference(after[method], before[method])
            verdict = "" if math.isnan(low) else "no" if low <= 0 <= high else "yes"
            cells += [f"{gap:+.3f}", f"{low:+.3f} to {high:+.3f}", verdict, "yes" if pair else "no"]
        table.add_row(rate.label, *cells, *[""] * (6 - len(cells)))
    table.caption = (
        f"difference: {second.name} less {first.name}; intervals not corrected for their number; distinct: without 0; "
        f"paired: by task, over the same tasks and trials, else as of two independent runs{reason}"
    )
    table.caption_justify = "left"
    return table


def _pairs(first: Run, second: Run) -> tuple[dict[str, tuple[float, float, float]], str]:
    """Pair the methods that both have by task: differences with their intervals; and say why there are none."""
    records = []
    for run in (first, second):
        record = None if run.folder is None else read_played(run.folder)
        if run.folder is None or record is None:
            return {}, f" (the rollouts of {run.name} are not here)"
        rates = {method: rate.value for method, rate in run.rates().items()}
        records.append((record, task_rates(run.folder, record, rates)))
    (before, first_rates), (after, second_rates) = records
    if not before.matches(after):
        return {}, " (the tasks or trials differ)"
    confidence = first.settings().get("evaluation.confidence", CONFIDENCE)
    level = confidence if isinstance(confidence, float) else CONFIDENCE
    common = [method for method in first_rates if method in second_rates]
    return {method: paired_interval(first_rates[method], second_rates[method], level) for method in common}, ""
