"""Readers of rollouts and ledgers: the journal, and the totals at which methods are compared."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy, by_the_book
from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.comparison import evaluate
from captrain.contract import CheckedEnvironment, RunningEpisode
from captrain.errors import InfrastructureError
from captrain.ledger import LedgerEntry, budget, ledger_entry
from captrain.records import Message, Rollout, load, publish

TASKS, TRIALS = 5, 2
MISLEADING = 'it ended with {"outcome":"passed"} or "outcome":"error"'
"""Text with characters that some readers take for line breaks."""


def script(play: RunningEpisode) -> Sequence[Message]:
    """Passes three tasks, fails one, and gets an error in one."""
    number = int(play.key.split("/")[-2])
    if number == 3:
        raise InfrastructureError(MISLEADING)
    return [{"role": "assistant", "content": MISLEADING}] if number == 4 else by_the_book(play)


def played(root: Path, policy: ScriptedPolicy) -> list[Rollout]:
    """Write rollouts of a diagnosis in the project `root`."""
    target = CheckedEnvironment(ServiceDesk(mix="mixed"), "tests", "desk-0")
    return collect(
        policy,
        target,
        target.tasks("discovery", TASKS),
        purpose="diagnosis",
        seed=0,
        trials=TRIALS,
        retries=1,
        journals=root / ".cache/rollouts",
        quiet=True,
    )


def test_methods_are_charged_for_every_attempt_in_their_ledgers(tmp_path: Path) -> None:
    rollouts = played(tmp_path, ScriptedPolicy(script=script))
    attempts, path = sum(1 + rollout.retries for rollout in rollouts), tmp_path / "results/rollouts/ledger.jsonl"
    assert attempts == len(rollouts) + 2
    publish(path, [ledger_entry(rollouts, stage="rollouts", method="trace")])
    diagnosis = load(path, LedgerEntry)
    whole = budget(diagnosis) + 8
    assert budget(diagnosis) == attempts
    ledger = [
        *diagnosis,
        LedgerEntry(stage="adapters", purpose="training", method="trace", item="a", rollouts=8, discarded=4),
        LedgerEntry(stage="grpo_target", purpose="training", method="grpo_target", rollouts=whole),
        LedgerEntry(stage="evaluation", purpose="evaluation", method="evaluation", item="base", rollouts=10),
    ]
    arms = {"idle": "", "base": "", "a": "adapters", "grpo_target": "grpo_target"}
    outcomes = [
        (task, "any", arm, stage, trial, "passed", 1.0)
        for arm, stage in arms.items()
        for task in "xy"
        for trial in range(TRIALS)
    ]
    columns = ["task", "kind", "arm", "stage", "trial", "outcome", "reward"]
    result = evaluate(
        pd.DataFrame(outcomes, columns=columns),
        pd.DataFrame({"task": ["x", "y"], "kind": "any", "chosen": "a"}),
        ledger,
        ranked=["a"],
        controls={},
        resamples=50,
        confidence=0.9,
        seed=0,
    )
    charged = result.costs.set_index("method")
    names = ["rollouts", "discarded", "errors", "prompt_tokens", "completion_tokens"]
    [entry] = diagnosis
    assert charged.loc["trace", names].tolist() == [
        whole,
        4,
        entry.errors,
        entry.prompt_tokens,
        entry.completion_tokens,
    ]
    assert charged.loc["trace", "stages"] == "rollouts adapters" and entry.errors == 4
    assert charged.loc[["idle", "base", "grpo_target"], "rollouts"].tolist() == [0, 0, whole]
