"""A diagnosis as its readers see it: what the command prints, report.md, and the files beside it.

Where nothing can be concluded, the report says so before anything else, and calls nothing a finding. Undefined numbers
are dashes.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.table import Table

from captrain.contract import calls_of
from captrain.diagnosis.diagnosis import Diagnosis
from captrain.evaluation import Bootstrap, mean, summarise
from captrain.records import Capability, Label, Message, Rollout, publish, publish_json, publish_text

QUOTED = 240
"""Characters quoted of a message."""

METHOD = """\
## How this was made

captrain {version}, programmatic analyst. Each rollout is labelled NA, PRESENT or LACKING for each capability, by
comparing it with the reference actions, the information to be told, or the milestones that came with the log. *Gap*:
error rate among failed minus error rate among passed rollouts that exercised the capability; *coverage*: share of all
failed rollouts that lack it. Intervals by bootstrap over rollouts; where all failed rollouts lack a capability and no
passed one does, they are narrower than the truth: look at the counts. Selected: gap >= {delta:g} and coverage >=
{coverage:g} in {agreement} of 10 labelling runs, lower bound of the gap above {floor:g}, at most {count}. A gap says
which lack goes with failing, not what training would gain."""


def diagnosis_summary(diagnosis: Diagnosis) -> list[Table | str]:
    """What the command prints: counts, the ranking, with failed rollouts that lack each capability, what is amiss."""
    skipped = len(diagnosis.logs.skipped)
    lines: list[Table | str] = [
        f"{len(diagnosis.logs.rollouts)} rollouts read, {skipped} entries not readable; contrasted: "
        f"{diagnosis.count('passed')} passed, {diagnosis.count('failed')} failed; "
        f"{len(diagnosis.faults)} left out as faults of infrastructure or simulator"
    ]
    if diagnosis.report is not None:
        lines.append(_table(diagnosis))
    if diagnosis.shortage:
        lines.append(f"nothing can be concluded: {diagnosis.shortage}")
    return lines


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(title="Capabilities by coverage x gap", title_justify="left")
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
    publish(out / "candidates.jsonl", diagnosis.candidates)
    publish(out / "labels.jsonl", diagnosis.labels)
    paths = [out / name for name in ("report.md", "rollouts.jsonl", "candidates.jsonl", "labels.jsonl")]
    if diagnosis.report is not None:
        from captrain.reporting import capabilities, render

        publish_json(out / "selection.json", diagnosis.report)
        figures = {"capabilities": partial(capabilities, diagnosis.report)}
        paths += [out / "selection.json", *render(figures, out / "figures")]
    return paths


def _rows(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """The rows of the ranking as text; undefined numbers as a dash."""
    examples = {candidate.id: candidate.examples for candidate in diagnosis.candidates}
    names = {rollout.id: _name(rollout) for rollout in diagnosis.contrasted}
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
                "failed": _exercised(diagnosis, candidate["id"], "failed"),
                "passed": _exercised(diagnosis, candidate["id"], "passed"),
                "runs": f"{candidate['runs_retained']}/{candidate['runs']}",
                "selected": "yes" if candidate["selected"] else "no",
                "verdict": f"too few rollouts ({verdict})" if diagnosis.shortage else verdict,
                "examples": ", ".join(names[name] for name in examples[candidate["id"]][:3]),
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
        *(_capability(capability, _lacking(diagnosis, capability)) for capability in _ranked(diagnosis)),
        _left_out(diagnosis),
        _sources(diagnosis),
        _method(diagnosis),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _outcomes(diagnosis: Diagnosis) -> str:
    """Rollouts and pass rates by environment. Those of logs are of every rollout that has a verdict, faults of the
    simulated user included: the contrast leaves them out, the rate must not."""
    scored = [rollout for rollout in diagnosis.logs.rollouts if rollout.outcome != "error"]
    groups: dict[str, list[Rollout]] = {}
    for rollout in scored:
        groups.setdefault(rollout.environment, []).append(rollout)
    if len(groups) > 1:
        groups["all"] = scored
    rows = [
        "| environment | rollouts | tasks | passed | pass rate | 95% interval over tasks | mean reward |",
        "|---|---|---|---|---|---|---|",
    ]
    for environment, rollouts in groups.items():
        tasks: dict[str, list[float]] = {}
        for rollout in rollouts:
            tasks.setdefault(rollout.task.id, []).append(float(rollout.outcome == "passed"))
        rates = np.array([sum(trials) / len(trials) for trials in tasks.values()])
        low, high = Bootstrap(len(rates), 2000, 0.95, 0).interval(rates)
        rewards: dict[str, list[float]] = {}
        for rollout in rollouts:
            rewards.setdefault(rollout.task.id, []).append(rollout.score.reward if rollout.score else 0.0)
        reward = mean(np.array([sum(trials) / len(trials) for trials in rewards.values()]))
        passed = sum(rollout.outcome == "passed" for rollout in rollouts)
        rows.append(
            f"| {environment} | {len(rollouts)} | {len(tasks)} | {passed} "
            f"| {mean(rates):.3f} | {low:.3f} to {high:.3f} | {reward:.3f} |"
        )
    lines = ["## Outcomes", "\n".join(rows), *_repeated(scored)]
    return "\n\n".join(lines)


def _repeated(rollouts: Sequence[Rollout]) -> list[str]:
    """pass^k, where every task was played as often as every other and more than once."""
    trials: dict[str, list[float]] = {}
    for rollout in rollouts:
        trials.setdefault(rollout.task.id, []).append(float(rollout.outcome == "passed"))
    lengths = {len(outcomes) for outcomes in trials.values()}
    if len(lengths) != 1 or lengths == {1}:
        return []
    summary = summarise(np.array([*trials.values()]))
    return [f"pass^{lengths.pop()} (all trials of a task pass): {mean(summary.pass_k):.3f}."]


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
    return "\n\n".join(["## Capabilities, by coverage x gap", "\n".join(lines), figure])


def _exercised(diagnosis: Diagnosis, capability: str, outcome: str) -> str:
    """Of the rollouts with this outcome that exercised the capability, how many lack it."""
    verdicts = {
        row.rollout: row.labels[capability].verdict
        for row in diagnosis.labels
        if row.outcome == outcome and capability in row.labels
    }
    counts = Counter(verdicts.values())
    return f"{counts['LACKING']} of {counts['LACKING'] + counts['PRESENT']}"


def _lacking(diagnosis: Diagnosis, capability: Capability) -> list[tuple[Rollout, Label]]:
    """The capability's example rollouts, each with the label that finds it lacking."""
    labels = {
        row.rollout: label
        for row in diagnosis.labels
        if (label := row.labels.get(capability.id)) is not None and label.verdict == "LACKING"
    }
    by_id = {rollout.id: rollout for rollout in diagnosis.contrasted}
    return [(by_id[name], labels[name]) for name in capability.examples if name in labels]


