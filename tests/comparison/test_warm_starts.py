"""Rows that start from the adapter of another row: GRPO on the target after demonstrations."""

from pathlib import Path

import pytest
from support.training import ROOT

from captrain.comparison import baselines, is_supervised, supervision
from captrain.comparison.baselines.grpo import SOLUTIONS_GRPO, WARM_GRPO
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models import Adapter
from captrain.records import publish, publish_json
from captrain.run import Spec, compose_spec

TRACE = [
    LedgerEntry(stage="rollouts", purpose="diagnosis", method="trace", rollouts=24),
    LedgerEntry(stage="environments", purpose="calibration", method="trace", item="a", rollouts=16),
    LedgerEntry(stage="adapters", purpose="training", method="trace", item="a", rollouts=80),
]


def composed(*overrides: str) -> Spec:
    return compose_spec("smoke", 3, overrides, ROOT / "conf")


def leave(project: Path, row: str) -> Adapter:
    """The index of a row's stage, and its adapter."""
    publish_json(project / f"results/{row}/index.json", {row: {"digest": "abcd", "path": f"artifacts/{row}/abcd"}})
    return Adapter(str(project / f"artifacts/{row}/abcd"), "abcd")


def test_a_generic_warm_start_trains_with_traces_total(tmp_path: Path) -> None:
    start, spec = leave(tmp_path, "adp"), composed()
    [job] = WARM_GRPO.jobs(spec, tmp_path, TRACE)
    assert (job.start, job.rollouts, job.name, job.seed) == (start, 120, "warm_grpo", 3)
    settings = spec.baselines.warm_grpo.differences()
    assert job.trainer.settings() == {**spec.trainer.settings(), **settings} and settings["schedule"] == "linear"


def test_a_targeted_start_trains_with_the_rest_of_the_total(tmp_path: Path) -> None:
    start = leave(tmp_path, "solutions")
    more = LedgerEntry(stage="solutions", purpose="diagnosis", method="solutions", rollouts=10)
    publish(tmp_path / "results/solutions/ledger.jsonl", [more])
    [job] = SOLUTIONS_GRPO.jobs(composed(), tmp_path, TRACE)
    assert (job.start, job.rollouts) == (start, 80 - 10)
    row, own = (
        baselines()["solutions_grpo"],
        LedgerEntry(stage="solutions_grpo", purpose="training", method="solutions_grpo", rollouts=job.rollouts),
    )
    charged = [entry for entry in (*TRACE, more, own) if row.charged(entry, ["a"])]
    assert sum(entry.rollouts for entry in charged) == 120


def test_a_row_without_a_start_adapter_has_no_job(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="index.json is missing"):
        WARM_GRPO.jobs(composed(), tmp_path, TRACE)
    publish(tmp_path / "results/solutions/ledger.jsonl", list[LedgerEntry]())
    for row, jobs in (("adp", WARM_GRPO.jobs), ("solutions", SOLUTIONS_GRPO.jobs)):
        publish_json(tmp_path / f"results/{row}/index.json", {})
        assert list(jobs(composed(), tmp_path, TRACE)) == []


def test_a_disabled_start_row_is_rejected_before_anything_runs() -> None:
    with pytest.raises(UserError, match="baselines.warm_grpo.run needs baselines.adp.run"):
        composed("baselines.warm_grpo.run=true")
    assert composed("baselines.warm_grpo.run=true", "baselines.adp.run=true").baselines.warm_grpo.run


def test_rows_say_whether_they_learn_from_rewards_or_demonstrations() -> None:
    assert {name: supervision(name) for name in (*baselines(), "base", "trace", "router:sets", "bound:oracle")} == {
        **dict.fromkeys(
            ("grpo_target", "grpo_untuned", "rejection_sft", "awm", "single", "mixed", "mixture"), "rewards"
        ),
        **dict.fromkeys(("adp", "awm_sft", "solutions", "failures_sft"), "demonstrations"),
        **dict.fromkeys(("warm_grpo", "solutions_grpo", "solutions_mixture"), "demonstrations and rewards"),
        **dict.fromkeys(("trace", "router:sets", "bound:oracle"), "rewards"),
        "gepa": "reflection",
        "base": None,
    }
    assert is_supervised("solutions_routed") and is_supervised("warm_grpo") and not is_supervised("trace")
