"""Servers of our own under vLLM's interface: child processes that are started, watched, restarted and stopped here.

A server that has died, or no longer says that it is healthy, is started again with the adapters it had; one that does
so again and again, or never gets healthy, ends the run with its last words. Adapters are loaded under their content
hash, and before anything is asked of a name it is looked up what the server understands by it. Which port, process and
GPUs those are is no part of any result.

A fleet is some servers of one model, up while they are needed. The servers of a stage are children of its process.
Workers of it, and the processes of a training, ask these servers themselves, and that process for all else
(`captrain.run.loans`): to start a server, to start it again, to serve an adapter. An adapter is served from a
folder of the fleet's own, as long as anybody acts with it: two trainings may act with equal adapters, and each may
remove its folder at any time.
"""

import atexit
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from captrain.errors import UserError
from captrain.models import Endpoint, TransientFault, adapter_config
from captrain.records import digest
from captrain.run import LENDER, VLLM, borrowed

LOGS = Path(".cache/servers")
KEEPER = Path(__file__).with_name("keeper.py")
GRACE = 20.0
"""Seconds that a server may take to finish what it has begun and to end."""
POLL = 0.1
HEALTH = 30.0
"""Seconds in which a server must say that it is healthy, once it is suspected."""
FRUITLESS = 3
"""Starts of one server without a single answer between them, after which it is given up."""
FATAL = 3
"""Deaths of servers during the same request, after which it is sent no more: others are answered between them."""
PATIENCE = 3600.0
"""Seconds beyond the starts of a server until it must have been lent: others may be started before it."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
TAIL = 20
"""Last lines of a server's log that are shown."""
ERRORS = 3
"""Last errors before these that are shown."""
RAISED = re.compile(r"\b[A-Z]\w*(Error|Exception): .*")


def served_rank(machine: VLLM) -> int:
    """Return the least --max-lora-rank that takes the sum of as many adapters as may act together, or else vLLM's
    largest.

    Raises:
        UserError: a single adapter is beyond that.
    """
    if machine.max_lora_rank > RANKS[-1]:
        raise UserError(
            f"machine.vllm.max_lora_rank = {machine.max_lora_rank}, and vLLM takes adapters up to {RANKS[-1]}",
            "set it to the rank of the adapters that are trained",
        )
    return next((rank for rank in RANKS if rank >= machine.max_lora_rank * machine.max_loras), RANKS[-1])


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


class Service(NamedTuple):
    """All that decides which servers are started: how (`machine`), with which model (`source`, a folder or a name),
    under which `name`, with which arguments that decide what is answered, and with how many seconds for a request."""

    machine: VLLM
    source: str
    name: str
    settings: tuple[str, ...]
    timeout: float


class Place(NamedTuple):
    """A server as it was started last: its port, the number of its starts, and the file of its output."""

    port: int
    starts: int
    log: Path


class Replica(Endpoint):
    """A server that this process asks, and that another one has started and mends.

    Args:
        service: what it serves.
        number: among its kind.
    """

    proxied = False  # a proxy has no business between processes of one machine

    def __init__(self, service: Service, number: int) -> None:
        self.service, self.machine, self.number = service, service.machine, number
        self.name = self.served = service.name
        self.retries, self.timeout = 0, service.timeout  # what to do after a fault is known here, not to the library
        self.place = Place(0, 0, LOGS)
        self.endpoint = self.key = ""  # no variable of the environment names them
        self._label = f"server {number} of policy vllm"
        self.episodes = 0
        self.fruitful = 0
        """Start since which the server has answered something, or after which it was stopped on purpose."""

    def _url(self) -> str:
        return f"http://127.0.0.1:{self.place.port}/v1"

    @property
    def _secret(self) -> str:
        return "none-is-asked-for"

    def _mistake(self, status: int, message: str) -> UserError:
        return UserError(
            f"{self._label} refuses a request to {self.name} ({message})",
            f"correct the settings of policy vllm or machine.vllm.arguments; {self.place.log} has what it said",
        )

    def follow(self, place: Place) -> None:
        """Ask the server where it has been started since."""
        if place.starts > self.place.starts:
            self.place = place
            self.__dict__.pop("client", None)

    def mend(self, starts: int, request: str = "", fruitful: int = 0) -> None:
        """Start the server again after a fault, if it is dead or not healthy.

        Args:
            starts: of the server when the request was sent; one that was started since is left alone.
            request: what was sent, by a digest.
            fruitful: start since which it has answered another process.

        Raises:
            UserError: it is of no use to start it yet another time.
        """
        arguments = self.service, self.number, starts, request, max(fruitful, self.fruitful)
        with borrowed(_mended, *arguments, patience=FRUITLESS * self.machine.start_timeout + PATIENCE) as place:
            self.follow(place)


