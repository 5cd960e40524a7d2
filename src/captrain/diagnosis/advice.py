"""What to do next, cause by cause: the shortest honest advice.

A line in the prompt can remind an agent of what it can do and forgets; it cannot teach it to compute, to choose or to
copy, and it may cost elsewhere, which only a run shows. Training needs a contrast that holds and tools to build an
environment of; a contrast that does not hold yet needs more rollouts, and how many, the power of the comparison says.
"""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from captrain.capabilities import CandidateAccount
from captrain.diagnosis.cause import KINDS
from captrain.diagnosis.diagnosis import Diagnosis
from captrain.diagnosis.synthesis import Writer, diagnosed_evidence, possible_writers
from captrain.execution import COMPUTING, has_package
from captrain.planning import Design, tasks_needed

MARGIN = 0.02
"""Rates of 0 and 1 are taken as this far from them: a test of two certain outcomes needs no power."""
TRAINED = "words do not repair it: train it"
ENVIRONMENTS = "environments"
"""Folder of environments, in the command that makes one."""


@dataclass(frozen=True)
class Advice:
    """What to do about something, and what it is about: a kind of cause, the benchmark or the simulator."""

    subject: str
    action: str


def advise(diagnosis: Diagnosis, folder: Path | None = None) -> list[Advice]:
    """What to do, most urgent first: what is not the agent's, then its causes in the order of the ranking.

    Args:
        diagnosis: of logs.
        folder: that it is written to, for commands that read it; None: nowhere yet.
    """
    account, advice = diagnosis.account, list[Advice]()
    if suspects := account.standings["suspect"]:
        action = f"suspect the benchmark: read the {suspects} references in suspects.jsonl before anything is trained"
        advice.append(Advice("benchmark", action))
    if spoilt := account.standings["spoilt"]:
        advice.append(
            Advice("simulator", f"repair the simulated user: it spoilt {spoilt} of {account.failures} failures")
        )
    if errors := account.standings["error"]:
        advice.append(Advice("infrastructure", f"repair what the agent runs on: {errors} rollouts have no verdict"))
    candidates = diagnosis.report["candidates"] if diagnosis.report else []
    is_selected = any(entry["selected"] for entry in candidates)
    writers = possible_writers(diagnosed_evidence(diagnosis)) if is_selected else {}
    for entry in candidates:
        training = _training(entry["id"], writers.get(entry["id"]), folder)
        advice.append(Advice(entry["id"], _about_cause(diagnosis, entry, training)))
    return advice


def _about_cause(diagnosis: Diagnosis, entry: CandidateAccount, training: str) -> str:
    line = KINDS[entry["id"]].line
    if entry["selected"]:
        reminder = f'try a line in the prompt first: "{line}"; if it is not enough, train it' if line else TRAINED
        return f"{reminder}{training}"
    if (gap := entry["gap"]) is None or gap <= 0:
        return "leave it: passed rollouts show it as often as failed ones"
    reminder = f'; a line in the prompt costs little: "{line}"' if line else ""
    if not has_package(COMPUTING):
        return f"collect more passed and failed rollouts to conclude: captrain[train] says how many{reminder}"
    more = _rollouts_needed(diagnosis, entry)
    if more is None:
        return f"no number of rollouts will tell this gap from luck{reminder}"
    if more == 0:
        return f"real, as far as these rollouts tell, but below the thresholds of the selection{reminder}"
    return f"collect about {more} more passed and failed rollouts to conclude{reminder}"


def _training(name: str, writer: Writer | None, folder: Path | None) -> str:
    """How one comes to an environment: the command to type, where it would work."""
    if writer is None:
        return (
            " (an environment needs the tools' schemas, which these logs do not hold: bring them as `tools`, or by "
            "`--tools FILE` to `captrain synthesize`)"
        )
    command = f"captrain synthesize {name} --diagnosis {quote(str(folder or 'DIR'))} --out {ENVIRONMENTS}"
    if writer == "program":
        return f": `{command}`"
    return f", where a language model writes the environment (MODEL: its name): `{command} --model MODEL`"


def _rollouts_needed(diagnosis: Diagnosis, entry: CandidateAccount) -> int | None:
    """How many rollouts more of each outcome would tell this gap from none, on 8 in 10 occasions; None beyond what can
    be planned."""
    gap, passed = entry["gap"], entry["er_passed"]
    if gap is None or passed is None:
        return None
    base = min(max(passed, MARGIN), 1 - MARGIN)
    gap = min(gap, 1 - MARGIN - base)
    count = max(2, min(diagnosis.account.passed, diagnosis.account.failed))
    least = tasks_needed(Design(base=base, tasks=count, trials=1, icc=0.0, shared=0.0), gap) if gap > 0 else None
    return None if least is None else max(0, least - count)
