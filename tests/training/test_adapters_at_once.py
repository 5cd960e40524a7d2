"""Trainings at once over one base and one fleet of servers: each comes to the adapter that it comes to alone."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
from support.letters import Letters
from support.servers import machine, servers
from support.training import inside
from support.training import job as letters_job
from support.waiting import until

from captrain.agents.servers import OwnFleet, fleets
from captrain.agents.vllm import VLLMPolicy
from captrain.contract import RunningEpisode
from captrain.errors import InfrastructureError, UserError
from captrain.run import LENDER, Machine, borrowed, launch
from captrain.training.jobs import LIBRARIES, Job, Trained
from captrain.training.runs import train

PLANS = {"first": (0, 16), "second": (1, 16), "third": (2, 16), "fourth": (0, 24)}
"""Seeds and rollouts of four jobs, of which two act with the same adapters at first."""


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """No server outlives its test, and none of another file's is there."""
    close_fleets()
    yield
    close_fleets()


def close_fleets() -> None:
    for fleet in fleets.values():
        fleet.close()
    fleets.clear()


@pytest.fixture
def jobs(tiny: Path, letters: Letters) -> list[Job]:
    """Four adapters to train in one environment, through one server."""
    path = letters("letters")
    path.write_text(path.read_text().replace("1 + i % 3", "1"))
    one = letters_job(tiny, path, rollouts=16, trainer={"epochs": 1}, policy={"max_tokens": 4})
    acting = one.policy.model_copy(update={"target": "captrain.agents.vllm.VLLMPolicy"})
    return [replace(one, name=name, seed=seed, rollouts=count, policy=acting) for name, (seed, count) in PLANS.items()]


def served(workers: int) -> Machine:
    return machine(replicas=1).model_copy(update={"workers": workers})


def trained(jobs: Sequence[Job], workers: int, folder: Path) -> list[Trained]:
    """Train as a stage does, by so many workers."""
    with inside(folder):
        return launch.run(
            train, [replace(job, machine=served(workers)) for job in jobs], served(workers), "adapters", LIBRARIES
        )


def own_fleets() -> list[OwnFleet]:
    return [fleet for fleet in fleets.values() if isinstance(fleet, OwnFleet)]


def test_four_jobs_over_one_server_get_each_the_adapter_that_it_gets_alone(jobs: list[Job], tmp_path: Path) -> None:
    alone = [trained([job], 1, tmp_path / job.name)[0] for job in jobs]
    at_once = trained(jobs, 4, tmp_path / "at_once")
    assert [one.digest for one in at_once] == [one.digest for one in alone]
    assert [one.history for one in at_once] == [one.history for one in alone]
    assert len({one.digest for one in alone}) == 4 and [len(one.history) for one in alone] == [2, 2, 2, 3]
    for one, other in zip(alone, at_once, strict=True):
        for path in (tmp_path / one.name / one.folder).iterdir():
            assert path.read_bytes() == (tmp_path / "at_once" / other.folder / path.name).read_bytes()
    # One server of this process, started once: it outlives the jobs, and nobody acts with their adapters any more.
    [fleet] = own_fleets()
    [replica] = fleet.servers
    assert replica.place.starts == 1
    unused(fleet)


def unused(fleet: OwnFleet) -> None:
    """Wait until nobody acts with an adapter."""
    until(lambda: not fleet._users())


def test_jobs_at_once_wait_for_answers_together(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = VLLMPolicy._answer

    def together(self: VLLMPolicy, play: RunningEpisode) -> Any:
        """Answer a job once all four wait for answers."""
        (tmp_path / f"waits-{os.getpid()}").touch()
        until(lambda: len([*tmp_path.glob("waits-*")]) == len(jobs))
        return answer(self, play)

    monkeypatch.setattr(VLLMPolicy, "_answer", together)
    assert len(trained([replace(job, rollouts=8) for job in jobs], 4, tmp_path / "at_once")) == len(jobs)
    assert not (tmp_path / f"waits-{os.getpid()}").exists()


def once_in(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[VLLMPolicy], None]) -> None:
    """Do harm once, as the second step of a job is played."""
    answer = VLLMPolicy._answer

    def harmed(self: VLLMPolicy, play: RunningEpisode) -> Any:
        seed, _, _, task, _ = play.key.split("/")
        with (folder / "played").open("a") as file:
            file.write(f"{play.key}\n")
        if int(seed) == PLANS[name][0] and int(task) >= 4:
            with suppress(FileExistsError):
                (folder / "harmed").open("x").close()
                harm(self)
        return answer(self, play)

    monkeypatch.setattr(VLLMPolicy, "_answer", harmed)


def test_a_worker_that_is_killed_hangs_no_other_and_each_job_comes_to_the_bytes_that_it_gives_alone(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = jobs[1:3]
    alone = [trained([job], 1, tmp_path / job.name)[0] for job in pair]
    once_in("second", tmp_path, monkeypatch, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    at_once = trained(pair, 2, tmp_path / "at_once")
    assert (tmp_path / "harmed").exists()
    # What lies in its checkpoint is not played again: a play asks as often as the same one does anywhere else.
    first = [
        key for key in (tmp_path / "played").read_text().split() if key.startswith("1/") and key.split("/")[3] < "4"
    ]
    assert first and len(first) == len({*first})
    [fleet] = own_fleets()
    unused(fleet)
    assert [one.digest for one in at_once] == [one.digest for one in alone]
    assert [replica.place.starts for replica in fleet.servers] == [1]


def test_a_server_that_dies_is_started_again_once_for_all_jobs(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = jobs[1:3]
    alone = [trained([job], 1, tmp_path / job.name)[0] for job in pair]
    [fleet] = own_fleets()
    [replica] = fleet.servers
    [server] = servers()
    once_in("second", tmp_path, monkeypatch, lambda _: os.kill(server, signal.SIGKILL))
    at_once = trained(pair, 2, tmp_path / "at_once")
    assert (tmp_path / "harmed").exists() and replica.place.starts == 2
    assert [(one.digest, one.errors) for one in at_once] == [(one.digest, 0) for one in alone]


def test_what_keeps_a_server_from_starting_reaches_whoever_trains(jobs: list[Job], tmp_path: Path) -> None:
    without = machine(replicas=1, python="/nowhere/python", command=["-c", ""]).model_copy(update={"workers": 2})
    with inside(tmp_path), pytest.raises(UserError, match="machine.vllm.python = '/nowhere/python' is not an interp"):
        launch.run(train, [replace(job, machine=without) for job in jobs[:2]], without, "adapters", LIBRARIES)


def test_a_lender_that_is_gone_or_silent_is_a_fault_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LENDER, str(tmp_path / "gone"))
    with pytest.raises(InfrastructureError, match="that lends inside is gone"), borrowed(inside, tmp_path, patience=1):
        pass
    with Listener(str(tmp_path / "silent"), "AF_UNIX") as listener:
        monkeypatch.setenv(LENDER, str(listener.address))
        with pytest.raises(InfrastructureError, match="not lent within 0.2"), borrowed(inside, tmp_path, patience=0.2):
            pass