class Server(Replica):
    """A server that is a child of this process: started, watched and mended here."""

    def __init__(self, service: Service, number: int) -> None:
        super().__init__(service, number)
        self.adapters: dict[str, Path] = {}
        self._deaths = Counter[str]()
        """Deaths of this server, by the requests that were under way."""
        self._process: subprocess.Popen[bytes] | None = None
        self._asleep = False
        self._lock = threading.RLock()

    def ready(self) -> None:
        """Start the server if it is not there, and wake it if it sleeps.

        Raises:
            UserError: there is no such interpreter, or the server does not get healthy, or serves another model.
        """
        with self._lock:
            if self._asleep:
                self._turn("/wake_up")
            self._asleep = False
            if self._process is None:
                self._start()

    def sleep(self) -> None:
        """Let the server give its GPUs to others; it keeps its weights and adapters in the memory of the machine."""
        with self._lock:
            if self._process is not None:
                self._asleep = True
                self._turn("/sleep?level=1")

    def _turn(self, path: str) -> None:
        """Let the server fall asleep or wake; one that fails at it is stopped, and started again when it is needed."""
        try:
            self._control(path, {})
        except TransientFault as fault:
            print(f"{self._label} does not answer {path} ({fault}): it is stopped", file=sys.stderr)
            self._kill()

    def mend(self, starts: int, request: str = "", fruitful: int = 0) -> None:
        """See `Replica`."""
        with self._lock:
            self.fruitful = max(fruitful, self.fruitful)
            problem = ""
            if starts == self.place.starts:
                problem = self._fault(HEALTH) if self._process is not None else "was stopped"
                if not problem:
                    return
            self._deaths[request] += request != ""
            if self._deaths[request] >= FATAL:
                raise self._useless(f"died {FATAL} times while it answered one and the same request")
            if problem:
                print(f"{self._label} {problem}: it is started again", file=sys.stderr)
                self._kill()
                self._start()

    def _start(self) -> None:
        log, starts = LOGS / f"{os.getpid()}-{self.number}.log", self.place.starts
        if starts - self.fruitful >= FRUITLESS:
            raise self._useless(f"was started {FRUITLESS} times and never answered a request")
        interpreter = shutil.which(os.path.expanduser(self.machine.python))
        if interpreter is None:
            raise UserError(
                f"machine.vllm.python = {self.machine.python!r} is not an interpreter",
                "install vLLM in an environment of its own (python -m venv, pip install vllm) and name its interpreter",
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.follow(Place(free.getsockname()[1], starts + 1, log))
        command = [
            *(sys.executable, "-I", str(KEEPER), str(GRACE), interpreter, *self.machine.command, self.service.source),
            *("--host", "127.0.0.1", "--port", str(self.place.port), "--served-model-name", self.name, "--enable-lora"),
            *("--max-lora-rank", str(served_rank(self.machine)), "--max-loras", str(self.machine.max_loras)),
            *self.service.settings,
            *self.machine.arguments,
        ]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab" if starts else "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=server_environment(self.machine, self.number),
                start_new_session=True,
            )
        if problem := self._fault(self.machine.start_timeout):
            raise self._useless(problem)
        try:
            self._check(self.name, self.service.source)
            for name, folder in self.adapters.items():
                self._load(name, folder)
        except TransientFault as fault:
            raise self._useless(f"fails at once ({fault})") from None

    def _fault(self, seconds: float) -> str:
        """Wait until the server says that it is healthy, at most so many seconds; return why it is not, "" if it is."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            with suppress(TransientFault):
                self._control("/health", timeout=HEALTH)
                return ""
            if time.monotonic() > deadline:
                return f"is not healthy after {seconds:g} seconds"
            time.sleep(POLL)
        status = self._process.wait()
        return f"died ({f'signal {status - 128}' if status > 128 else f'exit status {status}'})"

    def _useless(self, problem: str) -> UserError:
        self._kill()
        log = self.place.log
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        # What it died of may stand far above what is said at its end.
        errors = {match[0]: None for line in lines[:-TAIL] if (match := RAISED.search(line))}
        last_words = [*[*errors][-ERRORS:], *lines[-TAIL:]]
        output = "".join(f"\n    {line}" for line in last_words) or " (it said nothing)"
        return UserError(
            f"{self._label} {problem}:{output}",
            f"correct machine.vllm (python, arguments, gpus, start_timeout) and run again; {log} has all it said",
        )

    def _control(self, path: str, body: Mapping[str, object] | None = None, timeout: float = 600.0) -> str:
        """Send a request other than for completions, GET without a body, and return the answer's text.

        Raises:
            TransientFault: a fault of the server, or no answer.
            UserError: it refuses the request.
        """
        import httpx2

        url = f"http://127.0.0.1:{self.place.port}{path}"
        settings = {"cast_to": httpx2.Response, "options": {"timeout": timeout}}
        if body is None:
            return self._sent(self.client.get, path=url, **settings).text
        return self._sent(self.client.post, path=url, body=body, **settings).text

    def _check(self, name: str, root: str) -> bool:
        """Return whether the server has a model of this name.

        Raises:
            UserError: it has, and it is another one.
        """
        models = {model["id"]: model for model in json.loads(self._control("/v1/models"))["data"]}
        if name not in models:
            return False
        model = models[name]
        # vLLM tells where it has a model from; the embedded server also what it is.
        if model.get("root") != root or (name != self.name and model.get("digest", name) != name):
            raise UserError(
                f"{self._label} serves {model.get('root')} ({model.get('digest', 'no digest')}) as {name}, and asked "
                f"was {root}",
                "remove what machine.vllm.arguments say of models and adapters",
            )
        return True

    def hold(self, adapters: Mapping[str, Path], users: Callable[[], Collection[str]]) -> None:
        """Serve adapters, each under its digest, and let go of those that nobody acts with.

        Args:
            adapters: digest -> folder, which stays as long as somebody acts with it.
            users: says which adapters anybody acts with at this moment, those of the caller among them.
        """
        with self._lock:
            for name in adapters.keys() - self.adapters.keys():
                self._change(name, adapters[name])
            for name in self.adapters.keys() - set(users()):
                self._change(name, None)

    def _change(self, name: str, folder: Path | None) -> None:
        """Load an adapter from its folder, after a fault once more, or unload it (None); a server that has to be
        started again for it comes with the adapters as they are then."""
        before, starts = self.adapters, self.place.starts
        remaining = {adapter: path for adapter, path in before.items() if adapter != name}
        self.adapters = remaining if folder is None else {**remaining, name: folder}
        try:
            try:
                if folder is not None:
                    self._load(name, folder)
                else:
                    self._control("/v1/unload_lora_adapter", {"lora_name": name})
            except TransientFault:
                self.mend(starts)
                if self.place.starts == starts:
                    if folder is not None:
                        self._load(name, folder)
                    elif self._check(name, str(before[name])):
                        raise  # Had only its answer been lost, the adapter would be gone.
        except BaseException as fault:
            self.adapters = before
            if not isinstance(fault, TransientFault):
                raise
            raise UserError(
                f"{self._label} does not {f'take adapter {name} from {folder}' if folder else f'let go of {name}'} "
                f"({fault})",
                f"see {self.place.log}"
                + (f"; machine.vllm.max_lora_rank is {self.machine.max_lora_rank}" if folder else ""),
            ) from None

    def _load(self, name: str, folder: Path) -> None:
        if not self._check(name, str(folder)):
            self._control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            if not self._check(name, str(folder)):
                raise TransientFault(f"model server: it took adapter {name} and does not list it")

    def dismiss(self) -> None:
        """Ask the server to end, and all that it has started; it may finish first what it has begun."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """Stop the server and wait for its end."""
        with self._lock:
            self.dismiss()
            with suppress(subprocess.TimeoutExpired):
                if self._process is not None:
                    self._process.wait(GRACE + POLL)
            self._kill()
            self.adapters, self.fruitful = {}, self.place.starts  # earlier starts count no more

    def _kill(self) -> None:
        process, self._process, self._asleep = self._process, None, False
        if process is not None:
            process.terminate()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def server_environment(machine: VLLM, number: int) -> dict[str, str]:
    """Make the environment of a server: ours without what would lead its interpreter to our packages, and with its
    GPUs, counted from the last visible one.

    Raises:
        UserError: there are not so many.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if machine.sleeps:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if machine.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            import torch

            visible = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = [gpu for gpu in visible.split(",") if gpu]
        if len(gpus) < machine.replicas * machine.gpus:
            raise UserError(
                f"machine.vllm asks for {machine.replicas} x {machine.gpus} GPUs, and {len(gpus)} are visible",
                "ask for fewer replicas or gpus; 0 gpus where the servers are to find their own",
            )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[::-1][number * machine.gpus :][: machine.gpus])
    return env


