"""Full and read-only disks: each command ends with one message and leaves all files as they were.

Commands run in a finished pipeline, and the kernel refuses their writes: in a read-only folder, on a full disk (with
the temporary files on it), or by RLIMIT_FSIZE. Commands that write nothing still work. `tests/test_disk.py` tests the
stages.
"""

import importlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

import httpx
import pytest
from support.disk import FULL, full, limited, read_only, run_hurt
from support.needs import further
from support.waiting import PATIENCE

from captrain.cli import app
from captrain.comparison import sweep
from captrain.records import publish_text

LOGS = Path(__file__).parents[2] / "docs/examples/servicedesk.jsonl"
MOUNTS = pytest.mark.needs("mounts")
FAULTS: Mapping[str, Callable[[], None]] = {"read-only": read_only, "full": full, "ulimit -f": limited}
EACH = [pytest.param("read-only", marks=MOUNTS), pytest.param("full", marks=MOUNTS), "ulimit -f"]
WORDS: Mapping[str, tuple[str, ...]] = {
    "read-only": ("cannot be written to", "the disk is read-only"),
    "full": ("the disk is full",),
    "ulimit -f": ("a file would be larger than a limit allows (ulimit -f)",),
}
ROLLOUTS, OUT = "artifacts/rollouts/discovery.jsonl", f"{FULL}/out"
WRITING: Mapping[str, tuple[str, ...]] = {
    "diagnose": ("diagnose", "few.jsonl", "--out", OUT),
    "synthesize": ("synthesize", "invalid_call", "--out", OUT),
    "export, Inspect": ("export", ROLLOUTS, "--to", "inspect", "--out", OUT),
    "export, chats": ("export", ROLLOUTS, "--to", "openai", "--out", f"{OUT}.jsonl"),
    "export-environment": ("export-environment", "invalid_call", "--to", "trl", "--out", OUT),
    "validate": ("validate", "results/environments/invalid_call.py", "--out", OUT),
    "report": ("report", "--out", OUT),
}  # fmt: skip
"""Commands that write to a place that the user names."""
PLACED: Mapping[str, tuple[str, ...]] = {
    "run": ("run", "capabilities"),
    "benchmark install": ("benchmark", "install", "bfcl"),
    "captrain-sweep": ("captrain-sweep", "-m", "selection.delta=0.1"),
    "plan": ("plan",),
    "results": ("results",),
}
"""Commands that write to fixed places in the project, or nothing."""


@pytest.fixture(scope="module")
def project(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(smoke, tmp_path_factory.mktemp("project") / "repository", symlinks=True)
    for name in ("matplotlib.pyplot", "scipy.stats", "captrain.reporting.figures"):
        importlib.import_module(name)  # once, and not in every fork
    (folder / FULL).mkdir()
    publish_text(folder / "few.jsonl", "".join(LOGS.read_text().splitlines(keepends=True)[:30]))
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, except those of git, DVC and caches, but with temporary files."""
    paths = [path for path in folder.rglob("*") if not {".git", ".dvc"} & {*path.parts}]
    paths = [path for path in paths if ".cache" not in path.parts or path.suffix == ".tmp"]
    states = [(path, path.lstat()) for path in paths if not path.is_dir()]
    return {str(path): (state.st_size, state.st_mtime_ns) for path, state in states}


def run(
    folder: Path, fault: str, arguments: tuple[str, ...], beside: Callable[[], None] | None = None
) -> tuple[int, str]:
    """Run a command under a fault, with `beside` in a thread, and require that no file changed.

    Returns:
        Exit status and output.
    """

    def act() -> int:
        if beside:
            Thread(target=beside, daemon=True).start()
        is_sweep = arguments[0] == "captrain-sweep"
        sys.argv = [*arguments] if is_sweep else ["captrain", *arguments]
        try:
            (sweep.main if is_sweep else app.main)()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    before = contents(folder)
    status, text = run_hurt(folder, FAULTS[fault], act)
    assert contents(folder) == before and "stayed: []" in text, text
    assert "Traceback" not in text and "bug in captrain" not in text, text
    return status, text


def is_message(status: int, text: str, fault: str) -> bool:
    """Return whether a command ended with one message that names the fault of the disk."""
    message = text[text.find("error: ") :]
    is_one = status == 2 and text.count("error: ") == 1 and "\n  remedy: " in message
    return is_one and any(words in message for words in WORDS[fault])


@pytest.mark.parametrize("fault", EACH)
@pytest.mark.parametrize("command", further(WRITING, 3))
def test_a_command_on_a_full_disk_ends_with_one_message_and_changes_nothing(
    command: str, fault: str, project: Path
) -> None:
    status, text = run(project, fault, WRITING[command])
    assert is_message(status, text, fault), text


@pytest.mark.parametrize("command", PLACED)
def test_a_command_in_a_project_on_a_full_disk_works_or_ends_with_one_message(command: str, project: Path) -> None:
    status, text = run(project, "ulimit -f", PLACED[command])
    if command == "benchmark install":
        assert status == 2 and "could not be installed" in text and "free disk space" in text
        assert not (project / ".cache/installations/bfcl").exists()
    else:
        assert status == 0 or is_message(status, text, "ulimit -f"), text


@pytest.mark.parametrize("fault", EACH[1:])
def test_init_on_a_full_disk_leaves_nothing(fault: str, tmp_path: Path) -> None:
    (tmp_path / FULL).mkdir()
    status, text = run(tmp_path, fault, ("init", f"{FULL}/mine", "--benchmark", "calendar"))
    assert is_message(status, text, fault), text


@pytest.mark.parametrize("fault", EACH)
def test_a_server_still_answers_on_a_full_disk(fault: str, project: Path) -> None:
    with socket.socket() as channel:
        channel.bind(("127.0.0.1", 0))
        port = channel.getsockname()[1]

    def ask() -> None:
        messages = [{"role": "user", "content": "Close ticket T-1."}]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            while True:
                try:
                    reply = client.post(
                        "/v1/chat/completions", json={"model": "base", "messages": messages, "max_tokens": 4}
                    )
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
        print(f"answered with {reply.status_code}")
        os.kill(os.getpid(), signal.SIGINT)

    status, text = run(project, fault, ("serve", "--port", str(port)), ask)
    assert status == 0 and "answered with 200" in text, text
