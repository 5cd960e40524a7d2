"""One list of advice: what the agent does wrong, most frequent first, then everything else.

The terminal, report.md and report.html print this list. All advice is in it. A line in the prompt reminds an agent of
what it can do but forgets. It cannot teach computing, choosing or copying, and it may do harm elsewhere, which only a
run shows. Training needs a cause that the selection accepts, and the schemas of the tools. Advice never recommends a
change only because it correlates with passing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from captrain.capabilities import CAUSES, CandidateAccount, prompt_line, titled
from captrain.diagnosis.diagnosis import FEW, Account, Diagnosis
from captrain.diagnosis.findings import REFERENCE, Fix
from captrain.diagnosis.rollouts import Standing
from captrain.diagnosis.synthesis import Writer, possible_writers
from captrain.records import counted
from captrain.statistics import Design, tasks_needed

MARGIN = 0.02
"""Rates of 0 and 1 are replaced by rates this far from them: a test of two certain outcomes needs no power."""
MISTAKES = {
    "made": "does not call {0}",
    "equal": "calls {0} with the wrong {1}",
    "instead": "makes another call instead of {0}",
    "beyond": "calls {0} where it should not",
    "told": "does not tell {0}",
    "ended": "ends too early",
    "order": "{0}",
    "suspect": "is scored against {0}",
}
"""What the agent does, by the kind of step that is to be repaired."""
CHECK_REFERENCES = "check these references in suspects.jsonl before you train anything, and correct the wrong ones"


@dataclass(frozen=True)
class Advice:
    """What the agent does wrong, or what else is wrong, and what to do.

    subject: what the agent does wrong as a verb phrase, such as "leaves out an operation", or a sentence on something
    else. actions: what to do, in order. command: to be typed, "" if there is none. facts: counts of a fault of the
    agent, "" for other subjects. cause: id and title of the most frequent cause of these failures, "" if none.
    example: a failure with it.
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
        line = next((line for line in (*lines, CAUSES[cause].prompt_line if cause else "") if line), "")
        actions = [f'add to the prompt: "{line}"'] if line else []
        if cause not in self.training or not is_new:
            return actions, ""
        how, command = self.training[cause]
        start = "if that is not enough, train" if line else "train"
        return [*actions, f"{start} {titled(cause)}{how}"], command


