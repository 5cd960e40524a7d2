"""The command line through its entry point, on results and a pipeline made by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.finished import Captrain
from support.waiting import PATIENCE

from captrain.contract import tool_call
from captrain.records import Message, publish_json, publish_text
from captrain.reporting.divergence import divergence


def get(order: str) -> Message:
    return tool_call("get_order", {"id": order})


def cancel(order: str) -> Message:
    return tool_call("cancel_order", {"id": order, "reason": "late"})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project without results and pipeline state."""
    publish_text(tmp_path / "dvc.yaml", "stages: {}\n")
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
    assert all(command in done.stdout for command in ("results", "verify", "report"))


def test_no_module_behind_the_commands_imports_torch() -> None:
    modules = "captrain.comparison.tables, captrain.reporting.verification, captrain.reporting.tables, dvc.repo"
    code = f"import sys, {modules}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "False"


def test_outside_a_project_one_message_says_where_to_run(tmp_path: Path, captrain: Captrain) -> None:
    status, out, err = captrain(tmp_path, "verify")
    assert (status, out) == (2, "")
    assert err.startswith("error: there is no dvc.yaml") and "Traceback" not in err


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


def test_absent_results_name_the_remedy(project: Path, captrain: Captrain) -> None:
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


def test_a_broken_pipeline_file_ends_in_one_message(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "dvc.yaml", "stages: [\n")
    status, _, err = captrain(pipeline, "verify")
    assert status == 2 and "DVC cannot read the pipeline" in err and "Traceback" not in err
