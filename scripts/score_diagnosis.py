"""Compares diagnoses with known causes: `python scripts/score_diagnosis.py GOLD FILE=FOLDER...`.

GOLD has a line per failure: `file`, `task_id`, `trial`, `primary`, `secondary`, `suspect_reference`, and `accepted`
where several causes are right. A null primary marks a rollout for which no cause may be printed. FOLDER is the output
of `captrain diagnose FILE --out FOLDER`; if the folder has FILE's name, with or without suffix, `FILE=` may be left
out. Only `causes.jsonl` is read.

Prints a row per file and per domain, the agent's own faults and all failures apart, with Wilson's 95% intervals:
    primary   the primary cause is right; the next column compares families
    among     the right primary cause is among those printed
    printed   printed causes that are right, primary or secondary
    repaired  failures with a repair that replay has proven
Below follow suspect references, rollouts for which nothing may be printed, and classes of planted faults.

GOLD may also be AgentRx's file of root causes, or a folder with Who&When's tasks, with the folder of its diagnosis. The
script then prints how many primary causes are at the root's message, or within two of it, and how many failures have
none. AgentRx's even and odd ids are apart: odd ones are not read by us.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from captrain.records import JsonObject
from captrain.statistics import wilson

Row = JsonObject
NOT_THE_AGENTS = {"suspect_reference", "user_simulator_fault", "infrastructure"}
FAMILIES: Mapping[str, Sequence[str]] = {
    "look-up not made": ("missing_lookup", "incomplete_search", "unverified_claim"),
    "other record": ("wrong_record",),
    "other value": ("wrong_argument", "wrong_computation", "fabricated_fact"),
    "change not made": ("missing_write", "partial_refusal", "premature_stop", "over_escalation", "missing_escalation"),
    "change not asked for or allowed": ("extra_write", "undue_compliance", "wrong_operation", "missing_confirmation"),
    "not said": ("missing_information",),
    "call not accepted": ("invalid_call", "loop"),
    "not the agent's": (*sorted(NOT_THE_AGENTS),),
}
FAMILY = {cause: family for family, causes in FAMILIES.items() for cause in causes}


def rows_of(path: Path) -> list[Row]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def folders_by_file(arguments: Sequence[str], files: set[str]) -> dict[str, Path]:
    """Return the folder of each file's diagnosis."""
    folders: dict[str, Path] = {}
    for argument in arguments:
        name, _, folder = argument.rpartition("=")
        names = [name] if name else [file for file in files if Path(argument).name in (file, Path(file).stem)]
        if len(names) != 1:
            raise SystemExit(f"{argument}: of which file is it? Say FILE={argument}")
        folders[names[0]] = Path(folder)
    return folders


def matched(gold: Sequence[Row], folders: Mapping[str, Path]) -> Iterator[tuple[Row, Row]]:
    """Yield the known causes of a rollout with its diagnosis."""
    diagnosed: dict[str, dict[tuple[str, int], Row]] = {}
    for file, folder in folders.items():
        rows = diagnosed.setdefault(file, {})
        for row in rows_of(folder / "causes.jsonl"):
            parts = row["task"].split("/")  # environment, then the task's name, which may contain slashes
            rows |= {("/".join(parts[start:]), row["trial"]): row for start in range(len(parts))}
    for truth in gold:
        if truth["file"] in diagnosed:
            key = str(truth["task_id"]), truth["trial"]
            if key not in diagnosed[truth["file"]]:
                raise SystemExit(f"{truth['file']}: {key[0]} (trial {key[1]}) is in no row of its diagnosis")
            yield truth, diagnosed[truth["file"]][key]


def causes_of(row: Row) -> list[str]:
    """List the printed causes, the primary one first."""
    return [cause["cause"] for cause in [row.get("primary"), *row.get("secondary", [])] if cause]


def count(truth: Row, row: Row) -> Counter[str]:
    """Return the counts for one failure."""
    causes, accepted = causes_of(row), {truth["primary"], *truth.get("accepted", [])}
    # A doubted reference is named by its suspicion, whatever else is printed.
    doubted = {"suspect_reference"} if row.get("suspicions") and truth["suspect_reference"] else set[str]()
    primary = {row["primary"]["cause"]} if row.get("primary") else set[str]()
    families = {FAMILY.get(cause, cause) for cause in accepted}
    fitting = accepted | set(truth["secondary"]) | ({"suspect_reference"} if truth["suspect_reference"] else set[str]())
    counts = {
        "failures": 1,
        "primary": bool(primary & accepted),
        "family": bool({FAMILY.get(cause, cause) for cause in primary} & families),
        "among": bool((set(causes) | doubted) & accepted),
        "causes": len(causes),
        "printed": sum(cause in fitting for cause in causes),
        "unexplained": not causes and not row.get("suspicions"),
        "repaired": any(step["needed"] and step["proven"] for step in row.get("repairs", [])),
    }
    return Counter({name: int(value) for name, value in counts.items()})


