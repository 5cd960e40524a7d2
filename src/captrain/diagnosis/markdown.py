"""The report of a diagnosis in Markdown: what to fix and to do, the tables, each failure, what is left out."""

import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from captrain.capabilities import SUSPECT
from captrain.diagnosis.advice import Advice
from captrain.diagnosis.diagnosis import LIST_LENGTH, Diagnosis
from captrain.diagnosis.explained import Explained
from captrain.diagnosis.figures import figure_line
from captrain.diagnosis.findings import quote_of
from captrain.diagnosis.tables import Table, tables
from captrain.records import Message, as_markdown

METHOD = """\
## How this was made

captrain {version}. Each rollout is held against the reference that came with the log, the policy and the records that
tools returned, by rules that do not know its outcome. The *primary* cause of a failure is the earliest that is found;
what the log does not prove stays unexplained. A reference that policy, records or the log itself contradict is suspect,
and its rollouts are {treatment}. *Gap*: share of rollouts with the cause among failed minus among passed ones, of
those that had occasion to show it; *coverage*: share of the failed rollouts with a reference, or that could show it
without, that do. Intervals by bootstrap over
tasks; where all failed rollouts show a cause and no passed one does, they are narrower than the truth: look at the
counts. Selected: gap >= {delta:g} and coverage >= {coverage:g} in {agreement} of 10 resamples, lower bound of the gap
above {floor:g}, at most {count}. A gap says which cause goes with failing, not what training would gain."""


def report_text(diagnosis: Diagnosis, advice: Sequence[Advice]) -> str:
    """The report in Markdown."""
    account = diagnosis.account
    parts = [
        "# Why these rollouts failed, and what the agent lacks",
        f"> **Nothing can be concluded from these logs**: {diagnosis.shortage}." if diagnosis.shortage else "",
        f"{account.failures} rollouts failed; unexplained: {account.unexplained} of {account.failures}.",
        _fixes(advice),
        _advice(advice),
        *map(_table, tables(diagnosis)),
        figure_line() if diagnosis.report else "",
        _suspect_references(diagnosis),
        _failures(diagnosis),
        _left_out(diagnosis),
        _sources(diagnosis),
        _method(diagnosis),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: Table) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *(map(words, row) for row in table.rows)]
    return "\n\n".join(
        [f"## {table.title}", "\n".join(f"| {' | '.join(line)} |" for line in lines), *map(words, table.notes)]
    )


def _fixes(advice: Sequence[Advice]) -> str:
    fixes = [entry for entry in advice if entry.facts]
    lines = [
        f"{number}. **{words(entry.subject)}**, {words(entry.facts)}\n   > {words(entry.example)}\n\n   {entry.action}"
        for number, entry in enumerate(fixes, start=1)
    ]
    return "\n\n".join(["## What to fix first", *lines]) if lines else ""


def _advice(advice: Sequence[Advice]) -> str:
    lines = [f"- **{words(entry.subject)}**: {entry.action}" for entry in advice if not entry.facts]
    return "\n\n".join(["## What to do next", "\n".join(lines)]) if lines else ""


def _suspect_references(diagnosis: Diagnosis) -> str:
    """The references that something speaks against, with all that does."""
    rows = diagnosis.account.left_out.get("suspect", [])
    lines = [f"- **{words(row.place)}** ({row.outcome}): {words('; '.join(row.suspicions))}" for row in rows]
    lines += _more(diagnosis.account.standings["suspect"] - len(rows))
    return "\n\n".join(["## Suspect references", "\n".join(lines)]) if rows else ""


def _failures(diagnosis: Diagnosis) -> str:
    """Each failed rollout with its primary cause and the message where it shows; spoilt ones are listed as left out."""
    lines, count = list[str](), 0
    for row, rollout in zip(diagnosis.explanations.rollouts, diagnosis.logs.rollouts, strict=True):
        if row.outcome == "failed" and row.standing != "spoilt":
            count += 1
            if count <= LIST_LENGTH:
                lines += _failure(row, rollout.messages)
    lines += _more(count - LIST_LENGTH) if count > LIST_LENGTH else []
    return "\n\n".join(["## Failures, one by one", "\n".join(lines)]) if lines else ""


