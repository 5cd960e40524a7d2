"""Advice on what to do next: steps whose repair would have turned most failures into passes, then all else, in order.

A line in the prompt can remind an agent of what it can do and forgets; it cannot teach it to compute, to choose or to
copy, and it may cost elsewhere, which only a run shows. Training needs a contrast that holds and tools to build an
environment of; a contrast that does not hold yet needs more rollouts, and how many, the power of the comparison says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from captrain.capabilities import KINDS, LEVEL, Association, CandidateAccount, name_of, prompt_line
from captrain.diagnosis.diagnosis import Diagnosis
from captrain.diagnosis.findings import REFERENCE, Fix
from captrain.diagnosis.synthesis import Writer, possible_writers
from captrain.statistics import Design, tasks_needed

MARGIN = 0.02
"""Rates of 0 and 1 are taken as this far from them: a test of two certain outcomes needs no power."""
TRAINED = "words do not repair it: train it"
ORDERS = 3
"""Orders of calls that get a line."""


@dataclass(frozen=True)
class Advice:
    """Advice, and its subject: a step to repair, a kind of cause, the benchmark or the
    simulator. Of a step, the counts (`facts`) and one failure, quoted (`example`)."""

    subject: str
    action: str
    facts: str = ""
    example: str = ""


def advise(diagnosis: Diagnosis, folder: Path | None = None) -> list[Advice]:
    """Advise, most urgent first: what to fix, what is not the agent's, then its causes in the order of the ranking.

    Args:
        diagnosis: of logs.
        folder: that it is written to, for commands that read it; None: nowhere yet.
    """
    account, findings = diagnosis.account, diagnosis.findings
    candidates = diagnosis.report["candidates"] if diagnosis.report else []
    selected = [entry["id"] for entry in candidates if entry["selected"]]
    writers = possible_writers(diagnosis) if selected else {}
    training = {name: _training(name, writers.get(name), folder) for name in selected}
    advice = [_about_fix(fix, account.failures, training) for fix in findings.fixes]
    suspects, spoilt, errors = (account.standings[standing] for standing in ("suspect", "spoilt", "error"))
    faults = {
        "benchmark": (
            suspects,
            f"suspect the benchmark: read the {suspects} references in suspects.jsonl before anything is trained",
        ),
        "simulator": (spoilt, f"repair the simulated user: it spoilt {spoilt} of {account.failures} failures"),
        "infrastructure": (errors, f"repair what the agent runs on: {errors} rollouts have no verdict"),
    }
    advice += [Advice(subject, action) for subject, (number, action) in faults.items() if number]
    advice += [Advice(entry["id"], _about_cause(diagnosis, entry, training)) for entry in candidates]
    # Orders of calls that go with failing and are no fix already; for want of fixes the surest, which may be luck.
    subjects = {name_of(fix.key) for fix in findings.fixes}
    orders = [row for row in findings.order if row.p_holm <= LEVEL and not row.holds and row.name not in subjects]
    actions = [(row, f'a line in the prompt costs little: "{prompt_line(row.key)}"') for row in orders[:ORDERS]]
    advice += [Advice(row.name, f"{_counts(row)}; {action}") for row, action in actions]
    for row in [row for row in findings.order if row.p == row.p][:1] if account.failures and not findings.fixes else ():
        action = f"the surest order of calls, but luck may bring it about (p, Holm {row.p_holm:.2g})"
        advice.append(Advice(row.name, f"{_counts(row)}: {action}; collect more rollouts to conclude"))
    if account.failures and account.unreferenced:
        action = (
            "bring the solutions of the tasks as `reference`, or let a language model read the dialogues by "
            "`--analyst openai`: without either only what a log shows by itself and what goes with failing can be told"
        )
        advice.append(Advice(f"{account.unreferenced} rollouts without a reference", action))
    elif account.unexplained:
        action = "let a language model read the dialogues by `--analyst openai`"
        advice.append(Advice(f"{account.unexplained} unexplained failures", action))
    return advice


def _counts(row: Association) -> str:
    return "in {} of {} failed rollouts and {} of {} passed ones".format(*row.failed, *row.passed)


def _about_fix(fix: Fix, failures: int, training: Mapping[str, str]) -> Advice:
    causes = [cause for cause, _ in fix.causes.most_common(1)]
    is_skipped = causes == ["missing_lookup"] and fix.key[0] in ("equal", "beyond")
    skipped = [tool for tool, _ in fix.lookups.most_common(1)] if is_skipped else []
    orders = [prompt_line(("after", fix.key[1], tool)) for tool in skipped]
    lines = [line for line in (*orders, prompt_line(fix.key), *(KINDS[cause].line for cause in causes)) if line]
    action = f'a line in the prompt: "{lines[0]}"' if lines else TRAINED
    if fix.key == REFERENCE:
        action = "read these references in suspects.jsonl, and correct those that are wrong"
    elif causes and causes[0] in training:
        action += f"; if it is not enough, train {causes[0]}{training[causes[0]]}"
    proof = f"proven by replay in {fix.counts['proven']}" if fix.counts["proven"] else "not proven"
    facts = [f"in {fix.counts['failures']} of {failures} failures, alone in {fix.counts['alone']} ({proof})"]
    facts += [f"mostly {causes[0]}"] if causes and causes[0] not in fix.key else []
    facts += [f"above all where {' or '.join(f'{kind} ({number})' for kind, number in fix.kinds)}"] if fix.kinds else []
    example = fix.example
    quotation = f"{example.quote} ({example.evidence})" if example.quote else example.evidence
    return Advice(name_of(fix.key), action, "; ".join(facts), f"{fix.place}, message {example.message}: {quotation}")


def _about_cause(diagnosis: Diagnosis, entry: CandidateAccount, training: Mapping[str, str]) -> str:
    line, gap, passed = KINDS[entry["id"]].line, entry["gap"], entry["er_passed"]
    if entry["selected"]:
        reminder = f'try a line in the prompt first: "{line}"; if it is not enough, train it' if line else TRAINED
        return f"{reminder}{training[entry['id']]}"
    reminder = f'; a line in the prompt costs little: "{line}"' if line else ""
    if gap is None or passed is None:
        return f"no passed rollout had occasion to show it: bring passed rollouts of such tasks{reminder}"
    if gap <= 0:
        return "leave it: passed rollouts show it as often as failed ones"
    # So many rollouts of each outcome tell this gap from none, on 8 in 10 occasions.
    base = min(max(passed, MARGIN), 1 - MARGIN)
    gap, count = min(gap, 1 - MARGIN - base), max(2, min(diagnosis.account.passed, diagnosis.account.failed))
    least = tasks_needed(Design(base=base, tasks=count, trials=1, icc=0.0, shared=0.0), gap) if gap > 0 else None
    if least is None:
        return f"no number of rollouts will tell this gap from luck{reminder}"
    if least <= count:
        return f"real, as far as these rollouts tell, but below the thresholds of the selection{reminder}"
    return f"collect about {least - count} more passed and failed rollouts to conclude{reminder}"


def _training(name: str, writer: Writer | None, folder: Path | None) -> str:
    """Return the words on how to get an environment for a cause: the command to type, where it would work."""
    if writer is None:
        return (
            " (an environment needs the tools' schemas, which these logs do not hold: bring them as `tools`, or by "
            "`--tools FILE` to `captrain synthesize`)"
        )
    command = f"captrain synthesize {name} --diagnosis {quote(str(folder or 'DIR'))} --out environments"
    if writer == "program":
        return f": `{command}`"
    return f", where a language model writes the environment (MODEL: its name): `{command} --model MODEL`"
