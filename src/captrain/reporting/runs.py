"""`captrain compare`: two runs side by side, with their settings, capabilities and pass rates.

A run is a folder with results (a project, or a point of a sweep by name) or a commit of this project. Only results/ is
needed, which is in git, so old runs can be compared. Pass rates are those of the tables.

The table says for each method how its interval was computed:

- Paired by task, as in the tables, if both runs played the same tasks and trials and their rollouts are here. The
  routes say which arm acts for a method on a task. A method is paired only if this reproduces the pass rate of the
  run's table; bounds and composed adapters are not paired.
- Otherwise from the intervals of both runs, as of independent runs (MOVER: Zou and Donner 2008, Statistics in Medicine
  27). This is wider.
"""

import json
import math
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from captrain.capabilities import titled
from captrain.comparison import CONFIDENCE, OUTCOMES, PLAYED, TRACE, WORKSPACES, all_routes, played
from captrain.errors import UserError
from captrain.records import JsonObject, digest, parse_table, parse_yaml, read_bytes
from captrain.statistics import Bootstrap

SPEC, MAIN, CAPABILITIES = "results/spec.yaml", "results/evaluation/main.csv", "results/capabilities/selection.json"
VERSIONS = "captrain.yaml"
FILES = (SPEC, MAIN, CAPABILITIES, VERSIONS)
REMEDY = "make it again, or restore it"
SETTINGS = 40
"""Number of settings that are listed; further ones are counted."""
WORLD = ("benchmark.", "evaluation.", "seed")
"""Prefixes of settings that decide which tasks are played and how often."""
OTHER_TASKS = "the runs do not play the same tasks (benchmark, evaluation or seed differ): this alone can change a rate"
RESAMPLES = 10_000
SAME = 1e-6
"""Two pass rates closer than this are equal, because tables are rounded."""


class Rate(NamedTuple):
    """Pass rate of a method, with its interval."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ComparedRun:
    """Results of a run.

    settings: dotted key -> value of the configuration, without the section `machine`; also captrain's version if known.
    capabilities: selected capability -> its gap. rates: method -> rate, in the order of the table. folder: folder of
    the run; None for a commit.
    """

    name: str
    settings: Mapping[str, object]
    capabilities: Mapping[str, str]
    rates: Mapping[str, Rate]
    folder: Path | None = None


def find_run(name: str, root: Path) -> ComparedRun:
    """Read the results of a run.

    Args:
        name: a folder, a point of a sweep, or a commit.
        root: folder of the project that has the points and commits.

    Raises:
        UserError: the run does not exist, has no results, or a file of it is invalid.
    """
    texts, home = _read_files(name, root)
    if SPEC not in texts:
        raise UserError(
            f"there is no run {name!r}: no folder with {SPEC}, no point of a sweep, no commit that has it",
            "name a project's folder, a name below .cache/points/, or a commit such as HEAD~1",
        )

    def parsed(path: str) -> JsonObject:
        return parse_yaml(texts.get(path, "{}"), JsonObject, f"{path} of {name}", REMEDY)

    version = parsed(VERSIONS).get("captrain")
    settings: dict[str, object] = {} if version is None else {"captrain": version}
    settings |= {key: value for key, value in flat(parsed(SPEC)).items() if not key.startswith(("machine.", "code."))}
    try:
        candidates = parsed(CAPABILITIES)["candidates"] if CAPABILITIES in texts else []
        capabilities = {row["id"]: f"gap {row['gap']:.3f}" for row in candidates if row["selected"]}
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{CAPABILITIES} of {name} is not a selection", "make it again with `captrain run capabilities`"
        ) from None
    rates = dict[str, Rate]()
    if MAIN in texts:
        kinds, numbers = {"method": str, "label": str}, ("pass_rate", "low", "high")
        table = parse_table(
            texts[MAIN], f"{MAIN} of {name}", REMEDY, columns=[*kinds], numbers=numbers, words=True, kinds=kinds
        )
        rows = table[[*kinds, *numbers]].itertuples(index=False, name=None)
        rates = {method: Rate(*row) for method, *row in rows}
    return ComparedRun(name, settings, capabilities, rates, home)


def _read_files(name: str, root: Path) -> tuple[dict[str, str], Path | None]:
    """Read the files of a run from its folder, else from the commit of that name.

    Returns:
        Texts by path, without missing files; and the folder.
    """
    for folder in (Path(name), root / WORKSPACES / name):
        place = folder.parent if folder.name == "results" else folder
        if place.is_dir():
            files = [path for path in FILES if (place / path).exists()]
            return {path: read_bytes(place / path).decode(errors="replace") for path in files}, place
    texts = dict[str, str]()
    if name.startswith("-"):
        return texts, None
    for path in FILES:
        command = ["git", "-C", str(root), "show", f"{name}:./{path}"]
        process = subprocess.run(command, capture_output=True, check=False)
        if not process.returncode:
            texts[path] = process.stdout.decode(errors="replace")
    return texts, None


def flat(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten a nested document to dotted keys."""
    values: dict[str, object] = {}
    for key, value in content.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values


def difference(first: Rate, second: Rate) -> tuple[float, float, float]:
    """Return first minus second, and the interval of this difference for independent runs."""
    gap = first.value - second.value
    low = gap - math.hypot(first.value - first.low, second.high - second.value)
    high = gap + math.hypot(first.high - first.value, second.value - second.low)
    return gap, low, high


