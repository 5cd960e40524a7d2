"""What an agent's own logs say it lacks: import, label, select, report. No model, no network, no torch.

The analyst, the labelling runs and the selection are those of the pipeline; only the rollouts come from elsewhere.
What infrastructure or the simulated user brought about is listed and not contrasted: it says nothing of the agent. A
ranking of few rollouts is luck, so where fewer than `FEW` passed or failed the report says so before anything else,
and calls nothing a finding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.table import Table

from captrain.capabilities import ProgrammaticAnalyst, SelectionAccount, fault_of, label_runs, select
from captrain.config import Selection
from captrain.contract import calls_of
from captrain.evaluation import Bootstrap, mean, summarise
from captrain.interop import Logs
from captrain.records import Capability, Label, Message, Rollout, RolloutLabels, publish, publish_json, publish_text

FEW = 10
"""Fewer passed or fewer failed rollouts than this conclude nothing: with 9 on a side, the 95% interval of a rate of one
half is wider than 0.6."""
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


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of a diagnosis.

    logs: what was read. faults: rollout id -> evidence, of rollouts left out of the contrast. contrasted: the others.
    candidates: capabilities that some rollout lacks. labels: of every run. report: the account of the selection, None
    where nothing could be contrasted. shortage: why nothing can be concluded, "" where enough was read.
    """

    logs: Logs
    faults: dict[str, str]
    contrasted: list[Rollout]
    candidates: list[Capability]
    labels: list[RolloutLabels]
    report: SelectionAccount | None
    shortage: str

    def count(self, outcome: str) -> int:
        """Contrasted rollouts with this outcome."""
        return sum(rollout.outcome == outcome for rollout in self.contrasted)


def diagnose(logs: Logs, selection: Selection, *, runs: int, count: int, seed: int) -> Diagnosis:
    """Label the rollouts of other people's logs and rank the capabilities that failed ones lack and passed ones show.

    Args:
        logs: from `captrain.interop.logs.reading.read`.
        selection: thresholds, as in the pipeline.
        runs: labelling runs, each on a resample of the rollouts.
        count: capabilities selected at most.
        seed: of the resamples.
    """
    errors = {r.id: r.error or "an infrastructure error" for r in logs.rollouts if r.outcome == "error"}
    simulated = {r.id: fault for r in logs.rollouts if r.id not in errors and (fault := fault_of(r))}
    faults = errors | simulated
    contrasted = [rollout for rollout in logs.rollouts if rollout.id not in faults]
    passed = sum(rollout.outcome == "passed" for rollout in contrasted)
    failed = len(contrasted) - passed
    if not passed or not failed:
        shortage = f"{passed} passed and {failed} failed rollouts: there is nothing to contrast"
        return Diagnosis(logs, faults, contrasted, [], [], None, shortage)
    candidates, labels = label_runs(ProgrammaticAnalyst(), contrasted, logs.tools, runs, seed)
    report = select(labels, candidates, selection, count, seed).report
    shortage = ""
    if min(passed, failed) < FEW:
        shortage = (
            f"{passed} passed and {failed} failed rollouts; at least {FEW} of each are needed to conclude anything"
        )
    return Diagnosis(logs, faults, contrasted, candidates, labels, report, shortage)


def shown(diagnosis: Diagnosis) -> list[Table | str]:
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
    drawn = Table(title="Capabilities by coverage x gap", title_justify="left")
    for name in ("capability", "gap", "95% interval", "coverage", "runs", "selected", "failed rollouts that lack it"):
        drawn.add_column(name)
    for row in _rows(diagnosis):
        keys = ("id", "gap", "interval", "coverage", "runs", "selected", "examples")
        drawn.add_row(*(row[name] for name in keys), style="bold" if row["selected"] == "yes" else "")
    return drawn


def write(diagnosis: Diagnosis, out: Path) -> list[Path]:
    """Write report.md, selection.json, candidates.jsonl, labels.jsonl, rollouts.jsonl and figures/; equal logs give
    equal bytes. Returns the files written."""
    publish_text(out / "report.md", report_text(diagnosis))
    publish(out / "rollouts.jsonl", diagnosis.logs.rollouts)
    publish(out / "candidates.jsonl", diagnosis.candidates)
    publish(out / "labels.jsonl", diagnosis.labels)
    written = [out / name for name in ("report.md", "rollouts.jsonl", "candidates.jsonl", "labels.jsonl")]
    if diagnosis.report is not None:
        from captrain.reporting import capabilities, render

        publish_json(out / "selection.json", diagnosis.report)
        figures = {"capabilities": partial(capabilities, diagnosis.report)}
        written += [out / "selection.json", *render(figures, out / "figures")]
    return written