def labelled_steps(gold: Path) -> dict[str, dict[str, int]]:
    """Return the message at fault of each task, by group: of AgentRx's file, or of a folder with Who&When's tasks."""
    if gold.is_dir():
        tasks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(gold.glob("*.json"))]
        return {
            "Who&When": {task["question_ID"]: int(task["mistake_step"]) for task in tasks if "mistake_step" in task}
        }
    groups: dict[str, dict[str, int]] = {"even ids": {}, "odd ids": {}}
    for entry in json.loads(gold.read_text(encoding="utf-8")):
        steps = {failure["failure_id"]: failure["step_number"] for failure in entry["failures"]}
        group = groups["odd ids" if entry["trajectory_id"] % 2 else "even ids"]
        group[str(entry["trajectory_id"])] = steps[entry["root_cause"]["failure_id"]] - 1  # they count from 1
    return groups


def root_steps(groups: Mapping[str, Mapping[str, int]], rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each group: the distance of the primary cause from the message at fault."""
    failed = {row["task"].rpartition("/")[2]: row for row in rows if row["outcome"] == "failed"}
    for name, steps in groups.items():
        primaries = [(step, failed[task].get("primary")) for task, step in steps.items() if task in failed]
        distances = [abs(primary["message"] - step) for step, primary in primaries if primary]
        exact, near = (cell(sum(gap <= most for gap in distances), len(primaries)) for most in (0, 2))
        silent = len(primaries) - len(distances)
        yield f"{name}: root step exact {exact}, within two messages {near}, silent {silent}/{len(primaries)}"


def cell(part: int, whole: int) -> str:
    """Return a share with its interval as text."""
    low, high = wilson(part, whole)
    return f"{part}/{whole} {part / whole:.2f} [{low:.2f}, {high:.2f}]" if whole else "0/0"


def table_of(groups: Mapping[str, Counter[str]], title: str) -> Table:
    """Make a table with a row per group of failures."""
    table = Table(title=title, title_justify="left")
    for name in ("", "primary", "family", "among", "printed", "repaired", "unexplained"):
        table.add_column(name, no_wrap=True)
    for name, counts in groups.items():
        whole = counts["failures"]
        shares = [cell(counts[column], whole) for column in ("primary", "family", "among")]
        further = cell(counts["printed"], counts["causes"]), f"{counts['repaired']}/{whole}"
        table.add_row(name, *shares, *further, str(counts["unexplained"]))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gold", type=Path)
    parser.add_argument("diagnoses", nargs="+", metavar="[FILE=]FOLDER")
    parser.add_argument("--misses", action="store_true", help="list the failures whose primary cause is another")
    options = parser.parse_args(arguments)
    if options.gold.is_dir() or options.gold.suffix == ".json":
        steps = labelled_steps(options.gold)
        print(*root_steps(steps, rows_of(Path(options.diagnoses[0]) / "causes.jsonl")), sep="\n")
        return 0
    gold = rows_of(options.gold)
    folders = folders_by_file(options.diagnoses, {row["file"] for row in gold})
    agents, totals, classes = (defaultdict[str, Counter[str]](Counter) for _ in range(3))
    flags, silent, misses = Counter[str](), list[str](), list[str]()
    for truth, row in matched(gold, folders):
        if truth["primary"] is None:
            silent += [f"{truth['file']} {truth['task_id']}: {', '.join(causes_of(row))}"] if causes_of(row) else []
            flags["untouched"] += 1
            continue
        flags["suspects"] += truth["suspect_reference"]
        flags["found"] += truth["suspect_reference"] and bool(row.get("suspicions"))
        flags["false"] += not truth["suspect_reference"] and bool(row.get("suspicions"))
        counts = count(truth, row)
        # The domain of a rollout is its environment; for a chat, the beginning of its task's name.
        chat = row["task"].split("/")[1].split("-")[0].split(":")[0]
        domain = chat if row["environment"] == "chat" else row["environment"]
        for group in dict.fromkeys((truth["file"], domain, "all")):
            totals[group].update(counts)
            if truth["primary"] not in NOT_THE_AGENTS:
                agents[group].update(counts)
        if "class" in truth:
            classes[truth["class"]].update(counts)
        if not counts["primary"]:
            causes = ", ".join(causes_of(row)) or "nothing"
            misses.append(
                f"{truth['file']} {truth['task_id']} ({truth['trial']}): {truth['primary']}, printed {causes}"
            )
    console = Console(width=220, soft_wrap=True)
    console.print(table_of(agents, "the agent's own faults"))
    console.print(table_of(totals, "all failures"))
    if classes:
        console.print(table_of(classes, "planted faults"))
    console.print(
        f"suspect references: {flags['found']} of {flags['suspects']} flagged, {flags['false']} flagged falsely"
    )
    if flags["untouched"]:
        console.print(f"untouched solutions with a cause: {len(silent)} of {flags['untouched']}")
    if options.misses:
        silent += misses
    for line in silent:
        console.print(f"  {line}", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
