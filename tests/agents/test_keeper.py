"""The process that keeps a server: who is asked to end, who is ended, and what status is told."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE

from captrain.agents.servers import KEEPER

SERVER = """
trap 'echo server >> asked' TERM
sh -c 'trap "echo engine >> asked" TERM; echo ready > ready; while [ ! -e over ]; do sleep .05; done' &
engine=$!
until wait $engine; [ $? -le 128 ]; do {deaf}; done
exit 7
"""
"""Starts an engine and waits for it; `deaf` is what is done after a signal."""


@pytest.fixture
def kept(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A server under its keeper, in a folder of its own, with grace of so many seconds."""
    grace, deaf = request.param
    command = [sys.executable, "-I", str(KEEPER), grace, "sh", "-c", SERVER.format(deaf=deaf)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        yield process


@pytest.mark.parametrize("kept", [("20", "touch over")], indirect=True)
def test_the_server_alone_is_asked_and_its_own_status_is_told(kept: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert kept.stdin is not None
    kept.stdin.close()
    assert kept.wait(PATIENCE) == 7
    assert (tmp_path / "asked").read_text().split() == ["server"]


@pytest.mark.parametrize("kept", [("0.2", ":")], indirect=True)
def test_one_that_does_not_end_is_killed_after_the_grace(kept: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert kept.stdin is not None
    kept.stdin.close()
    assert kept.wait(PATIENCE) == 128 + signal.SIGKILL
    assert (tmp_path / "asked").read_text().split() == ["server"]


@pytest.mark.parametrize("kept", [("20", ":")], indirect=True)
def test_a_keeper_that_is_terminated_ends_all_at_once(kept: subprocess.Popen[bytes], tmp_path: Path) -> None:
    kept.terminate()
    assert kept.wait(PATIENCE) == 128 + signal.SIGKILL
    assert not (tmp_path / "asked").exists()
