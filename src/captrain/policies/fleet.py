"""A fleet: some servers of one model, up while they are needed, and among them the one that is to answer next."""

import atexit
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from captrain.config import VLLM
from captrain.errors import UserError
from captrain.models import adapter_config
from captrain.policies.servers import RANKS, Replica, served_rank


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


class Fleet:
    """Replicas of one model; started when they are needed, stopped with `close` or at the end of the process.

    Args:
        machine: how many, and how they are started.
        source: the model, as servers are told.
        name: under which it is served.
        settings: arguments that decide what servers answer.
        timeout: seconds for one request.
    """

    def __init__(self, machine: VLLM, source: str, name: str, settings: Collection[str], timeout: float) -> None:
        self.machine, numbers = machine, range(machine.replicas)
        self.replicas = [Replica(machine, source, name, settings, number, timeout) for number in numbers]
        self._lock = threading.Lock()
        self._in_use: Counter[str] = Counter()
        atexit.register(self.close)

    @contextmanager
    def serving(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """Start servers that are down, and let them serve these adapters under these digests; others that nobody acts
        with are let go.

        Raises:
            UserError: a server does not start, or does not take an adapter.
        """
        check_ranks(adapters.values(), self.machine)
        with self._lock:
            self._in_use.update(adapters.keys())
            users = {name: count for name, count in self._in_use.items() if count > 0}
        try:
            with ThreadPoolExecutor(len(self.replicas)) as threads:
                # All to their ends, so that none is still being started when the first failure is raised.
                list(threads.map(lambda replica: replica.ready(), self.replicas))
                if adapters:
                    list(threads.map(lambda replica: replica.hold(adapters, users), self.replicas))
            yield
        finally:
            with self._lock:
                self._in_use.subtract(adapters.keys())

    @contextmanager
    def replica(self) -> Iterator[Replica]:
        """Choose the replica with the fewest episodes, for one more."""
        with self._lock:
            replica = min(self.replicas, key=lambda candidate: candidate.episodes)
            replica.episodes += 1
        try:
            yield replica
        finally:
            with self._lock:
                replica.episodes -= 1

    def close(self) -> None:
        """Stop all servers; they start again when they are needed again."""
        for replica in self.replicas:
            replica.dismiss()
        for replica in self.replicas:
            replica.stop()
