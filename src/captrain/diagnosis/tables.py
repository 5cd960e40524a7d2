"""The tables of a diagnosis, as text: made once, shown in a terminal, in report.md and on the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from captrain.capabilities import KINDS, LACKING, LEVEL, PRESENT, Association
from captrain.comparison import wilson
from captrain.diagnosis.diagnosis import Diagnosis

ROWS = 12
"""Rows of a table of features."""


@dataclass(frozen=True)
class Table:
    """A table with a title; `brief` are the columns that a terminal shows, none where it does not show the table;
    `notes` are lines below; `links` the part of the page that each row leads to, "" for none."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    brief: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


def tables(diagnosis: Diagnosis) -> list[Table]:
    """The tables that have rows, in the order of the report."""
    candidates = [*_causes(diagnosis), _ranking(diagnosis), *_features(diagnosis), _outcomes(diagnosis)]
    return [table for table in candidates if table.rows]


def _causes(diagnosis: Diagnosis) -> Iterator[Table]:
    """Tabulate causes of failures, of all rollouts and, where there are several agents, of each: never pooled."""
    account, rows, links = diagnosis.account, list[tuple[str, ...]](), list[str]()
    for kind, tally in account.shares:
        share = f"{tally.primary / account.failures:.2f}" if account.failures else "-"
        example = tally.example.place if tally.example else ""
        message = f", message {tally.example.primary.message}" if tally.example and tally.example.primary else ""
        name = kind if KINDS[kind].of_agent else f"({kind})"
        rows.append((name, str(tally.primary), share, str(tally.secondary), str(tally.passed), example + message))
        links.append(f"cause-{kind}" if tally.primary else "")
    if account.unexplained and rows:
        share = f"{account.unexplained / account.failures:.2f}"
        rows.append(("unexplained", str(account.unexplained), share, "", "", ""))
    columns = ("cause", "failures", "share", "also in", "passed with it", "for example")
    yield Table("Why rollouts failed", columns, rows, columns, links=(*links, "cause-unexplained"))
    if len(agents := diagnosis.agents) > 1:
        columns = ("cause", *(f"{agent} ({entry.failures} failed)" for agent, entry in agents.items()))
        tallies = [(kind, [entry.causes.get(kind) for entry in agents.values()]) for kind, _ in account.shares]
        rows = [(kind, *(str(tally.primary if tally else 0) for tally in row)) for kind, row in tallies]
        rows.append(("unexplained", *(str(entry.unexplained) for entry in agents.values())))
        yield Table("Agents: failures by their primary cause", columns, rows, columns)


def _ranking(diagnosis: Diagnosis) -> Table:
    """Tabulate the causes in the order of the selection, with the numbers that decide."""
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
            rows.append((entry["id"], gap, f"{low} to {high}", coverage, *among, runs, selected, entry["reason"]))
    brief = ("cause", "gap", "95% interval", "coverage", "runs", "selected")
    columns = (*brief[:4], "among failed", "among passed", *brief[4:], "reason")
    order = {"product": "coverage x gap", "mean_gap": "mean gap of the runs"}.get(ranking, ranking)
    return Table(f"Causes by {order}", columns, rows, () if diagnosis.shortage else brief)


def _features(diagnosis: Diagnosis) -> Iterator[Table]:
    """Tabulate what goes with failing: steps of references, kinds of task, order of calls; and where trials part."""
    findings = diagnosis.findings
    # Steps that more of the failed rollouts lack, or differ in: the most failures first.
    steps = [entry for entry in findings.steps if entry.excess > 0 and entry.holds]
    steps.sort(key=lambda entry: -entry.failed[0] * entry.excess)
    columns = ("step of the reference", "failed", "passed", "p", "p, Holm")
    yield Table("Steps that failed rollouts lack", columns, [_counts(entry) for entry in steps[:ROWS]])
    # Values of the task by how far their pass rates are from the others'.
    rows = list[tuple[str, ...]]()
    for entry in [entry for entry in findings.tasks if entry.p == entry.p][:ROWS]:
        passed, count, rollouts = entry.passed[0], entry.passed[0] + entry.failed[0], entry.passed[1] + entry.failed[1]
        low, high = wilson(passed, count)
        elsewhere = f"{entry.passed[1] - passed} of {rollouts - count}"
        rate = f"{passed} of {count}", f"{passed / count:.2f}", f"{low:.2f} to {high:.2f}", elsewhere
        rows.append((entry.name, *rate, *_counts(entry)[3:], _alike(entry)))
    columns = ("kind of task", "passed", "pass rate", "95% interval", "passed elsewhere", *columns[3:])
    yield Table("Kinds of task", (*columns, "the same rollouts"), rows)
    # Orders of calls that go with failing after the correction, with what is the same in all rollouts.
    tested = [entry for entry in findings.order if entry.p == entry.p]
    sure = [entry for entry in tested if entry.p_holm <= LEVEL][:ROWS]
    rows = [(*_counts(entry), _alike(entry), findings.examples.get(entry.key, "")) for entry in sure]
    columns = ("in the order of calls", "failed", "passed", "p", "p, Holm", "the same rollouts", "for example")
    note = f"{len(tested)} features could have shown something; those with p, Holm of {LEVEL:g} at most are listed"
    yield Table("Calls that go with failing", columns, rows, notes=(note,))
    rows = [(*calls, str(count)) for calls, count in findings.partings[:ROWS]]
    note = f"{findings.mixed} tasks have passed and failed trials; a failed one is held against the passed one it goes "
    columns = ("the passed trial calls", "the failed trial calls", "tasks")
    yield Table("Where trials of one task part", columns, rows, notes=(note + "along with longest",))


def _counts(entry: Association) -> tuple[str, ...]:
    """Name and counts of a feature, and its p-values; what was not tested is a dash."""
    counts = (f"{part} of {whole}" for part, whole in (entry.failed, entry.passed))
    return entry.name, *counts, *("-" if p != p else f"{p:.2g}" for p in (entry.p, entry.p_holm))


def _alike(entry: Association) -> str:
    """Other names of the same rollouts."""
    return ", ".join(entry.also[:2]) + (f" and {len(entry.also) - 2} more" if len(entry.also) > 2 else "")


def _outcomes(diagnosis: Diagnosis) -> Table:
    """Rollouts and pass rates by environment and agent. Those of logs are of every rollout that has a verdict, faults
    of the simulated user included: the contrast leaves them out, the rate must not."""
    tally, rows, notes = diagnosis.explanations.outcomes, list[tuple[str, ...]](), list[str]()
    agents = tally.agents()
    several = len(agents) > 1
    for agent in agents if several else [None]:
        for row in tally.environments(agent):
            counts = (str(row.rollouts), str(row.tasks), str(row.passed))
            rates = (f"{row.rate:.3f}", f"{row.low:.3f} to {row.high:.3f}", f"{row.reward:.3f}")
            rows.append((row.environment, *([agent] if agent else []), *counts, *rates))
    if not several and (repeated := tally.repeated()):
        notes.append(f"pass^{repeated[0]} (all trials of a task pass): {repeated[1]:.3f}.")
    for first, second in combinations(agents, 2):
        if difference := tally.difference(first, second):
            tasks, mean, low, high = difference
            notes.append(f"{first} minus {second}: {mean:+.3f} ({low:+.3f} to {high:+.3f}), {tasks} tasks of both")
    columns = ("environment", *(["agent"] if several else []), "rollouts", "tasks", "passed", "pass rate")
    return Table("Outcomes", (*columns, "95% interval over tasks", "mean reward"), rows, notes=tuple(notes))
