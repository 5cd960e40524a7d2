"""Verdicts of `captrain verify`, each brought about: are results those of the committed code, and if not, why?"""

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
from captrain.reporting import verification

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def remade(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run the whole pipeline again, as a processor does whose results differ by that much."""

    def run(noise: str) -> None:
        monkeypatch.setenv("KERNEL", noise)
        repro(pipeline, "--force")

    return run


def row(out: str, topic: str) -> str:
    """Return the finding on one topic: status and text, in one line."""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    [text] = [line for line in lines if line.split(" ")[1:2] == [topic]]
    return text


def test_verify_holds_for_what_was_run_and_committed(pipeline: Path, captrain: Captrain) -> None:
    status, out, _ = captrain(pipeline, "verify")
    assert status == 0, out
    assert out.startswith("verified: the committed results are those of the committed code")
    assert "of 2 stages are as dvc.lock has them and as committed in" in row(out, "results")
    assert "differs" not in out and "note" not in out and "machine" not in out


def test_verify_holds_in_a_fresh_clone_and_names_what_is_not_here(
    pipeline: Path, tmp_path: Path, captrain: Captrain
) -> None:
    shell(tmp_path, "git", "clone", "--quiet", str(pipeline), "clone")
    status, out, _ = captrain(tmp_path / "clone", "verify")
    assert status == 0, out
    assert "outputs in DVC's cache that are not here: 1" in out
    assert "artifacts/data, output of make: not here, not checked" in captrain(tmp_path / "clone", "verify", "--all")[1]


def test_code_that_changed_after_the_run_is_named_with_its_stages_even_if_committed(
    pipeline: Path, captrain: Captrain
) -> None:
    publish_text(pipeline / "read.py", READ + "# more\n")
    status, out, _ = captrain(pipeline, "verify", "--all")
    assert status == 1 and "read.py was modified since the run (read)" in out and "read.py differs from commit" in out
    commit(pipeline)
    status, out, _ = captrain(pipeline, "verify", "--all")
    assert status == 1 and "read.py was modified since the run (read)" in out and "differs from commit" not in out
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1
    assert out.startswith("not verified: the code here is not that of the committed run\n")
    assert row(out, "code") == "differs code read.py was modified since the run (read)"
    assert {line.split()[0] for line in out.splitlines()[2:-2]} == {"differs", "ok"}
    assert out.count("differs") == 1 and "`captrain verify --all` lists" in out


def test_a_result_that_was_edited_is_told_from_one_that_was_made_again(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "results/make/table.csv", "method,rate\nbase,0.25\ntrace,0.75\n")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "results were edited after their stage made them" in out.splitlines()[0]
    assert "made again" not in out and "machine" not in out and "code" in row(out, "code") and "ok" in row(out, "code")
    assert "results/make/table.csv differs" in row(out, "edits")
    assert row(out, "record").startswith("ok")  # that `read` reads the edited file is no second fault
    assert "results/make is not as its stage left it (make)" in captrain(pipeline, "verify", "--all")[1]


def test_an_edit_that_was_committed_is_still_an_edit(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "results/make/table.csv", "method,rate\nbase,0.25\ntrace,0.75\n")
    commit(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "results were edited" in out and "results/make is not as its" in row(out, "edits")


def test_results_of_other_code_are_compared_with_the_committed_ones(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "read.py", READ.replace("0.5,", "0.5000001,").replace("0.5 +", "0.52 +"))
    repro(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1
    assert out.startswith(
        "not verified: the results were made again here, by other code: the same result within noise\n"
    )
    assert "1 of 2 stages made other files than committed." in row(out, "results")
    assert row(out, "code").startswith("differs code run on another read.py than committed (read); read.py differs")
    assert row(out, "machine").startswith("note")
    out = captrain(pipeline, "verify", "--all")[1]
    assert "run on another read.py than committed (read)" in out
    commit(pipeline)
    assert captrain(pipeline, "verify")[0] == 0


def test_results_of_another_specification_say_which_parameter(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "params.yaml", "seed: 0\nsection: {delta: 0.3, rest: 1}\n")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and out.startswith("not verified: the specification here is not that of the committed run")
    repro(pipeline, "--force")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "run with params.yaml.section.delta 0.2 -> 0.3 (make)" in row(out, "specification")
    assert out.startswith("not verified: the specification here is not that of the committed run\n")


def test_the_same_of_everything_and_other_results_leave_the_machine(
    pipeline: Path,
    captrain: Captrain,
    remade: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    remade("0.02")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: A CPU\nflags\t\t: fpu avx2 fma\n")
    monkeypatch.setattr(verification, "CPUINFO", cpuinfo)
    monkeypatch.setattr(verification.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1
    assert out.startswith(
        "not verified: the results were made again here, on another machine: the same result within noise\n"
    )
    text = " ".join(out.split())
    assert "2 of 2 stages made other files than committed, beginning with make. 2 of 2 pass rates" in text
    assert "results/evaluation/main.csv are within the committed intervals: the same result within noise" in text
    assert "this machine: A CPU, x86_64 with AVX2; set here: OPENBLAS_CORETYPE=Haswell" in text
    assert "against the promise: please report it" in text
    assert row(out, "code").startswith("ok") and row(out, "libraries").startswith("ok")
    assert len(out.splitlines()) < 16
    cpuinfo.write_text("flags\t: fpu sse2\n")
    assert "does not cover that: AVX2 was not found here" in " ".join(captrain(pipeline, "verify")[1].split())
    monkeypatch.setattr(verification.platform, "machine", lambda: "aarch64")
    assert "does not cover that: arm64 is designed for" in " ".join(captrain(pipeline, "verify")[1].split())


def test_pass_rates_beyond_the_committed_intervals_are_named(
    pipeline: Path, captrain: Captrain, remade: Callable[[str], None]
) -> None:
    remade("0.2")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1
    assert "on another machine: 1 of 2 pass rates are beyond the committed intervals" in out.splitlines()[0]
    assert "beyond are trace 0.500 -> 0.700 (0.450 to 0.550)" in " ".join(out.split())
    assert "within noise" not in out


def test_results_of_other_libraries_say_which_versions(
    pipeline: Path, captrain: Captrain, remade: Callable[[str], None]
) -> None:
    pins = (pipeline / "requirements.lock").read_text()
    publish_text(pipeline / "requirements.lock", pins + "rich==1.0\nScikit_Learn==0.20.1\ntorch==1.0+cpu\n")
    commit(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 0 and row(out, "libraries").startswith("note")  # the committed results are what they were
    remade("0.02")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "here, with other versions of libraries: the same result" in out.splitlines()[0]
    libraries = row(out, "libraries")
    assert libraries.startswith("differs") and f"scikit-learn {version('scikit-learn')} (pinned 0.20.1)" in libraries
    assert f"torch {version('torch')} (pinned 1.0+cpu)" in libraries and "numpy" not in libraries
    assert "of others 1 differ" in libraries and "another machine" not in out
    assert "Whether it matters cannot be told while libraries differ" in row(out, "machine")
    assert f"rich {version('rich')}, pinned 1.0" in captrain(pipeline, "verify", "--all")[1]


def test_another_python_counts_as_another_library(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "requirements.lock", f"# For Python 3.1.\nnumpy=={version('numpy')}\n")
    commit(pipeline)
    assert f"python {platform.python_version()} (pinned 3.1)" in row(captrain(pipeline, "verify")[1], "libraries")


def test_committed_files_beside_the_record_of_another_run_are_said_to_be_no_output_of_it(
    pipeline: Path, captrain: Captrain, remade: Callable[[str], None]
) -> None:
    remade("0.02")
    shell(pipeline, "git", "checkout", "--quiet", "--", "results")
    status, out, _ = captrain(pipeline, "verify", "--all")
    assert status == 1 and "results/make is not as its stage left it (make)" in out
    assert "the same pass rates" in out.splitlines()[0]
    publish_text(pipeline / "artifacts/data/rows.txt", "rows 7")
    assert "artifacts/data is not as its stage left it" in row(captrain(pipeline, "verify")[1], "edits")


def test_verify_fails_when_a_stage_read_another_output_than_was_made(pipeline: Path, captrain: Captrain) -> None:
    shutil.rmtree(pipeline / "artifacts")
    lock = (pipeline / "dvc.lock").read_text()
    digest = next(line.split()[-1] for line in lock.splitlines() if line.strip().endswith(".dir"))
    head, _, tail = lock.rpartition(digest)
    publish_text(pipeline / "dvc.lock", head + "0" * 32 + ".dir" + tail)
    commit(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "read another artifacts/data than its stage made last" in row(out, "record")
    assert "the record of the run is incomplete or contradicts itself" in out.splitlines()[0]


def test_verify_says_of_a_stage_that_went_only_that_its_record_is_to_go(pipeline: Path, captrain: Captrain) -> None:
    lock = yaml.safe_load((pipeline / "dvc.lock").read_text())
    lock["stages"]["gone"] = {
        "cmd": "python gone.py",
        "deps": [{"path": "artifacts/data", "md5": "0" * 32 + ".dir"}, {"path": "results/read.json", "md5": "0" * 32}],
        "outs": [{"path": "results/gone.json", "md5": "0" * 32}],
    }
    publish_text(pipeline / "dvc.lock", yaml.safe_dump(lock))
    commit(pipeline)
    status, out, _ = captrain(pipeline, "verify")
    [fault] = [line for line in out.splitlines() if line.startswith("differs")]
    assert status == 1 and "records a stage that dvc.yaml has no more: delete its entry `gone:`" in fault


def test_verify_fails_when_what_a_stage_reads_is_not_in_git(pipeline: Path, captrain: Captrain) -> None:
    shell(pipeline, "git", "rm", "--quiet", "--cached", "read.py")
    shell(pipeline, "git", "commit", "--quiet", "--message", "forget it")
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "read.py is not committed" in row(out, "code")
    assert out.startswith("not verified: the code here is not that of the committed run\n")


def test_verify_fails_when_a_result_is_missing_or_a_stage_never_ran(pipeline: Path, captrain: Captrain) -> None:
    (pipeline / "results/read.json").unlink()
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "results/read.json is missing (read)" in row(out, "record")
    assert "edited" not in out
    lock = yaml.safe_load((pipeline / "dvc.lock").read_text())
    del lock["stages"]["read"]
    publish_text(pipeline / "dvc.lock", yaml.safe_dump(lock))
    status, out, _ = captrain(pipeline, "verify")
    assert status == 1 and "dvc.lock has no record of it (read)" in row(out, "record")


def test_from_a_folder_within_a_changed_parameter_is_named_alike(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "params.yaml", "seed: 0\nsection: {delta: 0.3, rest: 1}\n")
    publish_text(pipeline / "results/make/table.csv", "method,rate\nbase,0.25\ntrace,0.75\n")
    (pipeline / "within").mkdir()
    found = captrain(pipeline / "within", "verify", "--all")[1]
    assert "section.delta 0.2 -> 0.3 in params.yaml (make)" in row(found, "specification")
    assert found == captrain(pipeline, "verify", "--all")[1]


def test_a_stage_that_runs_is_not_verified(pipeline: Path, captrain: Captrain) -> None:
    publish_text(pipeline / "read.py", "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(3600)\n")
    command = [sys.executable, "-m", "dvc", "repro"]
    with subprocess.Popen(command, cwd=pipeline, stdout=subprocess.DEVNULL, start_new_session=True) as running:
        try:
            until(lambda: (pipeline / "begun").exists() or running.poll() is not None)
            status, _, err = captrain(pipeline, "verify")
        finally:
            os.killpg(running.pid, signal.SIGKILL)
    assert status == 2 and "a stage runs now" in err
