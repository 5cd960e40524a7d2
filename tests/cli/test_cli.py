"""The command line through its entry point, on results and a pipeline made by hand."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.finished import Captrain
from support.results import account
from support.waiting import PATIENCE

from captrain.contract import tool_call
from captrain.records import Capability, Message, Rollout, Score, Task, publish, publish_json, publish_text
from captrain.reporting.divergence import divergence


def get(order: str) -> Message:
    return tool_call("get_order", {"id": order})


def cancel(order: str) -> Message:
    return tool_call("cancel_order", {"id": order, "reason": "late"})


def rollout(name: str, actions: list[Message], outcome: str = "failed") -> Rollout:
    passed = outcome == "passed"
    return Rollout.model_validate(
        {
            "id": name,
            "environment": "servicedesk",
            "task": Task(id=f"task-{name}", split="discovery", data={}),
            "trial": 0,
            "purpose": "diagnosis",
            "policy": "p0",
            "adapter": "abc123" if passed else None,
            "messages": [{"role": "user", "content": "Cancel [bold]W1[/bold]."}, *actions],
            "reference": [get("W1"), cancel("W1")],
            "score": None if outcome == "error" else Score(reward=float(passed), success=passed, parts={"state": 0.25}),
            "outcome": outcome,
        }
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with results of every kind, and no pipeline state."""
    publish_text(tmp_path / "dvc.yaml", "stages: {}\n")
    found = [
        rollout("a1f0", [get("W1"), cancel("W2"), cancel("W2")]),
        rollout("b2e0", [get("W1"), cancel("W1")], "passed"),
        rollout("c3d0", [], "error"),
    ]
    publish(tmp_path / "artifacts/rollouts/discovery.jsonl", found)
    row = {
        "id": "check_first",
        "name": "Check first",
        "description": "Looks before it writes.",
        **{"gap": None, "gap_low": None, "gap_high": None, "coverage": 0.25, "er_failed": 0.5, "er_passed": None},
        **{"runs_retained": 3, "runs": 10, "selected": False, "reason": "gap is undefined: never among passed"},
    }
    publish_json(tmp_path / "results/capabilities/selection.json", account([row]))
    evidence = Capability(id="check_first", name="Check first", description="Looks.", examples=["a1f0"])
    publish(tmp_path / "results/labels/candidates.jsonl", [evidence])
    check = {"name": "reference scores 1.0", "passed": False, "measured": 0.5, "bound": "1", "detail": "task t7"}
    publish_json(
        tmp_path / "results/environments/check_first.passport.json",
        {
            "capability": "check_first",
            "environment": "e",
            "attempt": 0,
            "passed": False,
            "trusted": True,
            "calibration_tasks": 4,
            "checks": [check],
        },
    )
    index = {"check_first": {"digest": "abc123", "path": "artifacts/adapters/abc123", "rollouts": 640}}
    publish_json(tmp_path / "results/adapters/index.json", index)
    publish_text(tmp_path / "artifacts/adapters/abc123/README.md", "---\ntags: [lora]\n---\n# check_first\nThe card.\n")
    return tmp_path


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from captrain.cli import app as cli\n"
        "sys.argv = ['captrain', '--help']\n"
        "try: cli.main()\n"
        "finally: print(sorted({'torch', 'transformers', 'pandas', 'dvc', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in ("results", "verify", "show"))


def test_no_module_behind_the_commands_imports_torch() -> None:
    modules = "captrain.comparison.tables, captrain.reporting.verification, captrain.reporting.show, dvc.repo"
    code = f"import sys, {modules}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "False"


def test_outside_a_project_one_message_says_where_to_run(tmp_path: Path, captrain: Captrain) -> None:
    status, out, err = captrain(tmp_path, "verify")
    assert (status, out) == (2, "")
    assert err.startswith("error: there is no dvc.yaml") and "Traceback" not in err


def test_a_beginning_of_an_id_names_what_it_alone_begins(project: Path, captrain: Captrain) -> None:
    assert "rollout a1f0 failed" in captrain(project, "show", "rollouts", "a1")[1]
    assert "check_first.py" in captrain(project, "show", "environments", "check")[1]
    status, _, err = captrain(project, "show", "rollouts", "z")
    assert status == 2 and "there is no rollout 'z'" in err


def test_no_job_is_an_empty_list(project: Path, captrain: Captrain) -> None:
    status, out, _ = captrain(project, "jobs")
    assert status == 0 and out.startswith("no job was ever submitted here")


def test_the_sweep_command_explains_itself(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['captrain-sweep', '--help']; from captrain.comparison.sweep import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "captrain-sweep -m" in done.stdout


def test_an_agreeing_rollout_has_no_divergence() -> None:
    found = divergence([get("W1"), cancel("W1")], [get("W1"), cancel("W1")])
    assert found.first is None and [mark.verdict for mark in found.marks] == ["same", "same"]


def test_other_arguments_extra_and_missing_calls_are_told_apart() -> None:
    reference = [get("W1"), cancel("W1")]
    other = divergence([get("W1"), cancel("W2"), cancel("W3")], reference)
    assert [mark.verdict for mark in other.marks] == ["same", "differs", "extra"]
    assert other.first == 1 and other.marks[1].expected == 'cancel_order(id="W1", reason="late")'
    skipped = divergence([cancel("W1")], reference)
    assert skipped.first == 0 and skipped.missing == {0: ['get_order(id="W1")']}
    stopped = divergence([get("W1")], reference)
    assert stopped.first == 1 and stopped.missing == {1: ['cancel_order(id="W1", reason="late")']}


def test_the_first_of_several_divergences_is_the_one_marked() -> None:
    reference = [get("W1"), get("W2"), get("W3"), cancel("W3")]
    assert divergence([get("W9"), get("W2"), get("W8"), cancel("W3")], reference).first == 0


def test_arguments_given_as_json_text_equal_those_given_as_objects() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "get_order", "arguments": '{"id": "W1"}'}}]}
    assert divergence([call], [get("W1")]).first is None


