"""The tables of a diagnosis, as text: made once, shown in a terminal, in report.md and on the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable

from captrain.capabilities import KINDS, LACKING, LEVEL, PRESENT, Association
from captrain.comparison import wilson
from captrain.diagnosis.diagnosis import Diagnosis, shares

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

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=self.title, title_justify="left")
        for name in self.brief:
            table.add_column(name)
        for row in self.rows:
            table.add_row(*(row[self.columns.index(name)] for name in self.brief))
        return table


def tables(diagnosis: Diagnosis) -> list[Table]:
    """The tables that have rows, in the order of the report."""
    candidates = [
        _causes(diagnosis),
        _agents(diagnosis),
        _ranking(diagnosis),
        _steps(diagnosis),
        _tasks(diagnosis),
        _order(diagnosis),
        _partings(diagnosis),
        _outcomes(diagnosis),
    ]
    return [table for table in candidates if table.rows]


def _causes(diagnosis: Diagnosis) -> Table:
    account, rows, links = diagnosis.account, list[tuple[str, ...]](), list[str]()
    for kind, tally in shares(account):
        share = f"{tally.primary / account.failures:.2f}" if account.failures else "-"
        example = tally.example.place if tally.example else ""
        message = f", message {tally.example.primary.message}" if tally.example and tally.example.primary else ""
        name = kind if KINDS[kind].of_agent else f"({kind})"
        rows.append((name, str(tally.primary), share, str(tally.secondary), str(tally.passed), example + message))
        links.append(f"cause-{kind}" if tally.primary else "")
    if account.unexplained and rows:
        rows.append(
            ("unexplained", str(account.unexplained), f"{account.unexplained / account.failures:.2f}", "", "", "")
        )
    columns = ("cause", "failures", "share", "also in", "passed with it", "for example")
    return Table("Why rollouts failed", columns, rows, columns, links=(*links, "cause-unexplained"))


def _agents(diagnosis: Diagnosis) -> Table:
    """Compare what one agent shows and another does not: never pooled."""
    agents = diagnosis.agents if len(diagnosis.agents) > 1 else {}
    columns = ("cause", *(f"{agent} ({account.failures} failed)" for agent, account in agents.items()))
    rows = [
        (kind, *(str(entry.causes[kind].primary if kind in entry.causes else 0) for entry in agents.values()))
        for kind, _ in shares(diagnosis.account)
        if agents
    ]
    rows += [("unexplained", *(str(entry.unexplained) for entry in agents.values()))] if agents else []
    return Table("Agents: failures by their primary cause", columns, rows, columns)


def _ranking(diagnosis: Diagnosis) -> Table:
    rows, labels = list[tuple[str, ...]](), diagnosis.labels
    names = [candidate.id for candidate in labels.candidates] if labels else []
    for entry in diagnosis.report["candidates"] if diagnosis.report and labels else []:
        row = names.index(entry["id"])
        counts = [
            [labels.verdicts.count(row, code, failed) for code in (LACKING, PRESENT)]
            for failed in (True, False)
            if labels
        ]
        interval = f"{number(entry['gap_low'])} to {number(entry['gap_high'])}"
        runs = f"{entry['runs_retained']}/{entry['runs']}"
        among = [f"{lacking} of {lacking + present}" for lacking, present in counts]
        selected = "yes" if entry["selected"] else "no"
        figures = (number(entry["gap"]), interval, number(entry["coverage"]), *among, runs, selected, entry["reason"])
        rows.append((entry["id"], *figures))
    brief = ("cause", "gap", "95% interval", "coverage", "runs", "selected")
    columns = (*brief[:4], "among failed", "among passed", *brief[4:], "reason")
    ranking = diagnosis.report["thresholds"].get("ranking", "product") if diagnosis.report else "product"
    order = {"product": "coverage x gap", "mean_gap": "mean gap of the runs"}.get(ranking, ranking)
    return Table(f"Causes by {order}", columns, rows, () if diagnosis.shortage else brief)


def _row(entry: Association) -> tuple[str, ...]:
    return (
        entry.name,
        f"{entry.failed[0]} of {entry.failed[1]}",
        f"{entry.passed[0]} of {entry.passed[1]}",
        p_of(entry.p),
        p_of(entry.p_holm),
    )


def _steps(diagnosis: Diagnosis) -> Table:
    """Steps of the reference that more of the failed rollouts lack, or differ in: the most failures first."""
    entries = [entry for entry in diagnosis.findings.steps if entry.excess > 0 and entry.holds]
    entries.sort(key=lambda entry: -entry.failed[0] * entry.excess)
    columns = ("step of the reference", "failed", "passed", "p", "p, Holm")
    return Table("Steps that failed rollouts lack", columns, [_row(entry) for entry in entries[:ROWS]])


def _tasks(diagnosis: Diagnosis) -> Table:
    """Values of the task by how far their pass rates are from the others'."""
    rows = list[tuple[str, ...]]()
    for entry in [entry for entry in diagnosis.findings.tasks if entry.p == entry.p][:ROWS]:
        passed, count, rollouts = entry.passed[0], entry.passed[0] + entry.failed[0], entry.passed[1] + entry.failed[1]
        low, high = wilson(passed, count)
        elsewhere = f"{entry.passed[1] - passed} of {rollouts - count}"
        rate = f"{passed} of {count}", f"{passed / count:.2f}", f"{low:.2f} to {high:.2f}", elsewhere
        rows.append((entry.name, *rate, p_of(entry.p), p_of(entry.p_holm), alike(entry)))
    columns = (
        "kind of task",
        "passed",
        "pass rate",
        "95% interval",
        "passed elsewhere",
        "p",
        "p, Holm",
        "the same rollouts",
    )
    return Table("Kinds of task", columns, rows)


