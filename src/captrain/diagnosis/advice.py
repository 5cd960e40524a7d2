"""One list of advice, most urgent first: the agent's most frequent faults, then everything else.

The terminal, report.md and report.html print this list. All advice is in it. A line in the prompt
reminds an agent of what it can do but forgets. It cannot teach computing, choosing or copying, and it may cost
elsewhere, which only a run shows. Training needs a contrast that holds, and tools to build an environment. Advice never
recommends a change only because it correlates with passing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from captrain.capabilities import CAUSES, CandidateAccount, prompt_line
from captrain.diagnosis.diagnosis import Account, Diagnosis
from captrain.diagnosis.findings import REFERENCE, Fix
from captrain.diagnosis.rollouts import Standing
from captrain.diagnosis.synthesis import Writer, possible_writers
from captrain.records import counted
from captrain.statistics import Design, tasks_needed

MARGIN = 0.02
"""Rates of 0 and 1 are replaced by rates this far from them: a test of two certain outcomes needs no power."""
DEEDS = {
    "made": "does not call {0}",
    "equal": "calls {0} with the wrong {1}",
    "instead": "makes another call instead of {0}",
    "beyond": "calls {0} where it should not",
    "told": "does not tell {0}",
    "ended": "ends too early",
    "order": "shows this pattern of calls: {0}",
    "suspect": "is judged by {0}",
}
"""What the agent does, by the kind of step that is to be repaired."""


@dataclass(frozen=True)
class Advice:
    """What to do about a step to repair, a cause, the benchmark or the simulated user.

    actions: what to do, in order. command: to be typed, "" if there is none. facts: counts of a step to repair, "" for
    other subjects. cause: id and title of the most frequent cause of these failures, "" if none. example: a failure
    with it.
    """

    subject: str
    actions: list[str]
    command: str = ""
    facts: str = ""
    cause: str = ""
    example: str = ""


@dataclass
class _Remedies:
    """What to do about each cause; each remedy appears once in the list.

    training: for each selected cause, why or how an environment can be made, and the command.
    """

    training: Mapping[str, tuple[str, str]]
    named: set[str] = field(default_factory=set[str])

    def of(self, cause: str, lines: Sequence[str]) -> tuple[list[str], str]:
        """Actions and command against a cause: a line for the prompt if there is one, then training if selected."""
        is_new = cause not in self.named
        self.named.add(cause)
        line = next((line for line in (*lines, CAUSES[cause].line if cause else "") if line), "")
        actions = [f'add to the prompt: "{line}"'] if line else []
        if cause not in self.training or not is_new:
            return actions, ""
        how, command = self.training[cause]
        start = "if that is not enough, train" if line else "train"
        return [*actions, f"{start} {titled(cause)}{how}"], command


def titled(cause: str) -> str:
    """A cause by id and title."""
    return f"{cause} ({CAUSES[cause].name})"


def advise(diagnosis: Diagnosis, folder: Path | None = None) -> list[Advice]:
    """List the advice, most urgent first: steps to fix, faults outside of the agent, then the remaining causes.

    Args:
        diagnosis: of logs.
        folder: where the diagnosis is written, for the commands in the advice; None: nowhere yet.
    """
    account = diagnosis.account
    candidates = diagnosis.report["candidates"] if diagnosis.report else []
    selected = [entry["id"] for entry in candidates if entry["selected"]]
    writers = possible_writers(diagnosis) if selected else {}
    remedies = _Remedies({name: _training(name, writers.get(name), folder) for name in selected})
    fixes = [_about_fix(fix, account.failures, remedies) for fix in diagnosis.findings.fixes]
    # Other candidates appear only in the ranking.
    graded = [entry for entry in candidates if entry["id"] in account.causes or entry["selected"]]
    others = [_about_cause(account, entry, remedies) for entry in graded if entry["id"] not in remedies.named]
    return [*fixes, *_about_faults(account), *others, *_about_unexplained(account)]


def _about_faults(account: Account) -> list[Advice]:
    """Advice on failures that the benchmark, the simulated user, the harness or the infrastructure caused."""
    numbers, failures = account.standings, counted(account.failures, "failure")
    suspects, errors = counted(numbers["suspect"], "reference"), counted(numbers["error"], "rollout")
    actions: dict[str, tuple[Standing, str]] = {
        "benchmark": ("suspect", f"check {suspects} in suspects.jsonl before you train anything: they may be wrong"),
        "simulator": ("spoilt", f"repair the simulated user: it caused {numbers['spoilt']} of {failures}"),
        "limit of steps, time or tokens": ("limit", f"raise it: it stopped {numbers['limit']} of {failures}"),
        "infrastructure": ("error", f"repair the infrastructure: {errors} without a verdict"),
    }
    return [Advice(subject, [action]) for subject, (standing, action) in actions.items() if numbers[standing]]


def _about_unexplained(account: Account) -> list[Advice]:
    if account.failures and account.unreferenced:
        action = (
            "bring the solutions of the tasks as `reference`, or let a language model read the dialogues with "
            "`--analyst openai`: without either, captrain can only say what correlates with failure"
        )
        return [Advice(f"{counted(account.unreferenced, 'rollout')} without a reference", [action])]
    if account.unexplained:
        action = "let a language model read the dialogues with `--analyst openai`"
        return [Advice(counted(account.unexplained, "unexplained failure"), [action])]
    return []


def deed_of(fix: Fix) -> str:
    """Describe what the agent does wrong at a step, with up to one other step of the same failures."""
    keys = [fix.key, *fix.halves]
    deeds = [CAUSES[key[1]].deed if key[0] == "cause" else DEEDS[key[0]].format(*key[1:]) for key in keys]
    return ", and ".join(deeds[:2]) + (f", and {len(deeds) - 2} more" if len(deeds) > 2 else "")


def _about_fix(fix: Fix, failures: int, remedies: _Remedies) -> Advice:
    cause = fix.causes.most_common(1)[0][0] if fix.causes else ""
    lines = [prompt_line(fix.key)]
    if cause == "missing_lookup" and fix.key[0] in ("equal", "beyond") and fix.lookups:
        lines.insert(0, prompt_line(("after", fix.key[1], fix.lookups.most_common(1)[0][0])))
    if fix.key == REFERENCE:
        actions, command = ["read these references in suspects.jsonl and correct the wrong ones"], ""
    else:
        actions, command = remedies.of(cause, lines)
    kinds = [f"{number} in tasks with {kind.replace(': ', ' ', 1)}" for kind, number in fix.kinds]
    passed = counted(fix.counts["passed"], "passed rollout")
    counts = f"{fix.counts['failures']} of {counted(failures, 'failure')}, {passed}"
    facts = [
        counts,
        f"the only fault in {fix.counts['alone']}" if fix.counts["alone"] else "",
        f"proven by replay in {fix.counts['proven']}" if fix.counts["proven"] else "not proven by replay",
        *kinds,
    ]
    example = fix.example
    quotation = f"{example.quote} ({example.evidence})" if example.quote else example.evidence
    place = f"{fix.place}, message {example.message}: {quotation}"
    named = titled(cause) if cause else ""
    return Advice(deed_of(fix), actions, command, "; ".join(filter(None, facts)), named, place)


def _about_cause(account: Account, entry: CandidateAccount, remedies: _Remedies) -> Advice:
    name, gap, passed = entry["id"], entry["gap"], entry["er_passed"]
    subject, tally, facts, example = CAUSES[name].deed, account.causes.get(name), "", ""
    if tally:
        facts = f"{tally.primary} of {counted(account.failures, 'failure')}"
        facts += f"; a further fault in {tally.secondary} more" if tally.secondary else ""
        if tally.example and (first := tally.example.primary):
            example = f"{tally.example.place}, message {first.message}: {first.evidence}"
    if entry["selected"]:
        return Advice(subject, *remedies.of(name, []), facts, titled(name), example)
    actions = _open_question(account, gap, passed, CAUSES[name].line)
    return Advice(subject, actions, facts=facts, cause=titled(name), example=example)


def _open_question(account: Account, gap: float | None, passed: float | None, line: str) -> list[str]:
    """List what to do about a cause that was not selected."""
    reminder = [f'a line in the prompt costs little: "{line}"'] if line else []
    if gap is None or passed is None:
        return ["bring passed rollouts of such tasks: these logs have none to compare with", *reminder]
    if gap <= 0:
        return ["leave it: passed rollouts show it as often as failed ones"]
    # So many rollouts of each outcome detect this gap with power .8.
    base = min(max(passed, MARGIN), 1 - MARGIN)
    gap, count = min(gap, 1 - MARGIN - base), max(2, min(account.passed, account.failed))
    least = tasks_needed(Design(base=base, tasks=count, trials=1, icc=0.0, shared=0.0), gap) if gap > 0 else None
    if least is None:
        return ["leave it open: this gap is too small to tell from chance with any number of rollouts", *reminder]
    if least <= count:
        return ["these rollouts show the gap, but it is below the thresholds of the selection", *reminder]
    return [f"too few rollouts to conclude: collect {least - count} more that pass and as many that fail", *reminder]


def _training(name: str, writer: Writer | None, folder: Path | None) -> tuple[str, str]:
    """Return how to make an environment for a cause, and the command ("" if it cannot work yet)."""
    if writer is None:
        return (
            "; an environment needs the tools' schemas, which these logs lack: add them to the logs as `tools`, or "
            "pass them with `--tools FILE` to `captrain synthesize`"
        ), ""
    command = f"captrain synthesize {name} --diagnosis {quote(str(folder or 'DIR'))} --out environments"
    if writer == "program":
        return "", command
    return "; a language model (its name in place of MODEL) writes the environment", f"{command} --model MODEL"
