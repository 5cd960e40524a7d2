"""A fleet: some servers of one model, up while they are needed, and among them the one that is to answer next.

The servers of a stage are children of its process. Workers of it, and the processes of a training, ask these servers
themselves, and that process for all else (`captrain.execution.loans`): to start a server, to start it again, to serve
an adapter. An adapter is served under its content hash from a folder of the fleet's own, as long as anybody acts with
it: two trainings may act with equal adapters, and each may remove its folder at any time.
"""

import atexit
import os
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from captrain.config import VLLM
from captrain.errors import UserError
from captrain.execution import LENDER, borrowed
from captrain.models import adapter_config
from captrain.policies.servers import FRUITLESS, LOGS, RANKS, Answering, Place, Replica, Service, served_rank
from captrain.records import digest

PATIENCE = 3600.0
"""Seconds beyond the starts of a server until it must have been lent: others may be started before it."""

fleets: dict[tuple[str, str], "Fleet | BorrowedFleet"] = {}
"""Fleets of this process, by whom they are borrowed from ("": they are its own) and by their services."""
_lock = threading.Lock()


def fleet_of(service: Service) -> "Fleet | BorrowedFleet":
    """Return the servers of this process, or those of the process that it is a worker of; they are shared by all who
    need the same ones."""
    lender = os.environ.get(LENDER, "")
    key = (lender, digest(*service))
    with _lock:
        if key not in fleets:
            fleets[key] = BorrowedFleet(service) if lender else Fleet(service)
        return fleets[key]


def check_ranks(adapters: Iterable[Path], machine: VLLM) -> None:
    """Refuse what servers would not take, before any of it is played.

    Args:
        adapters: folders of plain PEFT adapters.
        machine: how the servers are started.

    Raises:
        UserError: an adapter has a higher rank than they are started for; a composition has the sum of its members'.
    """
    limit = served_rank(machine)
    for folder in adapters:
        rank = adapter_config(folder)["r"]
        if rank > limit:
            raise UserError(
                f"the adapter in {folder} has rank {rank}, and servers of policy vllm are started for {limit}",
                f"raise machine.vllm.max_loras ({machine.max_loras}: adapters that act together, each of rank "
                f"{machine.max_lora_rank}; vLLM takes {RANKS[-1]} at most), or compose fewer (router.p, router.most)",
            )


@contextmanager
def least_busy(replicas: Sequence[Answering], lock: threading.Lock) -> Iterator[Answering]:
    """Choose the replica with the fewest episodes, for one more."""
    with lock:
        replica = min(replicas, key=lambda candidate: candidate.episodes)
        replica.episodes += 1
    try:
        yield replica
    finally:
        with lock:
            replica.episodes -= 1