def _ranked(diagnosis: Diagnosis) -> list[Capability]:
    by_id = {candidate.id: candidate for candidate in diagnosis.candidates}
    return [by_id[row["id"]] for row in _rows(diagnosis)]


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
    by_id = {rollout.id: rollout for rollout in diagnosis.logs.rollouts}
    parts = []
    if diagnosis.faults:
        lines = [
            f"- {_name(by_id[name])} ({by_id[name].outcome}): {evidence}" for name, evidence in diagnosis.faults.items()
        ]
        parts.append(
            f"{len(lines)} rollouts of infrastructure or simulator faults are not contrasted:\n\n" + "\n".join(lines)
        )
    if unreferenced := sum(not rollout.reference and not _has_milestones(rollout) for rollout in diagnosis.contrasted):
        parts.append(
            f"{unreferenced} of {len(diagnosis.contrasted)} rollouts have neither reference actions nor milestones: "
            "most capabilities cannot be judged on them."
        )
    if diagnosis.logs.skipped:
        reasons = Counter((entry.source, entry.reason) for entry in diagnosis.logs.skipped)
        lines = [f"- {source}: {reason} ({number})" for (source, reason), number in reasons.items()]
        lines += [f"  - {entry.source}, {entry.place}" for entry in diagnosis.logs.skipped]
        parts.append(f"{len(diagnosis.logs.skipped)} entries could not be read:\n\n" + "\n".join(lines))
    return "\n\n".join(["## Left out", *parts]) if parts else ""


def _has_milestones(rollout: Rollout) -> bool:
    return rollout.score is not None and any(name.startswith("milestone") for name in rollout.score.parts)


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
    return f"{rollout.task.id}, trial {rollout.trial}" if rollout.trial else rollout.task.id


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
