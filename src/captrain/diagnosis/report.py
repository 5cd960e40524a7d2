"""A diagnosis as files and as what the command prints.

What explains the failures comes first, then the contrast; where nothing can be concluded, nothing is called selected.
Undefined numbers are dashes. The report itself is in `captrain.diagnosis.markdown`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from captrain.diagnosis.advice import Advice, advise
from captrain.diagnosis.cause import KINDS
from captrain.diagnosis.diagnosis import Diagnosis, shares
from captrain.diagnosis.figures import draw_candidates
from captrain.diagnosis.markdown import order, place, ranking_rows, report_text
from captrain.diagnosis.page import publish_page
from captrain.diagnosis.suspects import Suspect
from captrain.execution import user_outputs
from captrain.records import publish, publish_json, publish_text


def diagnosis_summary(diagnosis: Diagnosis) -> list[Table | str]:
    """What the command prints: counts, the causes and their shares, the ranking, what to do, what is amiss."""
    account = diagnosis.account
    standings = account.standings
    lines: list[Table | str] = [
        f"{len(diagnosis.logs.rollouts)} rollouts read, {diagnosis.logs.unread} entries not readable; "
        f"{account.failures} failed, unexplained: {account.unexplained} of {account.failures}",
        f"contrasted: {account.passed} passed, {account.failed} failed; left out: {standings['suspect']} of suspect "
        f"references{' (kept)' if diagnosis.keeps_suspects else ''}, "
        f"{standings['spoilt'] + standings['error']} as faults of infrastructure or simulator",
    ]
    if account.causes:
        lines.append(_causes_table(diagnosis))
    if diagnosis.report is not None and not diagnosis.shortage:
        lines.append(_ranking_table(diagnosis))
    if len(diagnosis.agents) > 1:
        lines.append(_agents_table(diagnosis))
    if diagnosis.shortage:
        lines.append(f"nothing can be concluded: {diagnosis.shortage}")
    if account.unreferenced and account.failures:
        lines.append(
            f"{account.unreferenced} rollouts come without a reference: only what a log shows by itself is told of them"
        )
    return lines


def _causes_table(diagnosis: Diagnosis) -> Table:
    table = Table(title="Why rollouts failed", title_justify="left")
    for name in ("cause", "failures", "share", "also in", "passed with it", "for example"):
        table.add_column(name)
    for kind, tally in shares(diagnosis.account):
        share = f"{tally.primary / diagnosis.account.failures:.2f}" if diagnosis.account.failures else "-"
        example = place(tally.example.task, tally.example.trial) if tally.example else ""
        message = f", message {tally.example.primary.message}" if tally.example and tally.example.primary else ""
        name = kind if KINDS[kind].of_agent else f"({kind})"
        table.add_row(name, str(tally.primary), share, str(tally.secondary), str(tally.passed), example + message)
    return table


def _ranking_table(diagnosis: Diagnosis) -> Table:
    table = Table(title=f"Causes by {order(diagnosis)}", title_justify="left")
    for name in ("cause", "gap", "95% interval", "coverage", "runs", "selected"):
        table.add_column(name)
    for row in ranking_rows(diagnosis):
        keys = ("id", "gap", "interval", "coverage", "runs", "selected")
        table.add_row(*(row[name] for name in keys), style="bold" if row["selected"] == "yes" else "")
    return table


def _agents_table(diagnosis: Diagnosis) -> Table:
    table = Table(title="Agents: failures by their primary cause", title_justify="left")
    table.add_column("cause")
    for agent, account in diagnosis.agents.items():
        table.add_column(f"{agent} ({account.failures} failed)")
    for kind, _ in shares(diagnosis.account):
        accounts = diagnosis.agents.values()
        table.add_row(
            kind, *(str(account.causes[kind].primary) if kind in account.causes else "0" for account in accounts)
        )
    table.add_row("unexplained", *(str(account.unexplained) for account in diagnosis.agents.values()))
    return table


def publish_diagnosis(diagnosis: Diagnosis, out: Path) -> list[Path]:
    """Write report.md, report.html, causes.jsonl, suspects.jsonl, advice.json, selection.json, candidates.jsonl,
    labels.jsonl, rollouts.jsonl, tools.json and figures/; equal logs and an equal name of the folder, which commands
    in the advice hold, give equal bytes. Returns the files written.

    Raises:
        UserError: a file would be replaced that captrain did not write.
    """
    with user_outputs(out, ["report.md", "report.html"]) as aside:
        advice = advise(diagnosis, out)
        paths = [path.relative_to(aside) for path in _publish_files(diagnosis, advice, aside)]
    return [out / path for path in paths]


def _publish_files(diagnosis: Diagnosis, advice: Sequence[Advice], out: Path) -> list[Path]:
    labels = diagnosis.labels
    publish_text(out / "report.md", report_text(diagnosis, advice))
    publish(out / "rollouts.jsonl", diagnosis.logs.rollouts)
    publish_json(out / "tools.json", diagnosis.logs.known_tools)
    publish(out / "causes.jsonl", diagnosis.explanations.rollouts)
    publish(out / "suspects.jsonl", _suspects(diagnosis))
    publish(out / "candidates.jsonl", labels.candidates if labels else [])
    publish(out / "labels.jsonl", labels.rows if labels else [])
    publish_json(out / "advice.json", [{"subject": entry.subject, "action": entry.action} for entry in advice])
    names = ("report.md", "rollouts.jsonl", "causes.jsonl", "suspects.jsonl", "candidates.jsonl", "labels.jsonl")
    paths = [out / name for name in (*names, "tools.json", "advice.json")]
    paths.append(publish_page(diagnosis, advice, out))
    if diagnosis.report is not None:
        publish_json(out / "selection.json", diagnosis.report)
        paths += [out / "selection.json", *draw_candidates(diagnosis.report, out)]
    return paths


def _suspects(diagnosis: Diagnosis) -> Iterator[Suspect]:
    for row in diagnosis.explanations.rollouts:
        if row.suspicions:
            yield Suspect(
                rollout=row.rollout, task=row.task, trial=row.trial, outcome=row.outcome, reasons=row.suspicions
            )