class Fleet:
    """The servers of another process, with an own count of the episodes that each is asked in."""

    def __init__(self, service: Service) -> None:
        self.service, self.machine = service, service.machine
        self.replicas: Sequence[Replica] = [Replica(service, number) for number in range(self.machine.replicas)]
        self._lock = threading.Lock()

    @contextmanager
    def serving(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """Start servers that are down, wake those that sleep, and let them serve these adapters under these digests;
        others that nobody acts with are let go. Servers that may sleep do so when nobody needs them any more.

        Raises:
            UserError: a server does not start, or does not take an adapter.
            InfrastructureError: the process of the servers is gone.
        """
        arguments = self.service, dict(adapters), [replica.fruitful for replica in self.replicas]
        with borrowed(_served, *arguments, patience=FRUITLESS * self.machine.start_timeout + PATIENCE) as places:
            with self._lock:
                for replica, place in zip(self.replicas, places, strict=True):
                    replica.follow(place)
            yield

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
        """Leave the servers to the process that started them."""


class OwnFleet(Fleet):
    """Servers of this process; started when they are needed, stopped with `close` or at the end of the process."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.servers = [Server(service, number) for number in range(self.machine.replicas)]
        self.replicas = self.servers
        self.folder = (LOGS / f"{os.getpid()}-{digest(*service)[:8]}").resolve()
        """Folder of the adapters that are served."""
        self._in_use: Counter[str] = Counter()
        self._plays = 0
        atexit.register(self.close)

    @contextmanager
    def serving(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """See `Fleet`."""
        check_ranks(adapters.values(), self.machine)
        with self._lock:
            self._plays += 1
            for name, folder in adapters.items():
                if not (self.folder / name).exists():
                    shutil.rmtree(aside := self.folder / f"{name}.new", ignore_errors=True)
                    shutil.copytree(folder, aside)
                    aside.rename(self.folder / name)
            self._in_use.update(adapters.keys())
        try:
            with ThreadPoolExecutor(len(self.servers)) as threads:
                # All to their ends, so that none is still being started when the first failure is raised.
                list(threads.map(Server.ready, self.servers))
                if adapters:
                    copies = {name: self.folder / name for name in adapters}
                    list(threads.map(lambda server: server.hold(copies, self._users), self.servers))
                    # Folders of adapters that no server holds are removed.
                    with self._lock:
                        loaded = {name for server in self.servers for name in server.adapters}
                        for path in self.folder.iterdir():
                            if path.name not in loaded and self._in_use[path.name] < 1:
                                shutil.rmtree(path)
            yield
        finally:
            with self._lock:
                self._in_use.subtract(adapters.keys())
                self._plays -= 1
                for server in self.servers if self.machine.sleeps and not self._plays else ():
                    server.sleep()

    def _users(self) -> Collection[str]:
        with self._lock:
            return {name for name, count in self._in_use.items() if count > 0}

    def close(self) -> None:
        """Stop all servers; they start again when they are needed again."""
        for server in self.servers:
            server.dismiss()
        for server in self.servers:
            server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


fleets: dict[tuple[str, str], Fleet] = {}
"""Fleets of this process, by whom they are borrowed from ("": they are its own) and by their services."""
_lock = threading.Lock()


def fleet_of(service: Service) -> Fleet:
    """Return the servers of this process, or those of the process that it is a worker of; they are shared by all who
    need the same ones."""
    lender = os.environ.get(LENDER, "")
    key = (lender, digest(*service))
    with _lock:
        if key not in fleets:
            fleets[key] = Fleet(service) if lender else OwnFleet(service)
        return fleets[key]


# What a process of servers lends.


@contextmanager
def _served(service: Service, adapters: Mapping[str, Path], fruitful: Sequence[int]) -> Iterator[list[Place]]:
    fleet = fleet_of(service)
    for replica, starts in zip(fleet.replicas, fruitful, strict=True):
        replica.fruitful = max(starts, replica.fruitful)
    with fleet.serving(adapters):
        yield [replica.place for replica in fleet.replicas]


@contextmanager
def _mended(service: Service, number: int, starts: int, request: str, fruitful: int) -> Iterator[Place]:
    replica = fleet_of(service).replicas[number]
    replica.mend(starts, request, fruitful)
    yield replica.place