def _failure(row: Explained, messages: list[Message]) -> list[str]:
    primary, rollout = row.primary, words(row.place)
    is_remarkable = row.standing == "suspect" and (primary is None or primary.cause != SUSPECT)
    remark = " (its reference is suspect)" if is_remarkable else ""
    if primary is None:
        return [f"- **{rollout}**: unexplained{remark}"]
    remark = f"{' (medium confidence)' if primary.confidence == 'medium' else ''}{remark}"
    head = f"- **{rollout}**, message {primary.message}, {primary.cause}{remark}: {words(primary.evidence)}"
    lines = [head, f"  > {words(quote_of(messages[primary.message]))}"] if primary.message < len(messages) else [head]
    secondary = [f"{cause.cause} (message {cause.message}: {words(cause.evidence)})" for cause in row.secondary]
    return [*lines, *(f"  - also {cause}" for cause in secondary)]


def _left_out(diagnosis: Diagnosis) -> str:
    """Rollouts that were read but say nothing of the agent, and what could not be read."""
    account, logs = diagnosis.account, diagnosis.logs
    parts = [words(account.unproven_note)] if account.unplayed else []
    faults = account.standings["error"] + account.standings["spoilt"]
    if faults:
        rows = (account.left_out.get("error", []) + account.left_out.get("spoilt", []))[:LIST_LENGTH]
        trials = [f", trial {row.trial}" if row.trial else "" for row in rows]
        lines = [
            f"- {words(row.task)} ({row.outcome}{trial}): {words(_fault(row))}"
            for row, trial in zip(rows, trials, strict=True)
        ]
        lines += _more(faults - len(lines))
        parts.append(
            f"{faults} rollouts of infrastructure or simulator faults are not contrasted:\n\n" + "\n".join(lines)
        )
    if account.unreferenced:
        parts.append(
            f"{account.unreferenced} of {len(logs.rollouts)} rollouts have neither reference actions nor milestones: "
            "most causes cannot be told of them."
        )
    if logs.skipped:
        reasons = Counter((entry.source, entry.reason) for entry in logs.skipped)
        lines = [f"- {words(source)}: {words(reason)} ({number})" for (source, reason), number in reasons.items()]
        lines += [f"  - {words(f'{entry.source}, {entry.place}')}" for entry in logs.skipped]
        lines += _more(logs.unread - len(logs.skipped))
        parts.append(f"{logs.unread} entries could not be read:\n\n" + "\n".join(lines))
    return "\n\n".join(["## Left out", *parts]) if parts else ""


def _fault(row: Explained) -> str:
    primary = row.primary
    assert primary is not None
    return primary.evidence if row.outcome == "error" else f"message {primary.message}: {primary.evidence}"


def _more(number: int) -> list[str]:
    """The line that stands for what is not listed, if anything."""
    return [f"- and {number} more"] if number else []


def _sources(diagnosis: Diagnosis) -> str:
    lines = [
        "- "
        + ", ".join(
            f"{name.replace('_', ' ')} {_plain(value)}" for name, value in source.items() if value not in (None, "", {})
        )
        for source in diagnosis.logs.sources
    ]
    return "\n\n".join(["## What was read", "\n".join(lines)])


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None) + ")"
    return words(str(value))


def words(text: str) -> str:
    """Text of the logs in one line of the page: no markup, no sign that a terminal obeys. An underscore within
    a word is none, and identifiers are full of them."""
    return re.sub(r"(?<=\w)\\_(?=\w)", "_", as_markdown(" ".join(text.split())))


def _method(diagnosis: Diagnosis) -> str:
    if diagnosis.report is None:
        return ""
    treatment = "kept all the same" if diagnosis.keeps_suspects else "left out of the contrast"
    return METHOD.format(version=version("captrain"), treatment=treatment, **diagnosis.report["thresholds"])
