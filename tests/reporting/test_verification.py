"""`captrain verify`: one test for each verdict."""

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.finished import READ, Captrain, commit, repro, shell
from support.waiting import until

from captrain.records import publish_text

EDITED = "method,rate\nbase,0.25\ntrace,0.75\n"
PARAMETERS = "seed: 0\nsection: {delta: 0.3, rest: 1}\n"


@pytest.fixture
def remade(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run the whole pipeline again with this much noise, as another processor would."""

    def run(noise: str) -> None:
        monkeypatch.setenv("KERNEL", noise)
        repro(pipeline, "--force")

    return run


def row(out: str, topic: str) -> str:
    """Status and text on one topic, in one line."""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    [text] = [line for line in lines if line.split(" ")[1:2] == [topic]]
    return text


def test_verify_holds_for_what_was_run_and_committed(pipeline: Path, captrain: Captrain) -> None:
    status, out, _ = captrain(pipeline, "verify")
    assert status == 0, out
    assert out.startswith("verified: the committed results are those of the committed code")
    assert row(out, "results").startswith("ok results the same here, in dvc.lock and in commit ")
    assert "differs" not in out and "note" not in out


def test_a_fresh_clone_is_verified_and_its_missing_outputs_are_listed(
    pipeline: Path, tmp_path: Path, captrain: Captrain
) -> None:
    shell(tmp_path, "git", "clone", "--quiet", str(pipeline), "clone")
    status, out, _ = captrain(tmp_path / "clone", "verify")
    assert status == 0 and "1 output of DVC's cache: not here" in out
    assert "artifacts/data, output of make" in captrain(tmp_path / "clone", "verify", "--all")[1]


def test_code_that_changed_after_the_run_is_named_with_its_stages_even_if_committed(
    pipeline: Path, captrain: Captrain
) -> None:
    publish_text(pipeline / "read.py", READ + "# more\n")
    status, out, _ = captrain(pipeline, "verify", "--all")
    assert status == 1 and "read.py: modified since the run (read)" in out and "read.py differs from commit" in out
    commit(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and out.startswith("not verified: the code here is not that of the committed run\n")
    assert row(out, "code") == "differs code read.py: modified since the run (read)"
    assert {line.split()[0] for line in out.splitlines()[2:-2]} == {"differs", "ok"}
    assert out.count("differs") == 1 and "captrain verify --all" in out


@pytest.mark.parametrize("committed", [False, True])
def test_an_edited_result_is_distinguished_from_one_that_was_made_again(
    pipeline: Path, captrain: Captrain, committed: bool
) -> None:
    publish_text(pipeline / "results/make/table.csv", EDITED)
    if committed:
        commit(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "results were edited or removed" in out.splitlines()[0]
    assert row(out, "edits") == "differs edits results/make: modified since the run (make)"
    assert "made again" not in out and row(out, "code").startswith("ok")


def test_a_bit_that_flips_in_an_output_is_named_by_its_file_even_with_size_and_time_as_before(
    pipeline: Path, captrain: Captrain
) -> None:
    path = pipeline / "artifacts/data/rows.txt"
    assert captrain(pipeline, "verify")[0] == 0
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "results were edited or removed" in out.splitlines()[0] and "machine" not in out
    assert row(out, "edits") == "differs edits artifacts/data/rows.txt: altered since the run (make)"


def test_results_of_other_code_are_compared_with_the_committed_ones(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "read.py", READ.replace("0.5,", "0.5000001,").replace("0.5 +", "0.52 +"))
    repro(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and out.splitlines()[0] == (
        "not verified: the code here is not that of the committed run; the results were made again here: "
        "the same result within noise"
    )
    assert "results/read.json" in row(out, "results")
    assert row(out, "code").startswith("differs code read.py differs from commit")
    commit(pipeline)
    assert captrain(pipeline, "verify")[0] == 0


def test_results_of_another_specification_name_the_parameter(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "params.yaml", PARAMETERS)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and out.startswith("not verified: the specification here is not that of the committed run")
    assert "params.yaml: section changed since the run (make)" in row(out, "specification")
    repro(pipeline, "--force")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "params.yaml differs from commit" in row(out, "specification")


def test_results_that_differ_with_equal_inputs_and_libraries_were_made_on_another_machine(
    pipeline: Path, captrain: Captrain, remade: Callable[[str], None]
) -> None:
    remade("0.02")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and out.startswith(
        "not verified: the results were made again here, on another machine: the same result within noise\n"
    )
    assert row(out, "code").startswith("ok") and row(out, "libraries").startswith("ok")


def test_pass_rates_beyond_the_committed_intervals_are_named(
    pipeline: Path, captrain: Captrain, remade: Callable[[str], None]
) -> None:
    remade("0.2")
    status, out, _ = captrain(pipeline, "verify")
    beyond = "1 of 2 pass rates are beyond the committed intervals: trace 0.500 -> 0.700 (0.450 to 0.550)"
    assert status == 1 and f"on another machine: {beyond}" in " ".join(out.split())
    assert "within noise" not in out


def test_results_of_other_libraries_say_which_versions(
    pipeline: Path, captrain: Captrain, remade: Callable[[str], None]
) -> None:
    pins = (pipeline / "requirements.lock").read_text().replace("3.11", "3.1")
    publish_text(pipeline / "requirements.lock", pins + "rich==1.0\nScikit_Learn==0.20.1\ntorch==1.0+cpu\n")
    commit(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 0 and row(out, "libraries").startswith("note")  # the committed results are what they were
    remade("0.02")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "here, with other versions of libraries: the same result" in out.splitlines()[0]
    libraries = row(out, "libraries")
    assert f"scikit-learn {version('scikit-learn')} (pinned 0.20.1)" in libraries and "numpy" not in libraries
    assert f"torch {version('torch')} (pinned 1.0+cpu)" in libraries and "rich" not in libraries
    assert f"python {platform.python_version()} (pinned 3.1)" in libraries


def test_committed_results_beside_the_record_of_another_run_are_not_its_output(
    pipeline: Path, captrain: Captrain, remade: Callable[[str], None]
) -> None:
    remade("0.02")
    shell(pipeline, "git", "checkout", "--quiet", "--", "results")
    publish_text(pipeline / "artifacts/data/rows.txt", "rows 7")
    status, out, _ = captrain(pipeline, "verify", "--all")
    assert status == 1 and "the same pass rates" in out.splitlines()[0]
    assert "results/make: modified since the run (make)" in out
    assert "artifacts/data/rows.txt: altered since the run (make)" in row(out, "edits")


def test_verify_fails_when_an_input_is_not_in_git(pipeline: Path, captrain: Captrain) -> None:
    shell(pipeline, "git", "rm", "--quiet", "--cached", "read.py")
    shell(pipeline, "git", "commit", "--quiet", "--message", "forget it")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "read.py is not committed" in row(out, "code")
    assert out.startswith("not verified: the code here is not that of the committed run\n")


def test_verify_fails_when_a_result_is_missing_or_a_stage_never_ran(pipeline: Path, captrain: Captrain) -> None:
    (pipeline / "results/read.json").unlink()
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and row(out, "edits") == "differs edits results/read.json: deleted since the run (read)"
    lock = yaml.safe_load((pipeline / "dvc.lock").read_text())
    del lock["stages"]["read"]
    publish_text(pipeline / "dvc.lock", yaml.safe_dump(lock))
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "read.py: modified since the run (read)" in row(out, "code")


def test_the_verdict_does_not_depend_on_the_folder_that_it_is_asked_in(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "params.yaml", PARAMETERS)
    publish_text(pipeline / "results/make/table.csv", EDITED)
    shutil.rmtree(pipeline / "artifacts")
    (pipeline / "within").mkdir()
    assert captrain(pipeline / "within", "verify", "--all") == captrain(pipeline, "verify", "--all")


def test_a_running_stage_is_not_verified(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "read.py", "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(3600)\n")
    command = [sys.executable, "-m", "dvc", "repro"]
    with subprocess.Popen(command, cwd=pipeline, stdout=subprocess.DEVNULL, start_new_session=True) as running:
        try:
            until(lambda: (pipeline / "begun").exists() or running.poll() is not None)
            status, _, err = captrain(pipeline, "verify")
        finally:
            os.killpg(running.pid, signal.SIGKILL)
    assert status == 2 and "a stage is running" in err
