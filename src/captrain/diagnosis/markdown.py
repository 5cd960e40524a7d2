"""The report of a diagnosis in Markdown: outcomes, causes, the contrast, what to do, each failure, what is left out."""

import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from captrain.capabilities import LACKING, PRESENT, SUSPECT
from captrain.config import redacted
from captrain.contract import calls_of
from captrain.diagnosis.advice import Advice
from captrain.diagnosis.cause import KINDS
from captrain.diagnosis.diagnosis import LIST_LENGTH, Diagnosis, shares
from captrain.diagnosis.explained import Explained
from captrain.diagnosis.figures import figure_line
from captrain.records import Message, as_markdown

QUOTED = 240
"""Characters quoted of a message."""

METHOD = """\
## How this was made

captrain {version}. Each rollout is held against the reference that came with the log, the policy and the records that
tools returned, by rules that do not know its outcome. The *primary* cause of a failure is the earliest that is found;
what the log does not prove stays unexplained. A reference that policy, records or the log itself contradict is suspect,
and its rollouts are {treatment}. *Gap*: share of rollouts with the cause among failed minus among passed ones, of
those that had occasion to show it; *coverage*: share of all failed rollouts that show it. Intervals by bootstrap over
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
        _outcomes(diagnosis),
        _causes(diagnosis),
        _agents(diagnosis),
        _ranking(diagnosis),
        _advice(advice),
        _suspect_references(diagnosis),
        _failures(diagnosis),
        _left_out(diagnosis),
        _sources(diagnosis),
        _method(diagnosis),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(header: str, rows: list[str]) -> str:
    columns = header.count("|") - 1
    return "\n".join([header, "|" + "---|" * columns, *rows])


def _outcomes(diagnosis: Diagnosis) -> str:
    """Rollouts and pass rates by environment and agent. Those of logs are of every rollout that has a verdict, faults
    of the simulated user included: the contrast leaves them out, the rate must not."""
    tally = diagnosis.explanations.outcomes
    agents = tally.agents()
    rows = [
        f"| {words(row.environment)} |{f' {words(agent)} |' if agent else ''} {row.rollouts} | {row.tasks} "
        f"| {row.passed} | {row.rate:.3f} | {row.low:.3f} to {row.high:.3f} | {row.reward:.3f} |"
        for agent in (agents if len(agents) > 1 else [None])
        for row in tally.environments(agent)
    ]
    agent_column = " agent |" if len(agents) > 1 else ""
    header = (
        f"| environment |{agent_column} rollouts | tasks | passed | pass rate | 95% interval over tasks | mean reward |"
    )
    repeated = tally.repeated() if len(agents) < 2 else None
    share = [f"pass^{repeated[0]} (all trials of a task pass): {repeated[1]:.3f}."] if repeated else []
    return "\n\n".join(["## Outcomes", _table(header, rows), *share, *_paired(diagnosis)])


def _paired(diagnosis: Diagnosis) -> list[str]:
    """Agents two by two, over the tasks that both played."""
    tally = diagnosis.explanations.outcomes
    agents, lines = tally.agents(), list[str]()
    for place_of_first, first in enumerate(agents):
        for second in agents[place_of_first + 1 :]:
            if difference := tally.difference(first, second):
                tasks, mean, low, high = difference
                lines.append(
                    f"- {words(first)} minus {words(second)}: {mean:+.3f} ({low:+.3f} to {high:+.3f}), {tasks} tasks "
                    "of both"
                )
    return ["Pass rates paired by task, with 95% intervals:\n\n" + "\n".join(lines)] if lines else []


def _causes(diagnosis: Diagnosis) -> str:
    failures = diagnosis.account.failures
    rows = [
        f"| {KINDS[kind].name}{'' if KINDS[kind].of_agent else ' (not the agent)'} | {tally.primary} "
        f"| {tally.primary / failures if failures else 0:.2f} | {tally.secondary} | {tally.passed} |"
        for kind, tally in shares(diagnosis.account)
    ]
    if not rows:
        return ""
    header = "| cause | primary in | share of failures | secondary in | passed rollouts with it |"
    rows.append(f"| unexplained | {diagnosis.account.unexplained} | | | |")
    return "\n\n".join(["## Causes", _table(header, rows)])


def _agents(diagnosis: Diagnosis) -> str:
    """What one agent shows and another does not: never pooled."""
    if len(diagnosis.agents) < 2:
        return ""
    accounts = diagnosis.agents
    header = f"| cause | {' | '.join(map(words, accounts))} |"
    rows = [
        f"| {KINDS[kind].name} | "
        + " | ".join(
            f"{account.causes[kind].primary} of {account.failures}"
            if kind in account.causes
            else f"0 of {account.failures}"
            for account in accounts.values()
        )
        + " |"
        for kind, _ in shares(diagnosis.account)
    ]
    return "\n\n".join(["## Agents, by the primary cause of their failures", _table(header, rows)])


def ranking_rows(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """The rows of the ranking as text; undefined numbers as a dash."""
    rows = []
    for candidate in diagnosis.report["candidates"] if diagnosis.report else []:
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
                "verdict": "selected" if candidate["selected"] else candidate["reason"],
            }
        )
    return rows


def _exercised(diagnosis: Diagnosis, kind: str, *, failed: bool) -> str:
    """Of the failed or passed rollouts that had occasion to show the cause, how many do."""
    assert diagnosis.labels is not None
    row = [candidate.id for candidate in diagnosis.labels.candidates].index(kind)
    lacking, present = (diagnosis.labels.verdicts.count(row, code, failed) for code in (LACKING, PRESENT))
    return f"{lacking} of {lacking + present}"


def _ranking(diagnosis: Diagnosis) -> str:
    rows = ranking_rows(diagnosis)
    if not rows:
        return ""
    keys = ("name", "gap", "interval", "coverage", "failed", "passed", "verdict")
    lines = [f"| {' | '.join(row[key] for key in keys)} |" for row in rows]
    header = "| cause | gap | 95% interval | coverage | among failed | among passed | verdict |"
    return "\n\n".join([f"## Causes by {order(diagnosis)}", _table(header, lines), figure_line()])


def order(diagnosis: Diagnosis) -> str:
    """What the ranking goes by, in words."""
    ranking = diagnosis.report["thresholds"].get("ranking", "product") if diagnosis.report else "product"
    return {"product": "coverage x gap", "mean_gap": "mean gap of the runs"}.get(ranking, ranking)


def _advice(advice: Sequence[Advice]) -> str:
    lines = [f"- **{entry.subject}**: {entry.action}" for entry in advice]
    return "\n\n".join(["## What to do next", "\n".join(lines)]) if lines else ""


def _suspect_references(diagnosis: Diagnosis) -> str:
    """The references that something speaks against, with all that does."""
    rows = diagnosis.account.left_out.get("suspect", [])
    lines = [
        f"- **{words(place(row.task, row.trial))}** ({row.outcome}): {words('; '.join(row.suspicions))}" for row in rows
    ]
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
    primary, rollout = row.primary, words(place(row.task, row.trial))
    is_remarkable = row.standing == "suspect" and (primary is None or primary.cause != SUSPECT)
    remark = " (its reference is suspect)" if is_remarkable else ""
    if primary is None:
        return [f"- **{rollout}**: unexplained{remark}"]
    remark = f"{' (medium confidence)' if primary.confidence == 'medium' else ''}{remark}"
    head = f"- **{rollout}**, message {primary.message}, {primary.cause}{remark}: {words(primary.evidence)}"
    lines = [head, f"  > {words(_quoted(messages[primary.message]))}"] if primary.message < len(messages) else [head]
    secondary = [f"{cause.cause} (message {cause.message}: {words(cause.evidence)})" for cause in row.secondary]
    return [*lines, *(f"  - also {cause}" for cause in secondary)]


def _quoted(message: Message) -> str:
    calls = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls_of(message)
    ]
    text = " ".join(" ".join([str(message.get("content") or ""), *calls]).split())
    return f"{message['role']}: {text if len(text) <= QUOTED else text[:QUOTED] + ' ...'}"


def _left_out(diagnosis: Diagnosis) -> str:
    """Rollouts that were read but say nothing of the agent, and what could not be read."""
    account, logs = diagnosis.account, diagnosis.logs
    parts = []
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
    """Text of the logs in one line of the page: no markup, no sign that a terminal obeys, no key. An underscore within
    a word is none, and identifiers are full of them."""
    return re.sub(r"(?<=\w)\\_(?=\w)", "_", as_markdown(redacted(" ".join(text.split()))))


def _method(diagnosis: Diagnosis) -> str:
    if diagnosis.report is None:
        return ""
    treatment = "kept all the same" if diagnosis.keeps_suspects else "left out of the contrast"
    return METHOD.format(version=version("captrain"), treatment=treatment, **diagnosis.report["thresholds"])


def place(task: str, trial: int) -> str:
    """A rollout by its task, and its trial where there are several."""
    return f"{task}, trial {trial}" if trial else task


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