def advise(diagnosis: Diagnosis, folder: Path | None = None) -> list[Advice]:
    """List the advice: steps to fix, the remaining causes, then faults outside of the agent and unexplained failures.

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
    is_named = any(fix.key == REFERENCE for fix in diagnosis.findings.fixes)
    return [*fixes, *others, *_about_faults(account, is_named), *_about_unexplained(account)]


def _about_faults(account: Account, is_named: bool) -> list[Advice]:
    """Advice on failures that the benchmark, the simulated user, the harness or the infrastructure caused.

    is_named: the steps to fix name the suspect references already.
    """
    numbers, failures = account.standings, counted(account.failures, "failure")
    suspects, errors = counted(numbers["suspect"], "rollout"), counted(numbers["error"], "rollout")
    faults: list[tuple[Standing, str, str]] = [
        ("suspect", f"References of {suspects} are suspect", CHECK_REFERENCES),
        ("spoilt", f"The simulated user spoilt {numbers['spoilt']} of {failures}", "repair the simulated user"),
        (
            "limit",
            f"A limit of steps, time or tokens stopped {numbers['limit']} of {failures}",
            "raise the limit, and play these tasks again",
        ),
        ("error", f"An error stopped {errors}", "repair the infrastructure, and play these tasks again"),
    ]
    return [
        Advice(subject, [action])
        for standing, subject, action in faults
        if numbers[standing] and not (is_named and standing == "suspect")
    ]


def _about_unexplained(account: Account) -> list[Advice]:
    if account.failures and account.unreferenced:
        actions = [
            "add the solution of each task to the logs as `reference`, or let a language model read the dialogues with "
            "`--analyst openai`",
            "without either, captrain can only say what correlates with failure",
        ]
        return [Advice(f"No reference in {counted(account.unreferenced, 'rollout')}", actions)]
    if account.unexplained:
        subject = f"Unexplained: {account.unexplained} of {counted(account.failures, 'failure')}"
        return [Advice(subject, ["let a language model read the dialogues with `--analyst openai`"])]
    return []


def mistake_of(fix: Fix) -> str:
    """Describe what the agent does wrong at a step, with up to one other step of the same failures."""
    keys = [fix.key, *fix.with_same_failures]
    mistakes = [CAUSES[key[1]].mistake if key[0] == "cause" else MISTAKES[key[0]].format(*key[1:]) for key in keys]
    return ", and ".join(mistakes[:2]) + (f", and {len(mistakes) - 2} more" if len(mistakes) > 2 else "")


def _about_fix(fix: Fix, failures: int, remedies: _Remedies) -> Advice:
    cause = fix.causes.most_common(1)[0][0] if fix.causes else ""
    lines = [prompt_line(fix.key)]
    if cause == "missing_lookup" and fix.key[0] in ("equal", "beyond") and fix.lookups:
        lines.insert(0, prompt_line(("after", fix.key[1], fix.lookups.most_common(1)[0][0])))
    kinds = [f"{number} in tasks {kind}" for kind, number in fix.kinds]
    passed = counted(fix.counts["passed"], "passed rollout")
    counts = f"{fix.counts['failures']} of {counted(failures, 'failure')}, {passed}"
    facts = [
        counts,
        f"the only fault in {fix.counts['alone']}" if fix.counts["alone"] else "",
        f"proven by replay in {fix.counts['proven']}" if fix.counts["proven"] else "not proven by replay",
        *kinds,
    ]
    example, summary = fix.example, "; ".join(filter(None, facts))
    if fix.key == REFERENCE:
        return Advice(mistake_of(fix), [CHECK_REFERENCES], "", summary, "", f"{fix.place}: {example.evidence}")
    quotation = f"{example.evidence}; {example.quote}" if example.quote else example.evidence
    place = f"{fix.place}, message {example.message}: {quotation}"
    actions, command = remedies.of(cause, lines)
    # `mistake_of` names one other step of the same failures, so its line is given, too.
    other = next((line for key in fix.with_same_failures[:1] if (line := prompt_line(key)) and any(lines)), "")
    actions[1:1] = [f'and: "{other}"'] if other and other not in lines else []
    return Advice(mistake_of(fix), actions, command, summary, titled(cause) if cause else "", place)


def _about_cause(account: Account, entry: CandidateAccount, remedies: _Remedies) -> Advice:
    name, failures = entry["id"], counted(account.failures, "failure")
    tally, example = account.causes.get(name), ""
    if tally is None:
        facts = f"in {entry['coverage'] or 0:.0%} of the failed rollouts"
    elif tally.primary:
        facts = f"the primary cause of {tally.primary} of {failures}"
        facts += f", a secondary cause of {tally.secondary} more" if tally.secondary else ""
    else:
        facts = f"a secondary cause of {tally.secondary} of {failures}"
    if tally and tally.example and (first := tally.example.primary):
        example = f"{tally.example.place}, message {first.message}: {first.evidence}"
    actions, command = remedies.of(name, []) if entry["selected"] else (_open_question(account, entry), "")
    return Advice(CAUSES[name].mistake, actions, command, facts, titled(name), example)


def _open_question(account: Account, entry: CandidateAccount) -> list[str]:
    """List what to do about a cause that was not selected."""
    gap, passed, line = entry["gap"], entry["er_passed"], CAUSES[entry["id"]].prompt_line
    reminder = [f'a line in the prompt costs little: "{line}"'] if line else []
    if gap is None or passed is None:
        return ["add passed rollouts of such tasks to the logs: there are none to compare with", *reminder]
    if gap <= 0:
        return ["leave it: passed rollouts show it as often as failed ones"]
    # So many rollouts of each outcome detect this gap with power .8.
    base = min(max(passed, MARGIN), 1 - MARGIN)
    gap, count = min(gap, 1 - MARGIN - base), max(2, min(account.passed, account.failed))
    least = tasks_needed(Design(base=base, tasks=count, trials=1, icc=0.0, shared=0.0), gap) if gap > 0 else None
    if least is None:
        return ["leave it: even many more rollouts could not tell this gap from chance", *reminder]
    least = max(least, FEW)  # fewer conclude nothing, however large the gap is
    if least <= count:
        return [f"no training yet: {entry['reason']}", *reminder]
    return [f"too few rollouts to conclude: collect {least - count:,} more that pass and as many that fail", *reminder]


def _training(name: str, writer: Writer | None, folder: Path | None) -> tuple[str, str]:
    """Return what else an environment for a cause needs, and the command that makes it."""
    command = f"captrain synthesize {name} --diagnosis {quote(str(folder or 'DIR'))} --out environments"
    if writer == "program":
        return "", command
    model = "MODEL: the language model that writes the environment"
    if writer == "model":
        return f". {model}", f"{command} --model MODEL"
    schemas = "FILE: a JSON list of your tools' schemas, which the logs lack"
    return f". {schemas}. {model}", f"{command} --tools FILE --model MODEL"
