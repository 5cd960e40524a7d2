"""Agreement of the causes with those that people read out of the shared logs of tau2-bench."""

import json
from functools import cache
from pathlib import Path

import pytest

from captrain.capabilities import CAUSES
from captrain.diagnosis.rollouts import DiagnosedRollout, diagnose_rollouts
from captrain.interop import read_logs
from captrain.records import JsonObject

SHARED = Path(__file__).parents[3] / "shared" / "data"
FAILURES = SHARED / "gold" / "failures.jsonl"
pytestmark = pytest.mark.needs("shared")
NOT_THE_AGENTS = {"suspect_reference", "user_simulator_fault", "infrastructure"}


@cache
def explained() -> list[tuple[JsonObject, DiagnosedRollout]]:
    """Each label beside what the program says of the rollout."""
    labels = [json.loads(line) for line in FAILURES.read_text().splitlines()]
    rollouts: dict[tuple[object, ...], DiagnosedRollout] = {}
    for file in sorted({str(label["file"]) for label in labels}):
        for row in diagnose_rollouts(read_logs([SHARED / "tau2" / file])).rollouts:
            rollouts[file, row.task.rsplit("/", 1)[-1], row.trial] = row
    return [(label, rollouts[label["file"], label["task_id"], label["trial"]]) for label in labels]


def causes(row: DiagnosedRollout) -> set[str]:
    """The causes of the agent, and whatever spoilt the rollout."""
    spoilt = {row.primary.cause} if row.standing == "spoilt" and row.primary else set[str]()
    return {cause.cause for cause in row.causes if CAUSES[cause.cause].of_agent} | spoilt


def test_most_primary_causes_that_people_read_are_told_and_few_are_told_that_nobody_read() -> None:
    agents = [(label, causes(row)) for label, row in explained() if label["primary"] not in NOT_THE_AGENTS]
    assert sum(label["primary"] in kinds for label, kinds in agents) >= 28
    told = [(label, kind) for label, row in explained() for kind in causes(row)]
    wrong = [kind for label, kind in told if kind not in (label["primary"], *label["secondary"])]
    assert len(wrong) <= 0.16 * len(told)


def test_references_that_people_doubt_are_suspect_and_hardly_any_else() -> None:
    flags = [(label["suspect_reference"], bool(row.suspicions)) for label, row in explained()]
    assert flags.count((True, True)) >= 14
    assert flags.count((False, True)) <= 0.1 * sum(not is_doubted for is_doubted, _ in flags)