def _order(diagnosis: Diagnosis) -> Table:
    """Tabulate what goes with failing in the order of calls, after the correction; with what is the same in all
    rollouts."""
    findings, rows = diagnosis.findings, list[tuple[str, ...]]()
    tested = [entry for entry in findings.order if entry.p == entry.p]
    for entry in [entry for entry in tested if entry.p_holm <= LEVEL][:ROWS]:
        rows.append((*_row(entry), alike(entry), findings.examples.get(entry.key, "")))
    columns = ("in the order of calls", "failed", "passed", "p", "p, Holm", "the same rollouts", "for example")
    note = f"{len(tested)} features could have shown something; those with p, Holm of {LEVEL:g} at most are listed"
    return Table("Calls that go with failing", columns, rows, notes=(note,))


def _partings(diagnosis: Diagnosis) -> Table:
    findings = diagnosis.findings
    rows = [(*steps, str(count)) for steps, count in findings.partings[:ROWS]]
    note = f"{findings.mixed} tasks have passed and failed trials; a failed one is held against the passed one it goes "
    columns = ("the passed trial calls", "the failed trial calls", "tasks")
    return Table("Where trials of one task part", columns, rows, notes=(note + "along with longest",))


def _outcomes(diagnosis: Diagnosis) -> Table:
    """Rollouts and pass rates by environment and agent. Those of logs are of every rollout that has a verdict, faults
    of the simulated user included: the contrast leaves them out, the rate must not."""
    tally = diagnosis.explanations.outcomes
    agents = tally.agents()
    rows = [
        (
            *([row.environment, agent] if agent else [row.environment]),
            str(row.rollouts),
            str(row.tasks),
            str(row.passed),
            f"{row.rate:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.reward:.3f}",
        )
        for agent in (agents if len(agents) > 1 else [None])
        for row in tally.environments(agent)
    ]
    names = ("environment", "agent")[: 1 + (len(agents) > 1)]
    columns = (*names, "rollouts", "tasks", "passed", "pass rate", "95% interval over tasks", "mean reward")
    repeated = tally.repeated() if len(agents) < 2 else None
    share = [f"pass^{repeated[0]} (all trials of a task pass): {repeated[1]:.3f}."] if repeated else []
    return Table("Outcomes", columns, rows, notes=(*share, *_paired(diagnosis, agents)))


def _paired(diagnosis: Diagnosis, agents: Sequence[str]) -> Iterator[str]:
    """Agents two by two, over the tasks that both played."""
    for count, first in enumerate(agents, start=1):
        for second in agents[count:]:
            if difference := diagnosis.explanations.outcomes.difference(first, second):
                tasks, mean, low, high = difference
                yield f"{first} minus {second}: {mean:+.3f} ({low:+.3f} to {high:+.3f}), {tasks} tasks of both"


def number(value: float | None) -> str:
    """Two decimals; what is undefined is a dash."""
    return "-" if value is None else f"{value:.2f}"


def alike(entry: Association) -> str:
    """Other names of the same rollouts."""
    return ", ".join(entry.also[:2]) + (f" and {len(entry.also) - 2} more" if len(entry.also) > 2 else "")


def p_of(value: float) -> str:
    """A p-value; what was not tested is a dash."""
    return "-" if value != value else f"{value:.2g}"
