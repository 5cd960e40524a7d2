"""A diagnosis as files, and as the command prints it.

The report says first what to fix, then why rollouts failed, then how failed and passed rollouts compare. Without enough
rollouts nothing is called selected. `report.md` and `report.html` have the same content and no script; the page shows
dialogues beside their references. Both list the first `LIST_LENGTH` failures. Equal diagnoses give equal bytes.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import get_args

import jinja2
from markupsafe import Markup
from rich.table import Table

from captrain.benchmarks import ToolKind
from captrain.capabilities import CAUSES, LACKING, LEVEL, PRESENT, Association, titled
from captrain.diagnosis.advice import Advice, advise
from captrain.diagnosis.diagnosis import LIST_LENGTH, Diagnosis, counted_cause
from captrain.diagnosis.findings import call_lines, quote_of
from captrain.diagnosis.observations import DOUBTS, OBSERVATIONS
from captrain.diagnosis.rollouts import DiagnosedRollout, Standing
from captrain.records import (
    Message,
    Record,
    Rollout,
    as_markdown,
    counted,
    plain,
    publish,
    publish_json,
    publish_lines,
    publish_text,
)
from captrain.run import user_outputs
from captrain.statistics import wilson

OUTPUTS = (
    *("report.md", "report.html", "causes.jsonl", "suspects.jsonl", "advice.json", "selection.json"),
    *("candidates.jsonl", "labels.jsonl", "rollouts.jsonl", "tools.json"),
)
"""Files of a diagnosis."""
ROWS = 12
"""Maximum number of rows of a table of features."""
UNEXPLAINED = "unexplained"
REMARKS = ("Observed, but not a cause", "Passes that may be wrong")
FAULTS, NEXT, ELSE = "Your agent mostly fails because it", "What to do", "What else to do"
"""Headings of advice: on faults of the agent, on everything else without and with such faults before it."""
NOT_COMPARED: tuple[Standing, ...] = ("error", "limit", "spoilt")
"""Standings of rollouts that say nothing about the agent. They are listed separately."""
LONGEST = 4000
"""Maximum number of characters of a message on the page."""
MEANINGS = {
    "failures": "failures with this primary cause: the earliest that the log proves",
    "share": "share of all failures",
    "also in": "failures in which it is a secondary cause",
    "passed with it": "passed rollouts that show it",
    "gap": "error rate in failed rollouts minus that in passed ones, where the capability could show",
    "95% interval": "where the value lies with 95% certainty, over tasks",
    "coverage": "share of failed rollouts that lack it",
    "among failed": "failed rollouts that lack it, of those in which it could show",
    "among passed": "passed rollouts that lack it, of those in which it could show",
    "runs": "labelling runs, each on a resample, in which gap and coverage hold",
    "selected": "whether it is worth training",
    "p": "chance of such a difference or a larger one if nothing differed: Fisher's exact test, two-sided",
    "p, Holm": "p corrected for all features of the table",
    "the same rollouts": "other features that were found in exactly these rollouts",
    "passed elsewhere": "passed rollouts of all other tasks",
}
"""The meaning of each column, which the page shows on hover."""


class Suspect(Record):
    """A rollout with a suspect reference, and the reasons."""

    rollout: str
    task: str
    trial: int
    outcome: str
    reasons: list[str]


def verdict_of(diagnosis: Diagnosis) -> str:
    """Say how many rollouts passed, failed and were left out."""
    account, logs = diagnosis.account, diagnosis.logs
    passed = len(logs.rollouts) - account.failures - account.standings["error"]
    parts = {
        "without a verdict (error)": account.standings["error"],
        "stopped at a limit of steps, time or tokens": account.standings["limit"],
        "with a fault of the simulated user": account.standings["spoilt"],
        "with a suspect reference": account.standings["suspect"],
    }
    counts = [f"{passed} passed", f"{account.failures} failed"]
    counts += [f"{number} {words}" for words, number in parts.items() if number]
    counts += [f"{counted(account.unexplained, 'failure')} unexplained"] if account.unexplained else []
    counts += [f"{counted(logs.unread, 'unreadable entry')}"] if logs.unread else []
    return f"{counted(len(logs.rollouts), 'rollout')}: {', '.join(counts)}"


def title_of(name: str) -> str:
    """Return the title of an observation, or of a cause that is not sure."""
    titles = {entry.name: entry.title for entry in (*OBSERVATIONS, *DOUBTS)}
    return titles.get(name) or f"Perhaps {titled(name)}"


def kinds_of_tools(diagnosis: Diagnosis) -> str:
    """Say what each tool is taken to do, and how to correct it."""
    toolbox, names = diagnosis.diagnosed.toolbox, dict[str, list[str]]()
    for tool in sorted(toolbox.schemas):
        names.setdefault(toolbox.kind(tool), []).append(tool)
    kinds = [f"{kind}: {', '.join(names[kind])}" for kind in get_args(ToolKind) if kind in names]
    remedy = "To correct a kind, pass --tools-as FILE with a line such as `get_order: read`."
    return f"What each tool does, as inferred from the logs: {'; '.join(kinds)}. {remedy}" if kinds else ""


def diagnosis_summary(diagnosis: Diagnosis, advice: Sequence[Advice]) -> list[Table | str]:
    """Summarize for the screen: the verdict, what to do, causes and their shares, the ranking, what was observed."""
    account = diagnosis.account
    lines: list[Table | str] = [verdict_of(diagnosis)]
    for reason, count in Counter(entry.reason for entry in diagnosis.logs.skipped).most_common(1):
        lines.append(f"most frequent reason for unreadable entries: {reason} ({count})")
    if diagnosis.shortage:
        lines.append(f"Nothing can be concluded: {diagnosis.shortage}")
    for heading, start, entries in advice_by_heading(advice):
        lines.append(heading)
        for number, entry in enumerate(entries, start):
            lines.append(f"{number}. {entry.subject}{': ' * bool(entry.facts)}{entry.facts}")
            lines += [f"   cause: {entry.cause}"] if entry.cause else []
            lines += [f"   example: {entry.example}"] if entry.example else []
            lines += [f"   -> {action}" for action in entry.actions]
            lines += [f"      {entry.command}"] if entry.command else []
    for table in tables(diagnosis):
        if table.brief:
            columns = Table(*table.brief, title=table.title, title_justify="left")
            for row in table.rows:
                columns.add_row(*(row[table.columns.index(name)] for name in table.brief))
            lines.append(columns)
    for title, seen in zip(REMARKS, (account.seen, account.doubts), strict=True):
        lines += [title] if seen else []
        for name, entry in sorted(seen.items(), key=lambda item: -item[1].failed - item[1].passed):
            lines.append(f"- {title_of(name)}: {entry.failed} failed, {entry.passed} passed; {entry.quotes[0]}")
    lines += [kinds_of_tools(diagnosis), account.unproven_note]
    return [line for line in lines if line != ""]


def advice_by_heading(advice: Sequence[Advice]) -> list[tuple[str, int, Sequence[Advice]]]:
    """Split advice into what the agent does wrong and everything else: heading, number of the first entry, entries."""
    faults = [entry for entry in advice if entry.facts]
    others = [entry for entry in advice if not entry.facts]
    groups = [(FAULTS, 1, faults), (ELSE if faults else NEXT, len(faults) + 1, others)]
    return [group for group in groups if group[2]]


def publish_diagnosis(diagnosis: Diagnosis, out: Path, advice: Sequence[Advice] | None = None) -> list[Path]:
    """Write all files of a diagnosis and return their paths.

    These are report.md, report.html, causes.jsonl, suspects.jsonl, advice.json, selection.json, candidates.jsonl,
    labels.jsonl, rollouts.jsonl and tools.json. Equal logs and an equal folder name, which commands in the advice
    contain, give equal bytes.

    Raises:
        UserError: a file would be replaced that captrain did not write.
    """
    with user_outputs(out, OUTPUTS) as aside:
        advice, labels = advise(diagnosis, out) if advice is None else advice, diagnosis.labels
        rows, account = diagnosis.diagnosed.rollouts, diagnosis.account
        suspects = (
            Suspect(rollout=row.rollout, task=row.task, trial=row.trial, outcome=row.outcome, reasons=row.suspicions)
            for row in (rows if account.standings["suspect"] else ())
            if row.suspicions
        )
        _publish_reports(diagnosis, advice, aside)
        publish_lines(aside / "rollouts.jsonl", diagnosis.logs.rollouts.lines)
        publish_json(aside / "tools.json", diagnosis.logs.known_tools)
        publish_lines(aside / "causes.jsonl", rows.lines)
        publish(aside / "suspects.jsonl", suspects)
        publish(aside / "candidates.jsonl", labels.candidates if labels else [])
        publish_lines(aside / "labels.jsonl", labels.lines if labels else [])
        publish_json(aside / "advice.json", [asdict(entry) for entry in advice])
        if diagnosis.report is not None:
            publish_json(aside / "selection.json", diagnosis.report)
        paths = [path.relative_to(aside) for path in sorted(aside.rglob("*")) if path.is_file()]
    return [out / path for path in paths]


def _publish_reports(diagnosis: Diagnosis, advice: Sequence[Advice], out: Path) -> None:
    """Write report.md and report.html."""
    account, logs = diagnosis.account, diagnosis.logs
    failures, count, left = list[FailureCard](), 0, LIST_LENGTH
    for row, rollout in zip(diagnosis.diagnosed.rollouts, logs.rollouts, strict=True):
        if row.outcome == "failed":
            # The page also shows spoilt rollouts; report.md lists them among those left out.
            count += 1
            is_reported = row.standing not in NOT_COMPARED and left > 0
            left -= is_reported
            if count <= LIST_LENGTH or is_reported:
                failures.append(_failure(row, rollout, f"failure-{count}", is_reported))
        if count >= LIST_LENGTH and not left:
            break
    groups: dict[str, list[FailureCard]] = {kind: [] for kind, _ in account.shares} | {UNEXPLAINED: []}
    for failure in failures[:LIST_LENGTH]:
        groups[counted_cause(failure.row) or UNEXPLAINED].append(failure)
    places = Counter(card.row.place for card in failures[:LIST_LENGTH])
    names = {UNEXPLAINED: "Unexplained"} | {kind: titled(kind) for kind in CAUSES}
    content = {
        "account": account,
        "logs": logs,
        "shortage": diagnosis.shortage,
        "verdict": verdict_of(diagnosis),
        "kinds": kinds_of_tools(diagnosis),
        "advice": advice_by_heading(advice),
        "remarks": [
            (title, [(title_of(name), entry) for name, entry in seen.items()])
            for title, seen in zip(REMARKS, (account.seen, account.doubts), strict=True)
            if seen
        ],
        "tables": tables(diagnosis),
        "selected": diagnosis.report and diagnosis.report["thresholds"],
        "suspects": account.left_out.get("suspect", []),
        "faults": sum(account.standings[standing] for standing in NOT_COMPARED),
        "spoilt": [row for standing in NOT_COMPARED for row in account.left_out.get(standing, [])][:LIST_LENGTH],
        "reasons": Counter((entry.source, entry.reason) for entry in logs.skipped),
        "sources": [
            {name.replace("_", " "): _listed(value) for name, value in source.items() if value not in (None, "", {})}
            for source in logs.sources
        ],
        "failures": failures,
        "groups": [(kind, names[kind], entries) for kind, entries in groups.items() if entries],
        # Agents share tasks and trials. A name that fits several failures gets no link.
        "anchors": {card.row.place: card.anchor for card in failures[:LIST_LENGTH] if places[card.row.place] == 1},
        "meanings": MEANINGS,
        "more": max(0, account.failures - LIST_LENGTH),
        "reported": account.failures - account.standings["limit"] - account.standings["spoilt"],
        "limit": LIST_LENGTH,
        "counted": counted,
        "titled": titled,
        "style": Markup(files("captrain").joinpath("reporting/pages/static/style.css").read_text(encoding="utf-8")),
        "version": version("captrain"),
    }
    page, text = _template("page.html.j2", plain), _template("report.md.j2", words)
    publish_text(out / "report.html", page.render(content))
    publish_text(out / "report.md", re.sub(r"\n{3,}", "\n\n", text.render(content)).strip() + "\n")


def _template(name: str, escape: Callable[[str], str]) -> jinja2.Template:
    """Load a template that escapes every value: by `escape`, then for HTML, unless it is `Markup` already."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("captrain", "diagnosis"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["code"] = code
    return environment.get_template(name)


