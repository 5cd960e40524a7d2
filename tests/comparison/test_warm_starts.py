"""Rows that go on from the adapter of another row: GRPO on the target after demonstrations."""

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
    """An index as the stage of a row leaves it, and the adapter that it names."""
    publish_json(project / f"results/{row}/index.json", {row: {"digest": "abcd", "path": f"artifacts/{row}/abcd"}})
    return Adapter(str(project / f"artifacts/{row}/abcd"), "abcd")


def test_a_generic_warm_start_trains_with_all_that_trace_spends(tmp_path: Path) -> None:
    start, spec = leave(tmp_path, "adp"), composed()
    [job] = WARM_GRPO.jobs(spec, tmp_path, TRACE)
    assert (job.start, job.rollouts, job.name, job.seed) == (start, 120, "warm_grpo", 3)
    settings = spec.baselines.warm_grpo.differences()
    assert job.trainer.settings() == {**spec.trainer.settings(), **settings} and settings["schedule"] == "linear"


def test_a_targeted_start_trains_with_what_is_left_after_all_that_it_has_cost(tmp_path: Path) -> None:
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


def test_without_an_adapter_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="index.json is missing"):
        WARM_GRPO.jobs(composed(), tmp_path, TRACE)
    publish(tmp_path / "results/solutions/ledger.jsonl", list[LedgerEntry]())
    for row, jobs in (("adp", WARM_GRPO.jobs), ("solutions", SOLUTIONS_GRPO.jobs)):
        publish_json(tmp_path / f"results/{row}/index.json", {})
        assert list(jobs(composed(), tmp_path, TRACE)) == []


def test_a_start_that_does_not_run_is_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match="baselines.warm_grpo.run needs baselines.adp.run"):
        composed("baselines.warm_grpo.run=true")
    assert composed("baselines.warm_grpo.run=true", "baselines.adp.run=true").baselines.warm_grpo.run


def test_rows_of_rewards_alone_are_told_from_rows_of_demonstrations() -> None:
    assert {name: supervision(name) for name in (*baselines(), "base", "trace", "router:sets", "bound:oracle")} == {
        **dict.fromkeys(("grpo_target", "grpo_untuned", "rejection_sft", "awm", "single", "mixed"), "rewards"),
        **dict.fromkeys(("adp", "awm_sft", "solutions", "failures_sft"), "demonstrations"),
        **dict.fromkeys(("warm_grpo", "solutions_grpo"), "demonstrations and rewards"),
        **dict.fromkeys(("trace", "router:sets", "bound:oracle"), "rewards"),
        "gepa": "reflection",
        "base": None,
    }
    assert is_supervised("solutions_routed") and is_supervised("warm_grpo") and not is_supervised("trace")
