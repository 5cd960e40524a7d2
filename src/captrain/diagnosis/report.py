"""A diagnosis as files and as what the command prints.

What to fix comes first, then what explains the failures, and the contrast; where nothing can be concluded, nothing is
called selected. The report itself is in `captrain.diagnosis.markdown`, its tables in `captrain.diagnosis.tables`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from captrain.diagnosis.advice import Advice, advise
from captrain.diagnosis.diagnosis import Diagnosis
from captrain.diagnosis.figures import draw_candidates
from captrain.diagnosis.markdown import report_text
from captrain.diagnosis.page import publish_page
from captrain.diagnosis.suspects import Suspect
from captrain.diagnosis.tables import tables
from captrain.execution import user_outputs
from captrain.records import publish, publish_json, publish_text


def diagnosis_summary(diagnosis: Diagnosis, advice: Sequence[Advice]) -> list[Table | str]:
    """Summarize for the screen: counts, what to fix first, the causes and their shares, the ranking, what is amiss."""
    account = diagnosis.account
    standings = account.standings
    lines: list[Table | str] = [
        f"{len(diagnosis.logs.rollouts)} rollouts read, {diagnosis.logs.unread} entries not readable; "
        f"{account.failures} failed, unexplained: {account.unexplained} of {account.failures}",
        f"contrasted: {account.passed} passed, {account.failed} failed; left out: {standings['suspect']} of suspect "
        f"references{' (kept)' if diagnosis.keeps_suspects else ''}, "
        f"{standings['spoilt'] + standings['error']} as faults of infrastructure or simulator",
    ]
    fixes = [entry for entry in advice if entry.facts]
    lines += ["What to fix first" if fixes else "What to do next"] if advice else []
    for number, entry in enumerate(fixes or advice, start=1):
        lines.append(f"{number}. {entry.subject}{f', {entry.facts}' if entry.facts else ''}")
        lines += [f"   {entry.example}"] if entry.example else []
        lines += [f"   -> {action}" for action in entry.action.split("; ")]
    lines += [table.rich() for table in tables(diagnosis) if table.brief]
    if diagnosis.shortage:
        lines.append(f"nothing can be concluded: {diagnosis.shortage}")
    if account.unreferenced and account.failures:
        note = "rollouts come without a reference: of them is told what goes with failing, not proven"
        lines.append(f"{account.unreferenced} {note}")
    return [*lines, account.unproven_note] if account.unplayed else lines


def publish_diagnosis(diagnosis: Diagnosis, out: Path, advice: Sequence[Advice] | None = None) -> list[Path]:
    """Write report.md, report.html, causes.jsonl, suspects.jsonl, advice.json, selection.json, candidates.jsonl,
    labels.jsonl, rollouts.jsonl, tools.json and figures/; equal logs and an equal name of the folder, which commands
    in the advice hold, give equal bytes. Returns the files written.

    Raises:
        UserError: a file would be replaced that captrain did not write.
    """
    with user_outputs(out, ["report.md", "report.html"]) as aside:
        entries = advise(diagnosis, out) if advice is None else advice
        paths = [path.relative_to(aside) for path in _publish_files(diagnosis, entries, aside)]
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
    publish_json(out / "advice.json", [asdict(entry) for entry in advice])
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