@dataclass(frozen=True)
class ShownMessage:
    """A message on the page: its text, a line for each call, and the reason why it is part of the failure."""

    role: str
    text: str
    calls: list[str]
    reason: str = ""


@dataclass(frozen=True)
class FailureCard:
    """A failed rollout in the reports. anchor: its id on the page. is_reported: report.md lists it, too."""

    row: DiagnosedRollout
    anchor: str
    is_reported: bool
    quote: str
    messages: list[ShownMessage]
    reference: list[ShownMessage]


def _failure(row: DiagnosedRollout, rollout: Rollout, anchor: str, is_reported: bool) -> FailureCard:
    """Collect the parts of a failed rollout that the reports show: its messages and those of its reference."""
    reasons: dict[int, list[str]] = {}
    for cause in row.causes:
        reasons.setdefault(cause.message, []).append(f"{titled(cause.cause)}: {cause.evidence}")
    messages, caller = list[ShownMessage](), ""
    for index, message in enumerate(rollout.messages):
        role = message["role"]
        if role != "tool":
            caller = role
        elif caller == "user":
            role = "tool of the user"
        messages.append(_shown(message, role, "; ".join(reasons.get(index, []))))
    steps = [{"function": asdict(step)} for step in rollout.task.facts.user_calls]
    reference: list[Message] = [*rollout.reference]
    if steps:
        reference.append({"role": "user", "content": "By the user:", "tool_calls": steps})
    expected = [_shown(message, message["role"]) for message in reference]
    place = row.primary.message if row.primary else len(messages)
    quote = quote_of(rollout.messages[place]) if place < len(messages) else ""
    shown = [message for message in expected if message.text or message.calls]
    return FailureCard(row, anchor, is_reported, quote, messages, shown)


