"""Advice on what to do next, most urgent first: the steps whose repair turns most failures into passes come first.

A line in the prompt reminds an agent of what it can do but forgets. It cannot teach computing, choosing or copying, and
it may cost elsewhere, which only a run shows. Training needs a contrast that holds, and tools to build an environment.
A contrast that does not hold yet needs more rollouts; the power of the comparison says how many.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from captrain.capabilities import KINDS, LEVEL, Association, CandidateAccount, name_of, prompt_line
from captrain.diagnosis.diagnosis import Account, Diagnosis
from captrain.diagnosis.findings import REFERENCE, Findings, Fix
from captrain.diagnosis.rollouts import Standing
from captrain.diagnosis.synthesis import Writer, possible_writers
from captrain.statistics import Design, tasks_needed

MARGIN = 0.02
"""Rates of 0 and 1 are replaced by rates this far from them: a test of two certain outcomes needs no power."""
TRAINED = "a line in the prompt does not repair this: train it"
ORDERS = 3
"""Most orders of calls that get a line."""


@dataclass(frozen=True)
class Advice:
    """What to do about a subject: a step to repair, a kind of cause, the benchmark or the simulator. A step to repair
    also has its counts (`facts`) and one quoted failure (`example`)."""

    subject: str
    action: str
    facts: str = ""
    example: str = ""


def advise(diagnosis: Diagnosis, folder: Path | None = None) -> list[Advice]:
    """Advise, most urgent first: steps to fix, faults that are not the agent's, then its causes as ranked.

    Args:
        diagnosis: of logs.
        folder: where the diagnosis is written, for the commands in the advice; None: nowhere yet.
    """
    account, findings = diagnosis.account, diagnosis.findings
    candidates = diagnosis.report["candidates"] if diagnosis.report else []
    selected = [entry["id"] for entry in candidates if entry["selected"]]
    writers = possible_writers(diagnosis) if selected else {}
    training = {name: _training(name, writers.get(name), folder) for name in selected}
    return [
        *(_about_fix(fix, account.failures, training) for fix in findings.fixes),
        *_about_faults(account),
        *(Advice(entry["id"], _about_cause(diagnosis, entry, training)) for entry in candidates),
        *_about_orders(findings, account),
        *_about_unexplained(account),
    ]


def _about_faults(account: Account) -> list[Advice]:
    """Advice on failures that the benchmark, the simulated user or the infrastructure caused."""
    actions: dict[str, tuple[Standing, str]] = {
        "benchmark": ("suspect", "check {} references in suspects.jsonl before you train anything: they may be wrong"),
        "simulator": ("spoilt", "repair the simulated user: it caused {} of {} failures"),
        "infrastructure": ("error", "repair the infrastructure: {} rollouts have no verdict"),
    }
    return [
        Advice(subject, action.format(account.standings[standing], account.failures))
        for subject, (standing, action) in actions.items()
        if account.standings[standing]
    ]


def _about_orders(findings: Findings, account: Account) -> list[Advice]:
    """Advice on orders of calls that correlate with failure and are no fix; without any fix, on the surest order."""
    subjects = {name_of(fix.key) for fix in findings.fixes}
    sure = [row for row in findings.order if row.p_holm <= LEVEL and not row.holds and row.name not in subjects]
    advice = [
        Advice(row.name, f'{_counts(row)}; a line in the prompt costs little: "{prompt_line(row.key)}"')
        for row in sure[:ORDERS]
    ]
    tested = [row for row in findings.order if row.p == row.p]
    if account.failures and not findings.fixes and tested:
        note = f"the strongest correlation, but it may be chance (p after Holm {tested[0].p_holm:.2g})"
        action = f"{_counts(tested[0])}: {note}; collect more rollouts to conclude"
        advice.append(Advice(tested[0].name, action))
    return advice


def _about_unexplained(account: Account) -> list[Advice]:
    if account.failures and account.unreferenced:
        action = (
            "bring the solutions of the tasks as `reference`, or let a language model read the dialogues with "
            "`--analyst openai`: without either, captrain can only say what correlates with failure"
        )
        return [Advice(f"{account.unreferenced} rollouts without a reference", action)]
    if account.unexplained:
        action = "let a language model read the dialogues with `--analyst openai`"
        return [Advice(f"{account.unexplained} unexplained failures", action)]
    return []


def _counts(row: Association) -> str:
    return "in {} of {} failed rollouts and {} of {} passed ones".format(*row.failed, *row.passed)


def _about_fix(fix: Fix, failures: int, training: Mapping[str, str]) -> Advice:
    cause = fix.causes.most_common(1)[0][0] if fix.causes else ""
    lines = [prompt_line(fix.key), KINDS[cause].line if cause else ""]
    if cause == "missing_lookup" and fix.key[0] in ("equal", "beyond") and fix.lookups:
        lines.insert(0, prompt_line(("after", fix.key[1], fix.lookups.most_common(1)[0][0])))
    line = next((line for line in lines if line), "")
    action = f'add to the prompt: "{line}"' if line else TRAINED
    if fix.key == REFERENCE:
        action = "read these references in suspects.jsonl and correct the wrong ones"
    elif cause in training:
        action += f"; if that is not enough, train {cause}{training[cause]}"
    kinds = " or ".join(f"{kind} ({number})" for kind, number in fix.kinds)
    facts = [
        f"{fix.counts['failures']} of {failures} failures, the only fault in {fix.counts['alone']}",
        f"proven by replay in {fix.counts['proven']}" if fix.counts["proven"] else "not proven by replay",
        f"usual cause: {cause}" if cause and cause not in fix.key else "",
        f"more frequent in tasks with {kinds}" if kinds else "",
    ]
    example = fix.example
    quotation = f"{example.quote} ({example.evidence})" if example.quote else example.evidence
    return Advice(
        name_of(fix.key), action, "; ".join(filter(None, facts)), f"{fix.place}, message {example.message}: {quotation}"
    )


def _about_cause(diagnosis: Diagnosis, entry: CandidateAccount, training: Mapping[str, str]) -> str:
    line, gap, passed = KINDS[entry["id"]].line, entry["gap"], entry["er_passed"]
    if entry["selected"]:
        first = f'first add to the prompt: "{line}"; if that is not enough, train it' if line else TRAINED
        return first + training[entry["id"]]
    reminder = f'; a line in the prompt costs little: "{line}"' if line else ""
    if gap is None or passed is None:
        return f"no passed rollout could have shown it: bring passed rollouts of such tasks{reminder}"
    if gap <= 0:
        return "leave it: passed rollouts show it as often as failed ones"
    # So many rollouts of each outcome detect this gap with power .8.
    base = min(max(passed, MARGIN), 1 - MARGIN)
    gap, count = min(gap, 1 - MARGIN - base), max(2, min(diagnosis.account.passed, diagnosis.account.failed))
    least = tasks_needed(Design(base=base, tasks=count, trials=1, icc=0.0, shared=0.0), gap) if gap > 0 else None
    if least is None:
        return f"no number of rollouts can separate this gap from chance{reminder}"
    if least <= count:
        return f"these rollouts show the gap, but it is below the thresholds of the selection{reminder}"
    return f"collect about {least - count} more passed and failed rollouts to conclude{reminder}"


def _training(name: str, writer: Writer | None, folder: Path | None) -> str:
    """How to get an environment for a cause: the command, where it would work."""
    if writer is None:
        return (
            " (an environment needs the tools' schemas, which these logs lack: add them to the logs as `tools`, or "
            "pass them with `--tools FILE` to `captrain synthesize`)"
        )
    command = f"captrain synthesize {name} --diagnosis {quote(str(folder or 'DIR'))} --out environments"
    if writer == "program":
        return f": `{command}`"
    return f"; a language model (its name in place of MODEL) writes the environment: `{command} --model MODEL`"
