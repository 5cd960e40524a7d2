"""The keeper of a server: which processes it stops, and its exit status."""

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
"""A server that starts an engine and waits for it."""


@pytest.fixture
def kept(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server under its keeper with a grace period in seconds."""
    grace, deaf = request.param
    command = [sys.executable, "-I", str(KEEPER), grace, "sh", "-c", SERVER.format(deaf=deaf)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        yield process


@pytest.mark.parametrize("kept", [("20", "touch over")], indirect=True)
def test_only_the_server_is_asked_to_stop_and_its_status_is_returned(
    kept: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert kept.stdin is not None
    kept.stdin.close()
    assert kept.wait(PATIENCE) == 7
    assert (tmp_path / "asked").read_text().split() == ["server"]


@pytest.mark.parametrize("kept", [("0.2", ":")], indirect=True)
def test_a_server_that_does_not_stop_is_killed_after_the_grace_period(
    kept: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert kept.stdin is not None
    kept.stdin.close()
    assert kept.wait(PATIENCE) == 128 + signal.SIGKILL
    assert (tmp_path / "asked").read_text().split() == ["server"]


@pytest.mark.parametrize("kept", [("20", ":")], indirect=True)
def test_a_terminated_keeper_kills_the_group_at_once(kept: subprocess.Popen[bytes], tmp_path: Path) -> None:
    kept.terminate()
    assert kept.wait(PATIENCE) == 128 + signal.SIGKILL
    assert not (tmp_path / "asked").exists()