def _shown(message: Message, role: str, reason: str = "") -> ShownMessage:
    text = str(message.get("content") or "")
    return ShownMessage(role, text if len(text) <= LONGEST else text[:LONGEST] + " …", call_lines(message), reason)


def _listed(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_listed(item)}" for key, item in value.items() if item is not None) + ")"
    return str(value)


def words(text: str) -> Markup:
    """Return text as one line of Markdown without markup or control characters."""
    return _inline(" ".join(text.split()))


def code(text: str) -> Markup:
    """Return a text of captrain as Markdown. Backticks mark code; quotes of the logs are escaped."""
    parts = plain(" ".join(text.split())).split("`")
    last = len(parts) - 1 + len(parts) % 2  # a single backtick marks nothing
    marked = [place % 2 == 1 and place < last and part.strip() for place, part in enumerate(parts)]
    pieces = [f"`{part}`" if is_code else _inline(part) for part, is_code in zip(parts, marked, strict=True)]
    return Markup("".join(pieces))


def _inline(text: str) -> Markup:
    # An underscore within a word is not markup; identifiers are full of them.
    return Markup(re.sub(r"(?<=\w)\\_(?=\w)", "_", as_markdown(text)))


@dataclass(frozen=True)
class ReportTable:
    """A table with a title.

    brief: columns that a terminal shows; if empty, it does not show the table. notes: lines below. links: the anchor
    that each row leads to; "" for none.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    brief: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


def tables(diagnosis: Diagnosis) -> list[ReportTable]:
    """Return the tables that have rows, in the order of the report."""
    candidates = [*_causes(diagnosis), _ranking(diagnosis), *_features(diagnosis), _outcomes(diagnosis)]
    return [table for table in candidates if table.rows]


def _causes(diagnosis: Diagnosis) -> Iterator[ReportTable]:
    """Yield the tables of causes: of all failures, and by agent if there are several."""
    account, rows, links = diagnosis.account, list[tuple[str, ...]](), list[str]()
    for kind, tally in account.shares:
        share = f"{tally.primary / account.failures:.2f}" if account.failures else "-"
        example = tally.example.place if tally.example else ""
        message = f", message {tally.example.primary.message}" if tally.example and tally.example.primary else ""
        rows.append(
            (
                kind,
                CAUSES[kind].name,
                str(tally.primary),
                share,
                str(tally.secondary),
                str(tally.passed),
                example + message,
            )
        )
        links.append(f"cause-{kind}" if tally.primary else "")
    if account.unexplained and rows:
        share = f"{account.unexplained / account.failures:.2f}"
        rows.append(("unexplained", "", str(account.unexplained), share, "", "", ""))
    columns = ("cause", "title", "failures", "share", "also in", "passed with it", "for example")
    yield ReportTable("Why rollouts failed", columns, rows, columns[:-2], links=(*links, "cause-unexplained"))
    if len(agents := diagnosis.agents) > 1:
        columns = ("cause", *(f"{agent} ({entry.failures} failed)" for agent, entry in agents.items()))
        tallies = [(kind, [entry.causes.get(kind) for entry in agents.values()]) for kind, _ in account.shares]
        rows = [(kind, *(str(tally.primary if tally else 0) for tally in row)) for kind, row in tallies]
        rows.append(("unexplained", *(str(entry.unexplained) for entry in agents.values())))
        yield ReportTable("Failures of each agent by primary cause", columns, rows, columns)


def _ranking(diagnosis: Diagnosis) -> ReportTable:
    """Return the table of causes in the order of the selection, with the numbers that decide."""
    rows, labels, report, ranking = list[tuple[str, ...]](), diagnosis.labels, diagnosis.report, "product"
    if labels and report:
        ranking = report["thresholds"].get("ranking", ranking)
        names = [candidate.id for candidate in labels.candidates]
        for entry in report["candidates"]:
            among = list[str]()
            for failed in (True, False):
                row = names.index(entry["id"])
                lacking, present = (labels.verdicts.count(row, code, failed) for code in (LACKING, PRESENT))
                among.append(f"{lacking} of {lacking + present}")
            keys = ("gap", "gap_low", "gap_high", "coverage")
            gap, low, high, coverage = ("-" if entry[key] is None else f"{entry[key]:.2f}" for key in keys)
            runs, selected = f"{entry['runs_retained']}/{entry['runs']}", "yes" if entry["selected"] else "no"
            rows.append(
                (
                    entry["id"],
                    CAUSES[entry["id"]].name,
                    gap,
                    "-" if entry["gap_low"] is None else f"{low} to {high}",
                    coverage,
                    *among,
                    runs,
                    selected,
                    entry["reason"],
                )
            )
    brief = ("cause", "gap", "95% interval", "coverage", "runs", "selected")
    columns = ("cause", "title", *brief[1:4], "among failed", "among passed", *brief[4:], "reason")
    order = {"product": "coverage x gap", "mean_gap": "mean gap of the runs"}.get(ranking, ranking)
    return ReportTable(f"Causes by {order}", columns, rows, () if diagnosis.shortage else brief)


def _features(diagnosis: Diagnosis) -> Iterator[ReportTable]:
    """Yield tables of what correlates with failure: reference steps, kinds of task, orders of calls, and differing
    trials.
    """
    findings = diagnosis.findings
    # Steps that failed rollouts miss or change more often, those with the most failures first.
    steps = [entry for entry in findings.steps if entry.excess > 0 and entry.holds]
    steps.sort(key=lambda entry: -entry.failed[0] * entry.excess)
    columns = ("difference", "failed", "passed", "p", "p, Holm")
    yield ReportTable("Differences from the reference", columns, [_counts(entry) for entry in steps[:ROWS]])
    # Values of the task, those whose pass rates differ most from the others first.
    rows = list[tuple[str, ...]]()
    for entry in [entry for entry in findings.tasks if entry.p == entry.p][:ROWS]:
        passed, count, rollouts = entry.passed[0], entry.passed[0] + entry.failed[0], entry.passed[1] + entry.failed[1]
        low, high = wilson(passed, count)
        elsewhere = f"{entry.passed[1] - passed} of {rollouts - count}"
        rate = f"{passed} of {count}", f"{passed / count:.2f}", f"{low:.2f} to {high:.2f}", elsewhere
        rows.append((entry.name, *rate, *_counts(entry)[3:], _alike(entry)))
    columns = ("kind of task", "passed", "pass rate", "95% interval", "passed elsewhere", *columns[3:])
    yield ReportTable("Kinds of task", (*columns, "the same rollouts"), rows)
    # Orders of calls that correlate with failure after the correction.
    tested = [entry for entry in findings.order if entry.p == entry.p]
    sure = [entry for entry in tested if entry.p_holm <= LEVEL][:ROWS]
    rows = [(*_counts(entry), _alike(entry), findings.examples.get(entry.key, "")) for entry in sure]
    columns = ("pattern of calls", "failed", "passed", "p", "p, Holm", "the same rollouts", "for example")
    note = f"Tested: {counted(len(tested), 'pattern')}. The table lists those with p, Holm of at most {LEVEL:g}."
    yield ReportTable("Calls that correlate with failure", columns, rows, notes=(note,))
    rows = [(title_of(entry.key[1]), *_counts(entry)[1:]) for entry in findings.seen if entry.holds][:ROWS]
    columns = ("observation", "failed", "passed", "p", "p, Holm")
    yield ReportTable("Observations by outcome", columns, rows, notes=("An observation is not a cause.",))
    rows = [(*calls, str(count)) for calls, count in findings.partings[:ROWS]]
    columns = ("the passed trial calls", "the failed trial calls", "tasks")
    yield ReportTable(
        "Where failed and passed trials of a task differ",
        columns,
        rows,
        notes=(
            f"Counted: {counted(findings.mixed, 'task')} with passed and failed trials. Each failed trial is compared "
            "with the passed trial that it follows longest.",
        ),
    )


def _counts(entry: Association) -> tuple[str, ...]:
    """Return name, counts and p-values of a feature; a dash if it was not tested."""
    counts = (f"{part} of {whole}" for part, whole in (entry.failed, entry.passed))
    return entry.name, *counts, *("-" if p != p else f"{p:.2g}" for p in (entry.p, entry.p_holm))


def _alike(entry: Association) -> str:
    """Return the names of other features of exactly the same rollouts."""
    return ", ".join(entry.also[:2]) + (f" and {len(entry.also) - 2} more" if len(entry.also) > 2 else "")


def _outcomes(diagnosis: Diagnosis) -> ReportTable:
    """Return the table of pass rates by environment and agent.

    It counts every scored rollout, including those spoilt by the simulated user, which the comparison leaves out.
    """
    tally, rows, notes = diagnosis.diagnosed.outcomes, list[tuple[str, ...]](), list[str]()
    agents = tally.agents()
    is_plural = len(agents) > 1
    for agent in agents if is_plural else [None]:
        for environment, counts, (rate, low, high, reward) in tally.environments(agent):
            rates = (f"{rate:.3f}", f"{low:.3f} to {high:.3f}", f"{reward:.3f}")
            rows.append((environment, *([agent] if agent else []), *map(str, counts), *rates))
    if not is_plural and (repeated := tally.all_trials_passed()):
        notes.append(f"pass^{repeated[0]} (all trials of a task pass): {repeated[1]:.3f}.")
    for first, second in combinations(agents, 2):
        if difference := tally.difference(first, second):
            tasks, mean, low, high = difference
            interval = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
            notes.append(f"{first} minus {second}: {interval}, on {counted(tasks, 'task')} that both played.")
    columns = ("environment", *(["agent"] if is_plural else []), "rollouts", "tasks", "passed", "pass rate")
    return ReportTable("Outcomes", (*columns, "95% interval over tasks", "mean reward"), rows, notes=tuple(notes))
