"""A diagnosis as its readers see it: what the command prints, report.md, and the files beside it.

Where nothing can be concluded, the report says so before anything else, and calls nothing a finding. Undefined numbers
are dashes.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

from captrain.capabilities import LACKING, PRESENT
from captrain.contract import calls_of
from captrain.diagnosis.diagnosis import Diagnosis
from captrain.records import Capability, Label, Message, Rollout, publish, publish_json, publish_text

QUOTED = 240
"""Characters quoted of a message."""

METHOD = """\
## How this was made

captrain {version}, programmatic analyst. Each rollout is labelled NA, PRESENT or LACKING for each capability, by
comparing it with the reference actions, the information to be told, or the milestones that came with the log. *Gap*:
error rate among failed minus error rate among passed rollouts that exercised the capability; *coverage*: share of all
failed rollouts that lack it. Intervals by bootstrap over tasks; where all failed rollouts lack a capability and no
passed one does, they are narrower than the truth: look at the counts. Selected: gap >= {delta:g} and coverage >=
{coverage:g} in {agreement} of 10 labelling runs, lower bound of the gap above {floor:g}, at most {count}. A gap says
which lack goes with failing, not what training would gain."""


def diagnosis_summary(diagnosis: Diagnosis) -> list[Table | str]:
    """What the command prints: counts, the ranking, with failed rollouts that lack each capability, what is amiss."""
    contrasted = diagnosis.contrasted
    lines: list[Table | str] = [
        f"{len(diagnosis.logs.rollouts)} rollouts read, {diagnosis.logs.unread} entries not readable; contrasted: "
        f"{contrasted.passed} passed, {contrasted.failed} failed; "
        f"{contrasted.faults} left out as faults of infrastructure or simulator"
    ]
    if diagnosis.report is not None:
        lines.append(_table(diagnosis))
    if diagnosis.shortage:
        lines.append(f"nothing can be concluded: {diagnosis.shortage}")
    return lines


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(title=f"Capabilities by {_order(diagnosis)}", title_justify="left")
    for name in ("capability", "gap", "95% interval", "coverage", "runs", "selected", "failed rollouts that lack it"):
        table.add_column(name)
    for row in _rows(diagnosis):
        keys = ("id", "gap", "interval", "coverage", "runs", "selected", "examples")
        table.add_row(*(row[name] for name in keys), style="bold" if row["selected"] == "yes" else "")
    return table


def publish_diagnosis(diagnosis: Diagnosis, out: Path) -> list[Path]:
    """Write report.md, selection.json, candidates.jsonl, labels.jsonl, rollouts.jsonl and figures/; equal logs give
    equal bytes. Returns the files written."""
    publish_text(out / "report.md", report_text(diagnosis))
    publish(out / "rollouts.jsonl", diagnosis.logs.rollouts)
    publish(out / "candidates.jsonl", diagnosis.labels.candidates if diagnosis.labels else [])
    publish(out / "labels.jsonl", diagnosis.labels.rows if diagnosis.labels else [])
    paths = [out / name for name in ("report.md", "rollouts.jsonl", "candidates.jsonl", "labels.jsonl")]
    if diagnosis.report is not None:
        from captrain.reporting import capabilities, render

        publish_json(out / "selection.json", diagnosis.report)
        figures = {"capabilities": partial(capabilities, diagnosis.report)}
        paths += [out / "selection.json", *render(figures, out / "figures")]
    return paths


def _rows(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """The rows of the ranking as text; undefined numbers as a dash."""
    examples = diagnosis.labels.examples if diagnosis.labels else {}
    rows = []
    for candidate in diagnosis.report["candidates"] if diagnosis.report else []:
        verdict = "selected" if candidate["selected"] else candidate["reason"]
        rows.append(
            {
                "id": candidate["id"],
                "name": candidate["name"],
                "gap": _number(candidate["gap"]),
                "interval": f"{_number(candidate['gap_low'])} to {_number(candidate['gap_high'])}",
                "coverage": _number(candidate["coverage"]),
                "failed": _exercised(diagnosis, candidate["id"], failed=True),
                "passed": _exercised(diagnosis, candidate["id"], failed=False),
                "runs": f"{candidate['runs_retained']}/{candidate['runs']}",
                "selected": "yes" if candidate["selected"] else "no",
                "verdict": f"too few rollouts ({verdict})" if diagnosis.shortage else verdict,
                "examples": ", ".join(_name(rollout) for rollout, _ in examples[candidate["id"]][:3]),
            }
        )
    return rows


def report_text(diagnosis: Diagnosis) -> str:
    """The report in Markdown."""
    parts = [
        "# What these logs say the agent lacks",
        f"> **Nothing can be concluded from these logs**: {diagnosis.shortage}." if diagnosis.shortage else "",
        _outcomes(diagnosis),
        _ranking(diagnosis),
        *_capabilities(diagnosis),
        _left_out(diagnosis),
        _sources(diagnosis),
        _method(diagnosis),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _outcomes(diagnosis: Diagnosis) -> str:
    """Rollouts and pass rates by environment. Those of logs are of every rollout that has a verdict, faults of the
    simulated user included: the contrast leaves them out, the rate must not."""
    rows = [
        "| environment | rollouts | tasks | passed | pass rate | 95% interval over tasks | mean reward |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.environment} | {row.rollouts} | {row.tasks} | {row.passed} "
            f"| {row.rate:.3f} | {row.low:.3f} to {row.high:.3f} | {row.reward:.3f} |"
            for row in diagnosis.contrasted.outcomes.environments()
        ),
    ]
    repeated = diagnosis.contrasted.outcomes.repeated()
    share = [f"pass^{repeated[0]} (all trials of a task pass): {repeated[1]:.3f}."] if repeated else []
    return "\n\n".join(["## Outcomes", "\n".join(rows), *share])


def _ranking(diagnosis: Diagnosis) -> str:
    if not diagnosis.report:
        return ""
    lines = [
        "| capability | gap | 95% interval | coverage | lacking among failed | lacking among passed | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _rows(diagnosis):
        name = f"[{row['name']}](#{row['id'].replace('_', '-')})"
        cells = (name, *(row[key] for key in ("gap", "interval", "coverage", "failed", "passed", "verdict")))
        lines.append(f"| {' | '.join(cells)} |")
    figure = "![gap and coverage of each candidate](figures/capabilities.png)"
    return "\n\n".join([f"## Capabilities, by {_order(diagnosis)}", "\n".join(lines), figure])


def _order(diagnosis: Diagnosis) -> str:
    """What the ranking goes by, in words."""
    ranking = diagnosis.report["thresholds"].get("ranking", "product") if diagnosis.report else "product"
    return {"product": "coverage x gap", "mean_gap": "mean gap of the runs"}.get(ranking, ranking)


def _exercised(diagnosis: Diagnosis, capability: str, failed: bool) -> str:
    """Of the failed or passed rollouts that exercised the capability, how many lack it."""
    assert diagnosis.labels is not None
    row = [candidate.id for candidate in diagnosis.labels.candidates].index(capability)
    lacking, present = (diagnosis.labels.verdicts.count(row, code, failed) for code in (LACKING, PRESENT))
    return f"{lacking} of {lacking + present}"


def _capabilities(diagnosis: Diagnosis) -> list[str]:
    """A part for each candidate, in the order of the ranking."""
    if diagnosis.labels is None:
        return []
    by_id = {candidate.id: candidate for candidate in diagnosis.labels.candidates}
    return [_capability(by_id[row["id"]], diagnosis.labels.examples[row["id"]]) for row in _rows(diagnosis)]


def _capability(capability: Capability, lacking: Sequence[tuple[Rollout, Label]]) -> str:
    lines = [f'## <a id="{capability.id.replace("_", "-")}"></a>{capability.name}', capability.description]
    if not lacking:
        return "\n\n".join([*lines, "No failed rollout lacks it; passed ones do."])
    items = []
    for rollout, label in lacking:
        place = "" if label.message is None else f", message {label.message}"
        quote = "" if label.message is None else _quoted(rollout.messages[label.message])
        items.append(f"- **{_name(rollout)}**{place}: {label.evidence}" + (f"\n  > {quote}" if quote else ""))
    return "\n\n".join([*lines, "\n".join(items)])


def _quoted(message: Message) -> str:
    calls = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls_of(message)
    ]
    text = " ".join(" ".join([message.get("content") or "", *calls]).split())
    return f"{message['role']}: {text if len(text) <= QUOTED else text[:QUOTED] + ' ...'}"


def _left_out(diagnosis: Diagnosis) -> str:
    """Rollouts that were read but say nothing of the agent, and what could not be read."""
    contrasted, logs = diagnosis.contrasted, diagnosis.logs
    parts = []
    if contrasted.faults:
        lines = [
            f"- {_place(fault.task, fault.trial)} ({fault.outcome}): {fault.evidence}" for fault in contrasted.examples
        ]
        lines += _more(contrasted.faults - len(lines))
        parts.append(
            f"{contrasted.faults} rollouts of infrastructure or simulator faults are not contrasted:\n\n"
            + "\n".join(lines)
        )
    if contrasted.unreferenced:
        parts.append(
            f"{contrasted.unreferenced} of {len(contrasted.rollouts)} rollouts have neither reference actions nor "
            "milestones: most capabilities cannot be judged on them."
        )
    if logs.skipped:
        reasons = Counter((entry.source, entry.reason) for entry in logs.skipped)
        lines = [f"- {source}: {reason} ({number})" for (source, reason), number in reasons.items()]
        lines += [f"  - {entry.source}, {entry.place}" for entry in logs.skipped]
        lines += _more(logs.unread - len(logs.skipped))
        parts.append(f"{logs.unread} entries could not be read:\n\n" + "\n".join(lines))
    return "\n\n".join(["## Left out", *parts]) if parts else ""


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
    return str(value)


def _method(diagnosis: Diagnosis) -> str:
    if diagnosis.report is None:
        return ""
    limits = diagnosis.report["thresholds"]
    return METHOD.format(version=version("captrain"), **limits)


def _name(rollout: Rollout) -> str:
    return _place(rollout.task.id, rollout.trial)


def _place(task: str, trial: int) -> str:
    return f"{task}, trial {trial}" if trial else task


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