class Fleet:
    """Replicas of one model; started when they are needed, stopped with `close` or at the end of the process."""

    def __init__(self, service: Service) -> None:
        self.machine, numbers = service.machine, range(service.machine.replicas)
        self.replicas = [Replica(service, number) for number in numbers]
        self.folder = (LOGS / f"{os.getpid()}-{digest(*service)[:8]}").resolve()
        """Folder of the adapters that are served."""
        self._lock = threading.Lock()
        self._in_use: Counter[str] = Counter()
        self._plays = 0
        atexit.register(self.close)

    @contextmanager
    def serving(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """Start servers that are down, wake those that sleep, and let them serve these adapters under these digests;
        others that nobody acts with are let go. Servers that may sleep do so when nobody needs them any more.

        Raises:
            UserError: a server does not start, or does not take an adapter.
        """
        check_ranks(adapters.values(), self.machine)
        with self._lock:
            self._plays += 1
            placed = {name: self._placed(name, folder) for name, folder in adapters.items()}
            self._in_use.update(adapters.keys())
        try:
            with ThreadPoolExecutor(len(self.replicas)) as threads:
                # All to their ends, so that none is still being started when the first failure is raised.
                list(threads.map(lambda replica: replica.ready(), self.replicas))
                if adapters:
                    list(threads.map(lambda replica: replica.hold(placed, self._users), self.replicas))
                    self._clear()
            yield
        finally:
            with self._lock:
                self._in_use.subtract(adapters.keys())
                self._plays -= 1
                for replica in self.replicas if self.machine.sleeps and not self._plays else ():
                    replica.sleep()

    def _users(self) -> Collection[str]:
        with self._lock:
            return {name for name, count in self._in_use.items() if count > 0}

    def _placed(self, name: str, folder: Path) -> Path:
        """Link an adapter into the folder that it is served from."""
        place = self.folder / name
        if not place.exists():
            shutil.rmtree(aside := place.with_suffix(".new"), ignore_errors=True)
            shutil.copytree(folder, aside, copy_function=_link)
            aside.rename(place)
        return place

    def _clear(self) -> None:
        """Remove the folders of adapters that no server holds."""
        with self._lock:
            loaded = {name for replica in self.replicas for name in replica.adapters}
            for path in self.folder.iterdir():
                if path.name not in loaded and self._in_use[path.name] < 1:
                    shutil.rmtree(path)

    def replica(self) -> AbstractContextManager[Answering]:
        """Choose the replica with the fewest episodes, for one more."""
        return least_busy(self.replicas, self._lock)

    def close(self) -> None:
        """Stop all servers; they start again when they are needed again."""
        for replica in self.replicas:
            replica.dismiss()
        for replica in self.replicas:
            replica.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class BorrowedReplica(Answering):
    """Server of another process, which is asked here and mended there."""

    place = Place(0, 0, LOGS)

    def __init__(self, service: Service, number: int) -> None:
        super().__init__(service, number)
        self._useful = 0
        """Start since which the server has been marked useful."""

    @property
    def log(self) -> Path:
        """See `Answering`."""
        return self.place.log

    def follow(self, place: Place) -> None:
        """Ask the server where it has been started since."""
        if place.starts > self.starts:
            self.place, self._port = place, place.port
            self.__dict__.pop("client", None)
            self.starts = place.starts

    def mark_useful(self) -> None:
        """See `Answering`."""
        if self._useful < self.starts:
            self._useful = self.starts
            with borrowed(_marked, self.service, self.number, patience=PATIENCE):
                pass

    def mend(self, starts: int, request: str = "") -> None:
        """See `Answering`."""
        with borrowed(_mended, self.service, self.number, starts, request, patience=_patience(self.machine)) as place:
            self.follow(place)


class BorrowedFleet:
    """The servers of another process, with an own count of the episodes that each is asked in."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.replicas = [BorrowedReplica(service, number) for number in range(service.machine.replicas)]
        self._lock = threading.Lock()

    @contextmanager
    def serving(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """See `Fleet.serving`.

        Raises:
            InfrastructureError: the process of the servers is gone.
        """
        with borrowed(_served, self.service, dict(adapters), patience=_patience(self.service.machine)) as places:
            with self._lock:
                for replica, place in zip(self.replicas, places, strict=True):
                    replica.follow(place)
            yield

    def replica(self) -> AbstractContextManager[Answering]:
        """See `Fleet.replica`."""
        return least_busy(self.replicas, self._lock)

    def close(self) -> None:
        """Leave the servers to the process that started them."""


def _patience(machine: VLLM) -> float:
    return FRUITLESS * machine.start_timeout + PATIENCE


# What a process of servers lends.


def _own(service: Service) -> Fleet:
    fleet = fleet_of(service)
    assert isinstance(fleet, Fleet)
    return fleet


@contextmanager
def _served(service: Service, adapters: Mapping[str, Path]) -> Iterator[list[Place]]:
    fleet = _own(service)
    with fleet.serving(adapters):
        yield [replica.place for replica in fleet.replicas]


@contextmanager
def _mended(service: Service, number: int, starts: int, request: str) -> Iterator[Place]:
    replica = _own(service).replicas[number]
    replica.mend(starts, request)
    yield replica.place


@contextmanager
def _marked(service: Service, number: int) -> Iterator[None]:
    _own(service).replicas[number].mark_useful()
    yield