def _rows(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """The rows of the ranking as text; undefined numbers as a dash."""
    examples = {candidate.id: candidate.examples for candidate in diagnosis.candidates}
    names = {rollout.id: _name(rollout) for rollout in diagnosis.contrasted}
    rows = []
    for one in diagnosis.report["candidates"] if diagnosis.report else []:
        verdict = "selected" if one["selected"] else one["reason"]
        rows.append(
            {
                "id": one["id"],
                "name": one["name"],
                "gap": _number(one["gap"]),
                "interval": f"{_number(one['gap_low'])} to {_number(one['gap_high'])}",
                "coverage": _number(one["coverage"]),
                "failed": _exercised(diagnosis, one["id"], "failed"),
                "passed": _exercised(diagnosis, one["id"], "passed"),
                "runs": f"{one['runs_retained']}/{one['runs']}",
                "selected": "yes" if one["selected"] else "no",
                "verdict": f"too few rollouts ({verdict})" if diagnosis.shortage else verdict,
                "examples": ", ".join(names[name] for name in examples[one["id"]][:3]),
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
        *(_capability(one, _lacking(diagnosis, one)) for one in _ranked(diagnosis)),
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
    for name, some in groups.items():
        tasks: dict[str, list[float]] = {}
        for rollout in some:
            tasks.setdefault(rollout.task.id, []).append(float(rollout.outcome == "passed"))
        rates = np.array([sum(trials) / len(trials) for trials in tasks.values()])
        low, high = Bootstrap(len(rates), 2000, 0.95, 0).interval(rates)
        rewards: dict[str, list[float]] = {}
        for rollout in some:
            rewards.setdefault(rollout.task.id, []).append(rollout.score.reward if rollout.score else 0.0)
        reward = mean(np.array([sum(trials) / len(trials) for trials in rewards.values()]))
        passed = sum(rollout.outcome == "passed" for rollout in some)
        rows.append(
            f"| {name} | {len(some)} | {len(tasks)} | {passed} | {mean(rates):.3f} | {low:.3f} to {high:.3f} "
            f"| {reward:.3f} |"
        )
    lines = ["## Outcomes", "\n".join(rows), *_repeated(scored)]
    return "\n\n".join(lines)


def _repeated(rollouts: Sequence[Rollout]) -> list[str]:
    """pass^k, where every task was played as often as every other and more than once."""
    trials: dict[str, list[float]] = {}
    for rollout in rollouts:
        trials.setdefault(rollout.task.id, []).append(float(rollout.outcome == "passed"))
    lengths = {len(one) for one in trials.values()}
    if len(lengths) != 1 or lengths == {1}:
        return []
    played = summarise(np.array([*trials.values()]))
    return [f"pass^{lengths.pop()} (all trials of a task pass): {mean(played.pass_k):.3f}."]


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
    found = {
        row.rollout: label
        for row in diagnosis.labels
        if (label := row.labels.get(capability.id)) is not None and label.verdict == "LACKING"
    }
    by_id = {rollout.id: rollout for rollout in diagnosis.contrasted}
    return [(by_id[name], found[name]) for name in capability.examples if name in found]


def _ranked(diagnosis: Diagnosis) -> list[Capability]:
    by_id = {candidate.id: candidate for candidate in diagnosis.candidates}
    return [by_id[row["id"]] for row in _rows(diagnosis)]


def _capability(capability: Capability, lacking: Sequence[tuple[Rollout, Label]]) -> str:
    lines = [f'## <a id="{capability.id.replace("_", "-")}"></a>{capability.name}', capability.description]
    if not lacking:
        return "\n\n".join([*lines, "No failed rollout lacks it; passed ones do."])
    items = []
    for rollout, label in lacking:
        at = "" if label.message is None else f", message {label.message}"
        quote = "" if label.message is None else _quoted(rollout.messages[label.message])
        items.append(f"- **{_name(rollout)}**{at}: {label.evidence}" + (f"\n  > {quote}" if quote else ""))
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
        reasons = Counter((one.source, one.reason) for one in diagnosis.logs.skipped)
        lines = [f"- {source}: {reason} ({number})" for (source, reason), number in reasons.items()]
        lines += [f"  - {one.source}, {one.where}" for one in diagnosis.logs.skipped]
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
        return "(" + ", ".join(f"{key} {_plain(one)}" for key, one in value.items() if one is not None) + ")"
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
