"""A disk that takes no more, in every stage: one message, what there was is kept, and nothing half-written stays.

Each stage of the finished smoke pipeline runs again, its caches there, in a process of its own in which the kernel
refuses what it writes: by RLIMIT_FSIZE, as by a quota, and by a mount that is read-only, as disks are after an error.
"""

import ctypes
import hashlib
import os
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.smoke import STAGES
from support.training import stage

NEW_MOUNTS, READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 0x20000, 0x1, 0x20, 0x1000, 0x4000, 0x40000
NO_MOUNT = 77


def full() -> None:
    """Files of this process may not grow."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def read_only() -> None:
    """The current folder is read-only for this process alone."""
    libc, here = ctypes.CDLL(None, use_errno=True), str(Path.cwd()).encode()
    mounts = [(b"/", RECURSIVE | PRIVATE), (here, BIND), (here, BIND | REMOUNT | READ_ONLY)]
    if libc.unshare(NEW_MOUNTS) or any(libc.mount(place, place, None, flags, None) for place, flags in mounts):
        os._exit(NO_MOUNT)
    os.chdir(here)


def run_hurt(folder: Path, name: str, fault: Callable[[], None]) -> tuple[int, str]:
    """Exit status and words of a stage that runs in a fork of this process, under a fault."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        status = 99
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            # Those that are there write to files of the test runner's.
            sys.stdout = sys.stderr = os.fdopen(writing, "w", buffering=1)
            os.close(reading)
            os.chdir(folder)
            fault()
            status = stage(Path.cwd(), name)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(status)
    os.close(writing)
    with open(reading, errors="replace") as words:
        text = words.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def contents(folder: Path) -> dict[str, str]:
    paths = [path for top in ("results", "artifacts") for path in (folder / top).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def project(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(smoke, tmp_path_factory.mktemp("project") / "repository", symlinks=True)
    spec = yaml.safe_load((folder / "results/spec.yaml").read_text())
    spec["base"]["steps"] = 2  # the one stage that has no cache of its own
    (folder / "results/spec.yaml").write_text(yaml.safe_dump(spec))
    return folder


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (full, "error: a file would be larger than a limit allows (ulimit -f)"),
        (read_only, "error: the disk is read-only"),
    ],
)
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_on_a_disk_that_takes_no_more_ends_in_one_message_and_leaves_what_there_was(
    project: Path, name: str, fault: Callable[[], None], words: str
) -> None:
    before = contents(project)
    status, text = run_hurt(project, name, fault)
    if status == NO_MOUNT:
        pytest.skip("this process may not mount")
    assert status == 2 and "Traceback" not in text, text
    message = text[text.index("error: ") :]
    assert message.startswith(words) and "what is whole is kept" in message, text
    assert contents(project) == before and not [*project.rglob(".*.tmp")]
