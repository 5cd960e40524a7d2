"""Made-up evaluation outcomes and their tables."""

from collections.abc import Mapping, Sequence

import pandas as pd

from captrain.comparison.tables import EvaluationTables, evaluate
from captrain.ledger import LedgerEntry

LEDGER = [
    LedgerEntry(stage="rollouts", purpose="diagnosis", method="trace", rollouts=40),
    LedgerEntry(stage="adapters", purpose="training", method="trace", item="a", rollouts=60, discarded=10),
    LedgerEntry(stage="grpo_target", purpose="training", method="grpo_target", rollouts=100, discarded=20),
    LedgerEntry(stage="evaluation", purpose="evaluation", method="evaluation", rollouts=7),
]
STAGES = {"idle": "", "base": "", "grpo_target": "grpo_target"}


def outcomes_of(arms: Mapping[str, Sequence[Sequence[str]]]) -> pd.DataFrame:
    """Build outcomes from one string per task and one letter per trial: P passed, F failed, E error. Idle always
    fails."""
    words = {"P": ("passed", 1.0), "F": ("failed", 0.0), "E": ("error", None)}
    idle = {"idle": ["F" * len(letters) for letters in arms["base"]]} if "base" in arms else {}
    rows = [
        (f"t{task}", "even" if task % 2 == 0 else "odd", arm, STAGES.get(arm, "adapters"), trial, *words[letter])
        for arm, tasks in {**idle, **arms}.items()
        for task, letters in enumerate(tasks)
        for trial, letter in enumerate(letters)
    ]
    return pd.DataFrame(rows, columns=["task", "kind", "arm", "stage", "trial", "outcome", "reward"])


def routes_of(chosen: Sequence[str], **routers: Sequence[str]) -> pd.DataFrame:
    tasks = [f"t{task}" for task in range(len(chosen))]
    return pd.DataFrame({"task": tasks, "kind": "any", **routers, "chosen": chosen})


def run(outcomes: pd.DataFrame, routes: pd.DataFrame, ledger: Sequence[LedgerEntry] = LEDGER) -> EvaluationTables:
    return evaluate(outcomes, routes, ledger, ranked=["a"], controls={}, resamples=500, confidence=0.95, seed=0)


SMALL = {"base": ["PP", "FF", "FF", "PF"], "grpo_target": ["PP", "PP", "FF", "FF"], "a": ["PP", "PP", "FF", "FF"]}
