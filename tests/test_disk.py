"""A full or read-only disk in every stage that writes: one message, old outputs are kept, no half-written file stays.

Each stage of the finished smoke pipeline runs again with its caches, in a process in which the kernel refuses writes:
by RLIMIT_FSIZE, or by a read-only mount. `tests/cli/test_commands_on_disk.py` does this for commands.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.disk import limited, read_only, run_hurt
from support.needs import further
from support.smoke import SETTINGS, STAGES
from support.stages import stage
from support.training import ROOT

from captrain.run import compose_spec

SPEC = compose_spec("smoke", 0, SETTINGS, ROOT / "conf")
EMPTY = {f"evaluation@{name}" for name, row in (*SPEC.baselines, ("controls", SPEC.controls)) if not row.run}
"""Evaluations of rows that are off write only empty files, which also a full disk takes."""
WRITING = [name for name in STAGES if name not in EMPTY]


def contents(folder: Path) -> dict[str, str]:
    paths = [path for top in ("results", "artifacts") for path in (folder / top).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def project(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(smoke, tmp_path_factory.mktemp("project") / "repository", symlinks=True)
    spec = yaml.safe_load((folder / "results/spec.yaml").read_text())
    spec["base"]["steps"] = 2  # the only stage without a cache of its own
    (folder / "results/spec.yaml").write_text(yaml.safe_dump(spec))
    return folder


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (limited, "error: a file would be larger than a limit allows (ulimit -f)"),
        pytest.param(read_only, "error: the disk is read-only", marks=pytest.mark.needs("mounts")),
    ],
)
@pytest.mark.parametrize("name", further(WRITING, 6))
def test_a_stage_on_a_disk_that_takes_no_more_ends_in_one_message_and_leaves_what_there_was(
    project: Path, name: str, fault: Callable[[], None], words: str
) -> None:
    before = contents(project)
    status, text = run_hurt(project, fault, lambda: stage(Path.cwd(), name))
    assert status == 2 and "Traceback" not in text, text
    message = text[text.index("error: ") :]
    assert message.startswith(words) and "Finished work is kept" in message, text
    assert contents(project) == before and not [*project.rglob(".*.tmp")]