def test_rollouts_are_listed_by_outcome_and_limit(project: Path, captrain: Captrain) -> None:
    status, out, _ = captrain(project, "show", "rollouts", "--outcome", "failed")
    assert status == 0 and "a1f0" in out and "b2e0" not in out and "at call 2" in out
    assert "1 of 3" in captrain(project, "show", "rollouts", "--limit", "1")[1]


def test_a_rollout_is_shown_with_its_divergence_marked(project: Path, captrain: Captrain) -> None:
    _, out, _ = captrain(project, "show", "rollouts", "a1f0")
    lines = [line.strip() for line in out.splitlines()]
    leaves = lines.index("▶ here the rollout leaves its reference")
    assert lines.index('= get_order(id="W1")') < leaves
    assert lines[leaves + 1] == '≠ cancel_order(id="W2", reason="late")'
    assert lines[leaves + 2] == 'reference: cancel_order(id="W1", reason="late")'
    assert '+ cancel_order(id="W2", reason="late")   extra: not in the reference' in lines
    assert "Cancel [bold]W1[/bold]." in lines and "none: the base" in out and "0.250" in out


def test_a_rollout_that_stops_early_shows_what_is_missing(project: Path, captrain: Captrain) -> None:
    out = captrain(project, "show", "rollouts", "c3d0")[1]
    assert out.index("leaves its reference") < out.index('- get_order(id="W1")   missing')
    assert "every tool call" in captrain(project, "show", "rollouts", "b2e0")[1]


@pytest.mark.parametrize(
    ("noun", "given", "near"),
    [
        ("rollouts", "a1f9", "a1f0"),
        ("capabilities", "chek_first", "check_first"),
        ("environments", "check_frist", "check_first"),
        ("adapters", "check-first", "check_first"),
    ],
)
def test_an_unknown_id_ends_in_a_message_with_close_ones(
    project: Path, captrain: Captrain, noun: str, given: str, near: str
) -> None:
    status, out, err = captrain(project, "show", noun, given)
    assert (status, out) == (2, "")
    assert f"'{given}'" in err and f"did you mean {near}?" in err and f"captrain show {noun}`" in err


def test_capabilities_show_numbers_reason_and_evidence(project: Path, captrain: Captrain) -> None:
    assert "undefined" in captrain(project, "show", "capabilities")[1]
    out = captrain(project, "show", "capabilities", "check_first")[1]
    assert "no: gap is undefined: never among passed" in out and "a1f0" in out and "retained in 3 of 10" in out


def test_environments_show_every_check_of_the_passport(project: Path, captrain: Captrain) -> None:
    assert "0 of 1" in captrain(project, "show", "environments")[1]
    out = captrain(project, "show", "environments", "check_first")[1]
    assert "reference scores 1.0" in out and "failed" in out and "task t7" in out


def test_adapters_show_content_hash_and_model_card(project: Path, captrain: Captrain) -> None:
    assert "abc123" in captrain(project, "show", "adapters")[1]
    out = captrain(project, "show", "adapters", "check_first")[1]
    assert "The card." in out and "tags" not in out
    shutil.rmtree(project / "artifacts/adapters")
    assert "is not here" in captrain(project, "show", "adapters", "check_first")[1]


def test_absent_rollouts_and_results_name_the_remedy(project: Path, captrain: Captrain) -> None:
    shutil.rmtree(project / "artifacts")
    assert "dvc repro rollouts" in captrain(project, "show", "rollouts")[2]
    assert "dvc repro evaluation" in captrain(project, "results")[2]


def test_a_real_benchmark_is_shown_with_its_floor_and_versions_before_anything_is_evaluated(
    project: Path, captrain: Captrain
) -> None:
    floor = {"pass_rate": 0.25, "mean_reward": 0.3}
    row = {"pass_rate": 0.5, "mean_reward": 0.625, "floor": floor}
    about = {
        "benchmark": "desks",
        "version": "7",
        "user": {"name": "m", "temperature": 0.0},
        "not_runnable": {"a": "b"},
    }
    summary = {"outcomes": {"passed": 2, "failed": 2, "error": 1}, **row, "kinds": {"oak": {"rollouts": 5, **row}}}
    publish_json(project / "results/rollouts/summary.json", {**summary, "benchmark": about})
    status, out, _ = captrain(project, "results")
    assert status == 0 and "`dvc repro evaluation`" in out
    assert re.search(r"oak +│ 5 +│ 0.500 +│ 0.625 +│ 0.250 +│ 0.300", out)
    assert 'version: "7"' in out and '"temperature": 0.0' in out
    assert "1 rollouts ended in errors of infrastructure; 1 tasks are not runnable here" in out


def test_a_corrupt_rollout_names_file_and_line(project: Path, captrain: Captrain) -> None:
    path = project / "artifacts/rollouts/discovery.jsonl"
    path.write_text(path.read_text()[:-20])
    status, _, err = captrain(project, "show", "rollouts")
    assert status == 2 and "discovery.jsonl, line 3" in err


def test_a_broken_pipeline_file_ends_in_one_message(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "dvc.yaml", "stages: [\n")
    status, _, err = captrain(pipeline, "verify")
    assert status == 2 and "DVC cannot read the pipeline" in err and "Traceback" not in err