def compare_runs(first: ComparedRun, second: ComparedRun) -> list[RenderableType]:
    """Tabulate a comparison: settings that differ, capabilities, pass rates.

    Raises:
        UserError: rollouts or routes of a run are not what captrain wrote.
    """
    before, after = first.settings, second.settings
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    settings: RenderableType = "settings: the same"
    if keys:
        settings = Table("setting", first.name, second.name, title="settings that differ", title_justify="left")
        for key in keys[:SETTINGS]:
            values = (json.dumps(run[key], default=str) if key in run else "-" for run in (before, after))
            settings.add_row(key, *values)
        settings.caption = f"and {len(keys) - SETTINGS} more" if len(keys) > SETTINGS else None
    capabilities: RenderableType = "capabilities: none selected in either"
    if names := {**first.capabilities, **second.capabilities}:
        capabilities = Table("selected capability", first.name, second.name, title_justify="left")
        for name in names:
            capabilities.add_row(titled(name), first.capabilities.get(name, "-"), second.capabilities.get(name, "-"))
    notes = [OTHER_TASKS] if any(key.startswith(WORLD) for key in keys) else []
    return [settings, capabilities, _rates_table(first, second), *notes]


def _rates_table(first: ComparedRun, second: ComparedRun) -> RenderableType:
    before, after = first.rates, second.rates
    if missing := [run.name for run in (first, second) if not run.rates]:
        return f"no pass rates: {' and '.join(missing)} has not played the test split"
    pairs, reason = _pairs(first, second)
    headings = ("row", first.name, second.name, "difference", "interval", "differs")
    table = Table(*headings, title="pass rates on the test split", title_justify="left")
    unpaired = list[str]()
    for method, rate in {**after, **before}.items():
        cells = [f"{rates[method].value:.3f}" if method in rates else "-" for rates in (before, after)]
        if method in before and method in after:
            gap, low, high = pairs.get(method) or difference(after[method], before[method])
            verdict = "" if math.isnan(low) else "no" if low <= 0 <= high else "yes"
            unpaired += [] if method in pairs else [rate.label]
            cells += [f"{gap:+.3f}", f"{low:+.3f} to {high:+.3f}", verdict]
        table.add_row(rate.label, *cells, *[""] * (5 - len(cells)))
    table.caption = (
        f"Difference: `{second.name}` minus `{first.name}`. Differs: the interval excludes 0, not corrected for the "
        f"number of rows.\n{_pairing(len(pairs), unpaired, reason)}"
    )
    table.caption_justify = "left"
    return table


def _pairing(pairs: int, unpaired: Sequence[str], reason: str) -> str:
    """Say which rows are paired by task."""
    if not pairs:
        return f"Compared as two independent runs{reason}."
    if not unpaired:
        return "Paired by task."
    return f"Paired by task, except {', '.join(unpaired)}."


def _pairs(first: ComparedRun, second: ComparedRun) -> tuple[dict[str, tuple[float, float, float]], str]:
    """Compute the differences of methods in both runs, paired by task, with their bootstrap intervals.

    Returns:
        Difference, low and high by method; and why there are none, "" otherwise.
    """
    for run in (first, second):
        if run.folder is None or not (run.folder / PLAYED / TRACE).exists():
            return {}, f" (the rollouts of {run.name} are not here)"
    (tasks, before), (other_tasks, after) = _task_rates(first), _task_rates(second)
    if not tasks or tasks != other_tasks:
        return {}, " (the tasks or trials differ)"
    confidence = first.settings.get("evaluation.confidence", CONFIDENCE)
    level = confidence if isinstance(confidence, float) else CONFIDENCE
    pairs = {}
    for method in (method for method in before if method in after):
        gaps = after[method] - before[method]
        low, high = Bootstrap(len(gaps), RESAMPLES, level, 0).interval(gaps)
        pairs[method] = float(np.nanmean(gaps)), low, high
    return pairs, ""


def _task_rates(run: ComparedRun) -> tuple[dict[tuple[str, int], str], dict[str, np.ndarray]]:
    """Read the evaluation of a run that has a folder.

    Returns:
        Digests of the tasks by id and trial; and by method the pass rate on each task, (tasks,) ordered by id, for
        methods whose arms are known.
    """
    folder = run.folder or Path()
    digests = dict[tuple[str, int], str]()
    outcomes: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome, rollout, *_ in played(folder):
        digests[rollout.task.id, rollout.trial] = digest(rollout.task.model_dump())
        outcomes[outcome.arm, outcome.task].append(OUTCOMES[outcome.outcome])
    if not (folder / "results/routes/routes.csv").exists():
        return digests, {}
    rates = dict[tuple[str, str], float]()
    for choice, values in outcomes.items():
        defined = np.array(values)[~np.isnan(values)]
        rates[choice] = float(defined.mean()) if len(defined) else np.nan
    routes = all_routes(folder / "results").set_index("task")
    tasks, by_method = sorted({task for task, _ in digests}), dict[str, np.ndarray]()
    for method, rate in run.rates.items():
        column = "chosen" if method == TRACE else method.removeprefix("router:")
        routed = routes[column] if column in routes else dict.fromkeys(tasks, method.rpartition(":")[2])
        choices = [(str(routed.get(task, "")), task) for task in tasks]
        if all(choice in rates for choice in choices):
            values = np.array([rates[choice] for choice in choices])
            if abs(np.nanmean(values) - rate.value) < SAME:
                by_method[method] = values
    return digests, by_method
